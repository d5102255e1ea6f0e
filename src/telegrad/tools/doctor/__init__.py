"""Finds out whether telegrad can work here, and says what to do where it cannot: `telegrad doctor`.

Nothing is concluded that could be tried: sockets are opened, memory is shared, and two workers are
started and measured.
"""

from telegrad.tools.doctor.finding import Finding, Level
from telegrad.tools.doctor.host import look_at_host
from telegrad.tools.doctor.workers import try_two_workers

__all__ = ["Finding", "Level", "look_at_host", "try_two_workers"]
