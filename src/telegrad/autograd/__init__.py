"""Distributed autograd: one backward pass through functions that ran on several workers.

::

    import telegrad.autograd as dist_autograd

    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.add, args=(t1, t2)).sum()
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)

The functions here act on the engine of the worker that this thread belongs to.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from telegrad.autograd.contexts.context import (
    DistAutogradContext,
    set_thread_context,
    thread_context,
)
from telegrad.autograd.passes.engine import AutogradEngine
from telegrad.drop_in import torch_phrase
from telegrad.errors import ContextError, NotInitialized, TelegradError
from telegrad.rpc.group import current
from telegrad.rpc.seams import NO_CONTEXT

__all__ = [
    "AutogradEngine",
    "DistAutogradContext",
    "backward",
    "context",
    "engine_without_agent",
    "get_gradients",
    "is_available",
    "join_context",
    "set_engine_lookup",
]


_without_agent: AutogradEngine | None = None


def engine_without_agent() -> AutogradEngine:
    """The engine of a process without an agent, which `_init` makes.

    Raises:
        NotInitialized: there is none.
    """
    if _without_agent is None:
        error = current.not_initialized()
        phrase = "Need to initialize distributed autograd using torch.distributed.autograd._init()"
        raise NotInitialized(str(error) + torch_phrase(phrase))
    return _without_agent


_engine: Callable[[], AutogradEngine] = engine_without_agent


def set_engine_lookup(lookup: Callable[[], AutogradEngine]) -> None:
    """Sets the function that finds the engine of this thread."""
    global _engine
    _engine = lookup


def is_available() -> bool:
    """True: telegrad works with every torch installation."""
    return True


def _init(worker_id: int) -> None:
    """Makes contexts and passes work in this process alone, without an agent."""
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

    Gradients are summed in the context, on the worker of each leaf, never in `.grad`.

    Args:
        context_id: the id that `context()` returned.
        roots: a list of real scalars with a history; usually one, `[loss]`.
        retain_graph: keeps the graph on all workers for another pass.
        create_graph: makes the gradients themselves differentiable, across workers.

    Raises:
        ContextError: there is no such context, or it was released during the pass.
        BackwardError: a root cannot be differentiated, or the pass failed on some worker. The
            context stays usable.
        WorkerLost: a worker of the context died.

    Example::

        with context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.mul, args=(x, w)).sum()
            backward(context_id, [loss])
    """
    _engine().backward(context_id, roots, retain_graph, create_graph=create_graph)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of this worker's leaves in the context.

    Raises:
        ContextError: there is no such context on this worker.
        TypeError: `context_id` is not an id.
    """
    return _engine().get_gradients(context_id)


def _leave_block(
    entered: context,
    kind: type[BaseException] | None = None,
    error: BaseException | None = None,
    traceback: TracebackType | None = None,
) -> None:
    entered.leave()


class _Stay:
    """A thread's stay in a context, which ends with its block, however that ends."""

    def __init__(self, entered: DistAutogradContext) -> None:
        self._entered = entered
        self._is_over = False

    def end(self, *, is_late: bool = False) -> None:
        """Ends the stay, unless it has ended.

        Args:
            is_late: Ctrl-C has interrupted the code that should have ended it.
        """
        if self._is_over:
            return
        try:
            self._end()
        except TelegradError:
            if not is_late:
                raise
        except BaseException:  # such as Ctrl-C: this thread must not stay in it
            with contextlib.suppress(ContextError):
                self._end()
            raise
        finally:
            self._is_over = True
            _stays.pop(self, None)

    def _end(self) -> None:
        try:
            engine = _engine()
        except NotInitialized:  # shut down inside the block, or forked: the context is gone
            if thread_context() == self._entered.id:
                set_thread_context(NO_CONTEXT)
        else:
            engine.release(self._entered.id)


_stays: dict[_Stay, weakref.ref[context]] = {}
"""The stays that have not ended. If the `context` object dies first, its stay ends: Ctrl-C has
ended the block, or there was no `with` statement.

A destructor could do the same, but it would run after each block, and Python drops a Ctrl-C that
arrives in a destructor. This callback runs only after a Ctrl-C."""


class _Exit:
    """The `__exit__` of a context: a new object for each block.

    Ctrl-C may arrive when `__exit__` has been called and has not yet done anything: then no code
    is left that could leave the context. But the `with` statement holds the only reference to this
    object until the block is over, however that ends. So when the object dies, the block is over,
    and its death leaves the context.
    """

    def __get__(self, instance: context | None, owner: type[context]) -> Callable[..., None]:
        if instance is None:
            return _leave_block
        block = partial(_leave_block, instance)
        instance.block = weakref.ref(block, lambda _: instance.leave(is_late=True))
        return block


class context:
    """Records, inside its block, what a backward pass through other workers needs.

    Example::

        with context() as context_id:
            ...
            backward(context_id, [loss])

    Raises:
        ContextError: this thread is already in a context.
    """

    block: weakref.ref[partial[None]] | None = None
    _stay: _Stay | None = None

    def __enter__(self) -> int:
        engine = _engine()
        if thread_context() != NO_CONTEXT:
            gc.collect()  # frees a context that Ctrl-C has ended and a traceback keeps
        before = thread_context()
        try:
            self.autograd_context = engine.new()
            self._stay = stay = _Stay(self.autograd_context)
            _stays[stay] = weakref.ref(self, lambda _: stay.end(is_late=True))
            return self.autograd_context.id
        except BaseException:  # such as Ctrl-C, after the context was made
            if thread_context() != before:
                with contextlib.suppress(ContextError):
                    engine.release(thread_context())
            raise

    if TYPE_CHECKING:

        def __exit__(self, *error: object) -> None: ...

    else:
        __exit__ = _Exit()

    def leave(self, *, is_late: bool = False) -> None:
        """Leaves the context, unless that has been done."""
        if self._stay is not None:
            self._stay.end(is_late=is_late)
        self.block = None  # last: its death ends the stay if Ctrl-C has prevented that


@contextlib.contextmanager
def join_context(context_id: int) -> Iterator[int]:
    """Lets this thread take part in a context that another thread of this worker has opened.

    Threads do not inherit a context: a call from a thread without one is not recorded, and no
    gradient goes back through its result. The context must stay open until the block ends.

    Raises:
        ContextError: there is no such context on this worker.

    Example::

        def forward(part):
            with join_context(context_id):
                return rpc.rpc_sync("worker1", model, args=(part,))

        with context() as context_id, ThreadPoolExecutor() as pool:
            outputs = list(pool.map(forward, parts))
            backward(context_id, [torch.cat(outputs).sum()])
    """
    engine = _engine()
    engine.retrieve(context_id)
    with engine.enter(context_id):
        yield context_id


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
