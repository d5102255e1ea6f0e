"""A model trained over three processes of this machine, with what it proves: `make demo`.

An embedding table lives on a parameter server, an encoder on a second worker, a head on the driver.
Each step is one call, which calls on, one backward pass through all three, and one step of an
optimizer on each. The demo trains it, checks its gradients against the same model in one process,
and times a step beside torch's own RPC.
"""

from telegrad.demo.command import main

__all__ = ["main"]
