"""Autograd contexts, as torch has them: each gathers the gradients of one distributed pass.

`registry` makes, enters and ends the contexts of a worker, `message_nodes` are the two ends of a
recorded message in the graph, and `lifetime` decides when all workers forget a context.

Doors: `attachment`, `context`, `message_nodes`, `registry`.
"""
