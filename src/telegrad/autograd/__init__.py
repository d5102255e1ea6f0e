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
    """The engine of a process in which no agent runs: that of `_init`.

    Raises:
        NotInitialized: it has none.
    """
    if _without_agent is None:
        error = current.not_initialized()
        phrase = "Need to initialize distributed autograd using torch.distributed.autograd._init()"
        raise NotInitialized(str(error) + torch_phrase(phrase))
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
        roots: a list of real scalars with a history; usually one, `[loss]`.
        retain_graph: keeps the graph on all workers, so that another pass may go through it.
        create_graph: makes the gradients differentiable themselves, across workers.

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
    """The gradients of this worker's leaves that passes of the context have gathered.

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
    """A thread's stay in a context. It ends with its block, however that ends."""

    def __init__(self, entered: DistAutogradContext) -> None:
        self._entered = entered
        self._is_over = False

    def end(self, *, is_late: bool = False) -> None:
        """Does nothing if that has been done.

        Args:
            is_late: Ctrl-C has interrupted what should have ended it, at any step.
        """
        if self._is_over:
            return
        try:
            self._end()
        except TelegradError:
            if not is_late:
                raise
        except BaseException:  # Ctrl-C: this thread must not stay in it
            with contextlib.suppress(ContextError):
                self._end()
            raise
        finally:
            self._is_over = True
            _stays.pop(self, None)

    def _end(self) -> None:
        try:
            engine = _engine()
        except NotInitialized:  # shut down inside of the block, or forked: the context is gone
            if thread_context() == self._entered.id:
                set_thread_context(NO_CONTEXT)
        else:
            engine.release(self._entered.id)


_stays: dict[_Stay, weakref.ref[context]] = {}
"""Those that are not over. The end of the `context` object, if that comes first, ends the stay: its
block was ended by Ctrl-C, or no `with` statement has made it.

A destructor would do the same, but would run after each block, and Python drops a Ctrl-C that comes
while one runs. This only runs where a Ctrl-C is on its way already."""


class _Exit:
    """`__exit__` of a context, of which the block is told apart from what leaves it.

    Ctrl-C may come when `__exit__` has been called and has not done anything yet: no code of ours
    runs then that could still leave the context. But the `with` statement keeps what it got as
    `__exit__` until the block is over, however that ends, and nothing else keeps it. So its end is
    the end of the block, and leaves the context if nothing else has.
    """

    def __get__(self, instance: context | None, owner: type[context]) -> Callable[..., None]:
        if instance is None:
            return _leave_block
        block = partial(_leave_block, instance)
        instance.block = weakref.ref(block, lambda _: instance.leave(is_late=True))
        return block


class context:
    """Records what is needed to run backward through other workers, while the block lasts.

    Example::

        with context() as context_id:
            ...
            backward(context_id, [loss])

    Raises:
        ContextError: this thread is in a context already.
    """

    block: weakref.ref[partial[None]] | None = None
    _stay: _Stay | None = None

    def __enter__(self) -> int:
        engine = _engine()
        if thread_context() != NO_CONTEXT:
            gc.collect()  # one that Ctrl-C has ended, and that its traceback still keeps
        before = thread_context()
        try:
            self.autograd_context = engine.new()
            self._stay = stay = _Stay(self.autograd_context)
            _stays[stay] = weakref.ref(self, lambda _: stay.end(is_late=True))
            return self.autograd_context.id
        except BaseException:  # Ctrl-C, say, once it is there: no block will end it
            if thread_context() != before:
                with contextlib.suppress(ContextError):
                    engine.release(thread_context())
            raise

    if TYPE_CHECKING:

        def __exit__(self, *error: object) -> None: ...

    else:
        __exit__ = _Exit()

    def leave(self, *, is_late: bool = False) -> None:
        """Ends it, unless that has been done."""
        if self._stay is not None:
            self._stay.end(is_late=is_late)
        self.block = None  # not before: it ends the stay if Ctrl-C has kept this from doing so


@contextlib.contextmanager
def join_context(context_id: int) -> Iterator[int]:
    """Lets this thread take part in a context that another thread of this worker has opened.

    Threads do not inherit a context: a call from one that has none is not recorded, and its result
    leads no gradient back. The context must stay open until the block ends.

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
