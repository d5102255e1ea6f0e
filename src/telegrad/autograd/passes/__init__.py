"""Backward passes of contexts: gradients travel from worker to worker until nothing is left to run.

`protocol` is the state machine that decides when a pass is over or stuck. `live_pass` is a pass on
one worker, `registry` has all of them and ends them, and `engine` runs them.

Doors: `engine`, `live_pass`, `protocol`, `roots`.
"""
