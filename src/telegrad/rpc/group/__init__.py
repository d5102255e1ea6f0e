"""Who belongs to the group: how workers meet, what each of them is told, and how they leave.

Doors: `current` (the agent of this process), `worker`, `worker_info`, `options`, `rendezvous`,
`members`.
"""
