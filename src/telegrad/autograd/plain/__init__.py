"""Plain autograd: `loss.backward()` goes through calls on other workers.

A recorded call is two nodes in the caller's own graph (`nodes`) and an entry at the callee
(`entries`). Since each worker's graph has an edge wherever there is a dependency, torch's engine
is the distributed engine: hooks, `retain_graph`, `inputs=`, several roots and unused results work
as in one process, and `backward` raises what goes wrong. `passes` is what a worker does with
gradients that come, `calls` makes and serves the calls.

Doors: `record_call` and `Residents` for callers; `export_leaves` for functions;
`attach`, which gives every worker an engine; `calls`, `nodes`, `notes`, `passes` and `segments` for
pipelines and pictures.
"""

from __future__ import annotations

from telegrad.autograd.plain.calls import (
    ArgumentFailed,
    PlainEngine,
    Residents,
    Stays,
    Submitted,
    engine_here,
    export_leaves,
    is_packing_arguments,
    record_call,
)
from telegrad.autograd.plain.nodes import refuse_transforms
from telegrad.rpc.group.worker import extensions

__all__ = [
    "ArgumentFailed",
    "PlainEngine",
    "Residents",
    "Stays",
    "Submitted",
    "attach",
    "engine_here",
    "export_leaves",
    "is_packing_arguments",
    "record_call",
    "refuse_transforms",
]


def attach() -> None:
    """Gives every worker that starts from now on an engine."""
    extensions["plain"] = PlainEngine
