"""Attaches autograd to agents, as an extension of every worker that starts.

The rpc layer does not depend on autograd. It offers three places, which this module fills: the
extensions of a worker, the recorder that an agent calls for every message, and the implementation
of `RRef.backward`.
"""

from __future__ import annotations

from typing import Any

from telegrad import autograd
from telegrad.autograd.passes.engine import AutogradEngine
from telegrad.autograd.thread_state import is_torch_state_used, wait_at_exit
from telegrad.ids import first_of_life
from telegrad.rpc.calls.agent import Agent
from telegrad.rpc.group import current
from telegrad.rpc.group.worker import extensions
from telegrad.rpc.references.rref import RRef, set_rref_backward

__all__ = ["attach"]

_NAME = "autograd"


def attach() -> None:
    """Every worker that starts from now on gets an engine."""
    extensions[_NAME] = _Attached
    autograd.set_engine_lookup(_engine_here)
    set_rref_backward(_backward_from)


class _Attached:
    def __init__(self, agent: Agent) -> None:
        wait_at_exit()
        self.engine = AutogradEngine(agent, first_id=first_of_life(agent.directory.life))
        agent.service.recorder = self.engine

    def close(self) -> None:
        self.engine.close()

    def needs_close(self) -> bool:
        return is_torch_state_used()


def _engine_here() -> AutogradEngine:
    worker = current.here.worker
    if worker is None:
        current.refuse_if_forked()
        return autograd.engine_without_agent()
    engine: Any = (
        worker.agent.service.recorder
    )  # set above; None while it starts, and once it is closed
    return engine or autograd.engine_without_agent()


def _backward_from(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    if rref.is_owner():
        autograd.backward(context_id, [rref.local_value()], retain_graph)
        return
    worker = current.current()
    worker.agent.call(
        rref.owner().id, _backward_at_owner, (rref, context_id, retain_graph), timeout=0
    )


def _backward_at_owner(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    rref.backward(context_id, retain_graph)
