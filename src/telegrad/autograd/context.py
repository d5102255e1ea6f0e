"""The autograd context of one worker: what it recorded, and the gradients it has gathered."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from telegrad.autograd import leaves
from telegrad.autograd.nodes import Sent
from telegrad.autograd.thread_state import peek, stash
from telegrad.rpc.seams import NO_CONTEXT

if TYPE_CHECKING:
    from telegrad.autograd.passes import Arrival, LivePass
    from telegrad.autograd.waves import LeafGradient

__all__ = [
    "DistAutogradContext",
    "EnteredContext",
    "set_thread_context",
    "thread_context",
]

_CURRENT_CONTEXT = "telegrad.autograd.context"


def thread_context() -> int:
    """The context id that was set on this thread, or `NO_CONTEXT`."""
    context_id: int = peek(_CURRENT_CONTEXT, NO_CONTEXT)
    return context_id


def set_thread_context(context_id: int) -> None:
    stash(_CURRENT_CONTEXT, context_id)


class EnteredContext:
    """Makes a context current on this thread for a block, then the one before."""

    __slots__ = ("_before", "_context_id")

    def __init__(self, context_id: int) -> None:
        self._context_id = context_id
        self._before = NO_CONTEXT

    def __enter__(self) -> None:
        self._before = thread_context()
        set_thread_context(self._context_id)

    def __exit__(self, *error: object) -> None:
        set_thread_context(self._before)


class DistAutogradContext:
    """What one worker knows of one context. Made by `context()`, or when a message brings it."""

    def __init__(self, context_id: int) -> None:
        self.id = context_id
        self.sends: dict[int, Sent] = {}
        self.recvs: dict[int, tuple[Any, torch.Tensor]] = {}
        self.contacts: set[int] = set()
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._sums: set[torch.Tensor] = set()
        # One wave at a time: whoever finds `is_running` unset runs what is in `work`, the others
        # leave what they bring there. The condition guards what follows; backward() waits on it.
        self.changed = threading.Condition(threading.Lock())
        self.work: deque[Arrival] = deque()
        self.is_running = False
        self.is_released = False
        self.passes: dict[int, LivePass] = {}
        self.ended: set[int] = set()
        """Passes that failed: what still arrives for them is dropped."""
        self.incidents: set[int] = set()
        self._roots: list[weakref.ref[torch.Tensor]] = []

    def _context_id(self) -> int:
        """The id that names this context on every worker."""
        return self.id

    def _send_functions(self) -> dict[int, Any]:
        """Message id → the node of a message that this worker sent."""
        return {id_: sent.node for id_, sent in self.sends.copy().items()}

    def _recv_functions(self) -> dict[int, Any]:
        """Message id → the node of a message that this worker received."""
        return {id_: node for id_, (node, _) in self.recvs.copy().items()}

    def _known_worker_ids(self) -> set[int]:
        """The workers that this one exchanged messages of the context with."""
        return self.contacts.copy()

    def note_roots(self, roots: Iterable[torch.Tensor]) -> None:
        """A pass begins from these. Pictures of the graph begin there too; a context keeps none of
        them alive."""
        self._roots = [weakref.ref(root) for root in roots]

    def living_roots(self) -> list[torch.Tensor]:
        """The roots of the latest pass that began here, as far as the program still has them."""
        return [root for reference in self._roots if (root := reference()) is not None]

    def add_gradients(self, found: Iterable[LeafGradient], *, create_graph: bool) -> None:
        """Sums what a wave found at the leaves. One wave at a time calls this."""
        for leaf, gradient, replaced in found:
            total = self.gradients.get(leaf)
            if total is None or total is replaced:
                self.gradients[leaf] = gradient
            elif replaced is not None:
                self.gradients[leaf] = leaves.add(total, gradient - replaced)
                self._sums.add(leaf)
            elif create_graph or total.requires_grad:
                self.gradients[leaf] = leaves.add(total, gradient)
                self._sums.discard(leaf)
            else:
                # What a wave found may share memory with other gradients; a sum is our own.
                may_change = leaf in self._sums
                self.gradients[leaf] = leaves.add(total, gradient, in_place=may_change)
                self._sums.add(leaf)

    def __repr__(self) -> str:
        return f"DistAutogradContext(context_id={self.id})"
