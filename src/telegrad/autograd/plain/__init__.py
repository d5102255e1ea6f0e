"""Plain autograd: `loss.backward()` goes through calls on other workers.

A recorded call is two nodes in the caller's own graph (`nodes`) and an entry at the callee
(`entries`). Since each worker's graph has an edge wherever there is a dependency, torch's engine
is the distributed engine: hooks, `retain_graph`, `inputs=`, several roots and unused results work
as in one process, and `backward` raises what goes wrong.

A call goes from `engine` to `sent_calls`, and at its worker to `serving`. On the way back its
`record` sends gradients, by `messages`, to the `passes` of that worker. `lifetimes` ends what is
left.

Doors: `record_call` and `Residents` for callers; `export_leaves` for functions;
`attach`, which gives every worker an engine; `nodes`, `notes`, `passes`, `record` and `segments`
for pipelines and pictures.
"""

from __future__ import annotations

from telegrad.autograd.plain.engine import PlainEngine, Submitted, record_call
from telegrad.autograd.plain.messages import EXTENSION, engine_here
from telegrad.autograd.plain.nodes import refuse_transforms
from telegrad.autograd.plain.record import Residents
from telegrad.autograd.plain.sent_calls import is_packing_arguments, refuse_context
from telegrad.autograd.plain.serving import ArgumentFailed, Stays, export_leaves
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
    "refuse_context",
    "refuse_transforms",
]


def attach() -> None:
    """Gives every worker that starts from now on an engine."""
    extensions[EXTENSION] = PlainEngine
