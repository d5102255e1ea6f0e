"""Finds out whether telegrad can work here, and says what to do where it cannot: `telegrad doctor`.

Nothing is concluded that could be tried: sockets are opened, memory is shared, and two workers are
started and measured.
"""
