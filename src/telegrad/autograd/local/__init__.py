"""One worker's part of a pass: which nodes may run, in which waves, and what happens at the leaves.

torch's own engine runs every wave. `frontier` decides which nodes have all of their gradients.

Doors: `local_pass`, `leaves`, `walks`, `waves`.
"""
