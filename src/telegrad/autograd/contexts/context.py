"""The autograd context of one worker: what it recorded, and the gradients it has collected."""

from __future__ import annotations

import reprlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from telegrad.autograd.contexts.message_nodes import SendFunction
from telegrad.autograd.local import leaves
from telegrad.autograd.thread_state import carry, drop, peek, stash, swap
from telegrad.rpc.seams import NO_CONTEXT

if TYPE_CHECKING:
    from telegrad.autograd.local.waves import LeafGradient
    from telegrad.autograd.passes.live_pass import Arrival, LivePass

__all__ = [
    "CarriedContext",
    "DistAutogradContext",
    "EnteredContext",
    "Gradients",
    "check_context_id",
    "set_thread_context",
    "thread_context",
]

_CURRENT_CONTEXT = "telegrad.autograd.context"

_FEW = 32  # gradients: asking each for its size takes a few microseconds
_LITTLE = 1 << 16  # elements of them
_numel = torch.Tensor.numel


thread_context: Callable[[], int] = partial(peek, _CURRENT_CONTEXT, NO_CONTEXT)
"""The context id that was set on this thread, or `NO_CONTEXT`."""

set_thread_context: Callable[[int], None] = partial(stash, _CURRENT_CONTEXT)


class EnteredContext:
    """Makes a context current on this thread for a block, then the one before."""

    __slots__ = ("_before", "_context_id")

    def __init__(self, context_id: int) -> None:
        self._context_id = context_id
        self._before = NO_CONTEXT

    def __enter__(self) -> None:
        self._before = swap(_CURRENT_CONTEXT, self._context_id, NO_CONTEXT)

    def __exit__(self, *error: object) -> None:
        stash(_CURRENT_CONTEXT, self._before)


class CarriedContext:
    """For a block, this thread's context follows the work that torch hands to its own threads. The
    thread must have a context."""

    __slots__ = ("_is_carried",)

    def __enter__(self) -> None:
        self._is_carried = carry(_CURRENT_CONTEXT)

    def __exit__(self, *error: object) -> None:
        if self._is_carried:
            drop(_CURRENT_CONTEXT)


def check_context_id(context_id: object, phrase: str = "") -> None:
    """
    Args:
        phrase: the end of the message.

    Raises:
        TypeError: it is not the id of a context.
    """
    if not isinstance(context_id, int):
        raise TypeError(
            "context_id must be the integer that `with dist_autograd.context() as context_id` "
            f"gives, got {reprlib.repr(context_id)}{phrase}"
        )


class Gradients(dict[torch.Tensor, torch.Tensor]):
    """Gradients by their leaves."""

    def __missing__(self, leaf: object) -> NoReturn:
        raise KeyError(
            "there is no gradient for this tensor in the context: the loss does not use it, it is "
            "not a leaf, or it is a copy of one on another worker. Was backward() called?"
        )


class DistAutogradContext:
    """One worker's part of a context. Made by `context()`, or when a message of it arrives."""

    # Guarded by `lock`, like what follows it below. One wave at a time: a thread that brings work
    # while there is no runner becomes the runner, until `work` is empty.
    runner: int | None = None
    batch: Sequence[Arrival] = ()  # what the runner runs now
    is_released = False
    _changed: threading.Condition | None = None

    _roots: Sequence[weakref.ref[torch.Tensor]] = ()

    def __init__(self, context_id: int) -> None:
        self.id = context_id
        self.sends: dict[int, SendFunction] = {}
        self.recvs: dict[int, Any] = {}
        self.contacts: set[int] = set()
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._sums: set[int] = set()  # ids of leaves whose gradients are sums made here
        self.lock = threading.RLock()  # guards all that follows
        self.work: deque[Arrival] = deque()
        self.passes: dict[int, LivePass] = {}
        self.ended: set[int] = set()
        """Failed passes: what still arrives for them is dropped."""
        self.incidents: set[int] = set()

    def _context_id(self) -> int:
        """The id that names this context on every worker."""
        return self.id

    def _send_functions(self) -> dict[int, Any]:
        """Message id → the function of a message that this worker sent."""
        return dict(self.sends)

    def _recv_functions(self) -> dict[int, Any]:
        """Message id → the node of a message that this worker received."""
        return self.recvs.copy()

    def _known_worker_ids(self) -> set[int]:
        """The workers that this one exchanged messages of the context with."""
        return self.contacts.copy()

    def is_light(self) -> bool:
        """Whether it keeps little memory alive: no graph that has not run, and few gradients."""
        for sent in tuple(self.sends.values()):
            if not sent.is_spent and not sent.is_of_leaves:
                return False
        gradients = tuple(self.gradients.values())
        return len(gradients) <= _FEW and sum(map(_numel, gradients)) <= _LITTLE

    def wait_until(self, is_so: Callable[[], Any]) -> None:
        """Waits for a change of what the lock guards; see `notify`."""
        with self.lock:
            if self._changed is None:  # rare: `backward` usually waits on a lane instead
                self._changed = threading.Condition(self.lock)
            self._changed.wait_for(is_so)

    def notify(self) -> None:
        """Wakes the threads in `wait_until`. Call it with the lock held."""
        if self._changed is not None:
            self._changed.notify_all()

    def note_roots(self, roots: Iterable[torch.Tensor]) -> None:
        """Notes where a pass begins, for pictures of the graph. Does not keep the roots alive."""
        self._roots = list(map(weakref.ref, roots))

    def living_roots(self) -> list[torch.Tensor]:
        """The roots of the latest pass that began here, if the program still has them."""
        return [root for reference in self._roots if (root := reference()) is not None]

    def add_gradients(self, found: Iterable[LeafGradient], *, create_graph: bool) -> None:
        """Adds what a wave found at the leaves. One wave at a time calls this."""
        gradients = self.gradients
        for leaf, gradient, replaced in found:
            known = len(gradients)
            total = gradients.setdefault(leaf, gradient)  # hashing a tensor is a Python call
            if len(gradients) > known:
                continue
            if total is replaced:
                gradients[leaf] = gradient
            elif replaced is not None:
                gradients[leaf] = leaves.add(total, gradient - replaced)
                self._sums.add(id(leaf))
            elif create_graph or total.requires_grad:
                gradients[leaf] = leaves.add(total, gradient)
                self._sums.discard(id(leaf))
            elif id(leaf) in self._sums and total.layout is torch.strided:
                # What a wave found may share memory with other gradients; a sum made here does not.
                total.add_(gradient)
            else:
                gradients[leaf] = leaves.add(total, gradient)
                self._sums.add(id(leaf))

    def __repr__(self) -> str:
        return f"DistAutogradContext(context_id={self.id})"
