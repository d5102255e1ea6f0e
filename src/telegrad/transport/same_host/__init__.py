"""What makes connections between processes of one host faster. All of it is optional.

Doors: `shm`, `shared_buffers`, `mailbox`, `spinning`, `processors`.
"""
