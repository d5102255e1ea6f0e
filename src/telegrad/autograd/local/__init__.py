"""One worker's part of a pass: which nodes may run, in which waves, and what happens at the leaves.

Torch's own engine runs every wave. `frontier` knows which nodes have all of their gradients.

Doors: `local_pass`, `leaves`, `walks`, `waves`.
"""
