"""Backward passes of contexts: gradients sent from worker to worker until nothing is left to run.

`protocol` is the state machine: how the workers know that a pass is over, or stuck. `engine`
carries out what it says.

Doors: `engine`, `live_pass`, `protocol`.
"""
