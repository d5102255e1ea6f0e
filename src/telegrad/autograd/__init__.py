"""Distributed autograd: one backward pass through functions that ran on several workers.

::

    import telegrad.autograd as dist_autograd

    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.add, args=(t1, t2)).sum()
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)

The functions here act on the engine of the agent that this thread acts for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from telegrad.autograd.context import DistAutogradContext, set_thread_context, thread_context
from telegrad.autograd.engine import AutogradEngine
from telegrad.errors import ContextError, NotInitialized, TelegradError
from telegrad.rpc.seams import NO_CONTEXT

__all__ = [
    "AutogradEngine",
    "DistAutogradContext",
    "backward",
    "context",
    "engine_without_agent",
    "get_gradients",
    "is_available",
    "set_engine_lookup",
]


_without_agent: AutogradEngine | None = None


def engine_without_agent() -> AutogradEngine:
    """The engine of a process in which no agent runs: that of `_init`.

    Raises:
        NotInitialized: it has none.
    """
    if _without_agent is None:
        raise NotInitialized(
            "Need to initialize distributed autograd using telegrad.autograd._init(): no agent "
            "runs in this process; call telegrad.rpc.init_rpc first"
        )
    return _without_agent


_engine: Callable[[], AutogradEngine] = engine_without_agent


def set_engine_lookup(lookup: Callable[[], AutogradEngine]) -> None:
    """Sets how the engine is found that this thread acts on."""
    global _engine
    _engine = lookup


def is_available() -> bool:
    """True: telegrad needs nothing that a torch installation could lack."""
    return True


def _init(worker_id: int) -> None:
    """Lets contexts and passes work on this process alone, before or without an agent."""
    global _without_agent
    _without_agent = AutogradEngine(None, worker_id)


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    create_graph: bool = False,
) -> None:
    """Runs the backward pass from `roots` through all workers of the context.

    Gradients are summed into the context on the worker of each leaf, never into `.grad`.

    Args:
        context_id: what `context()` gave.
        roots: real scalars with a history; usually one, the loss.
        retain_graph: keeps the graph on all workers, so that another pass may go through it.
        create_graph: makes the gradients differentiable themselves, across workers.

    Raises:
        ContextError: there is no such context, or it was released during the pass.
        BackwardError: a root cannot be differentiated, or the pass failed on some worker. The
            context stays usable.
        WorkerLost: a worker of the context died.

    Example::

        with context() as context_id:
            loss = rpc.rpc_sync("worker1", model, args=(x,)).sum()
            backward(context_id, [loss])
    """
    _engine().backward(context_id, roots, retain_graph, create_graph=create_graph)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of this worker's leaves that passes of the context have gathered.

    Raises:
        ContextError: there is no such context on this worker.
    """
    return _engine().get_gradients(context_id)


class context:
    """Records what is needed to run backward through other workers, while the block lasts.

    Example::

        with context() as context_id:
            ...
            backward(context_id, [loss])

    Raises:
        ContextError: this thread is in a context already.
    """

    def __enter__(self) -> int:
        engine = _engine()
        before = thread_context()
        try:
            self.autograd_context = engine.new()
            return self.autograd_context.id
        except BaseException:  # Ctrl-C, say, once it is there: no block will end it
            if thread_context() != before:
                with contextlib.suppress(ContextError):
                    engine.release(thread_context())
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._leave()
        except TelegradError:
            raise
        except BaseException:  # Ctrl-C: this thread must not stay in it
            with contextlib.suppress(ContextError):
                self._leave()
            raise

    def _leave(self) -> None:
        try:
            engine = _engine()
        except NotInitialized:  # shut down inside of the block, or forked: the context is gone
            if thread_context() == self.autograd_context.id:
                set_thread_context(NO_CONTEXT)
        else:
            engine.release(self.autograd_context.id)


def _new_context() -> DistAutogradContext:
    return _engine().new()


def _release_context(context_id: int) -> None:
    _engine().release(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return _engine().retrieve(context_id)


def _current_context() -> DistAutogradContext:
    return _engine().current()


def _is_valid_context(context_id: int) -> bool:
    return _engine().find(context_id) is not None


def _get_max_id() -> int:
    return _engine().max_id


def _get_debug_info() -> dict[str, int]:
    return _engine().debug_info()
