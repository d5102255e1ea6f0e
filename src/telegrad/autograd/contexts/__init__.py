"""Autograd contexts, as in torch: each collects the gradients of a distributed pass.

`registry` makes, enters and ends the contexts of a worker. `message_nodes` are the two ends of a
recorded message in the graph. `lifetime` decides when each worker forgets a context.

Doors: `attachment`, `context`, `message_nodes`, `registry`.
"""
