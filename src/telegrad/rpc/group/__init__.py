"""Who belongs to the group: how workers meet, their options, and how they leave.

Doors: `current` (the worker of this process), `worker`, `worker_info`, `options`, `rendezvous`,
`directory`, `members`.
"""
