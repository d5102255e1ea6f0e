"""Optional accelerators between processes of one host.

Doors: `shm`, `shared_buffers`, `spinning`.
"""
