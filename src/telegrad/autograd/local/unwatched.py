"""Which leaves nobody watches.

Torch has no way to see whether a leaf's AccumulateGrad node has hooks, other than to register one
and to look at its neighbours, which takes longer than the hook itself. But every registration of a
hook, of whatever kind, makes a `RemovableHandle`, and torch counts these. So a leaf that had no
hooks has none as long as that count stays, whichever node it has by then: its node dies with the
graphs that lead to it, and a new one begins without.

The count does not tell of hooks that are registered in C++. Only DistributedDataParallel does that;
its parameters are known otherwise (`leaves`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from telegrad.autograd.local.grad_field import is_ddp_possible, needs_grad_field

__all__ = ["OwnHook", "Unwatched", "unwatched"]


class _Verdict(weakref.ref[torch.Tensor]):
    """A leaf, and the count at which it had no hooks."""

    __slots__ = ("count", "key")
    count: int
    key: int


class OwnHook(functools.partial[Any]):
    """A hook that is of no matter to others: it does nothing in any wave but its own."""


class Unwatched:
    """What is known of the leaves of this process. Threads may use it freely."""

    def __init__(self) -> None:
        self._verdicts: dict[int, _Verdict] = {}
        self._own = 0  # handles that were made here, and are of no matter
        self._registering: dict[object, None] = {}  # a token for each that is just being made

    def register(self, register: Callable[[Any], Any], hook: Callable[..., Any]) -> Any:
        """Registers a hook that is of no matter to others; returns its handle."""
        token = object()
        self._registering[token] = None
        try:
            handle = register(OwnHook(hook))
            self._own += 1
        finally:
            del self._registering[token]
        return handle

    def _count(self) -> int | None:
        """How many hooks of matter have ever been registered; None if that is just not known: too
        high a count might come true later, when what it counts has become another."""
        own = self._own
        count = RemovableHandle.next_id - own
        return None if self._registering or self._own != own else count

    def are_hooks_possible(self) -> bool:
        """Whether any hook of matter was ever registered in this process."""
        return self._count() != 0

    def includes(self, node: Any) -> bool:
        """Whether nothing is registered that must see the total gradient of a leaf, whose
        AccumulateGrad node this is."""
        return self.include_all((node,))

    def include_all(self, nodes: Iterable[Any]) -> bool:
        """The same for several."""
        verdicts, count = self._verdicts, self._count()
        may_be_of_ddp = is_ddp_possible()
        for node in nodes:
            leaf = node.variable
            verdict = verdicts.get(id(leaf))
            if verdict is None or verdict.count != count or verdict() is not leaf:
                if self._is_hooked(node, leaf):
                    return False
                if count is not None:
                    verdict = _Verdict(leaf, self._forget)
                    verdict.count, verdict.key = count, id(leaf)
                    verdicts[id(leaf)] = verdict
            if may_be_of_ddp and needs_grad_field(leaf, True):
                return False
        return True

    def has_post_hooks(self, node: Any) -> bool:
        """Whether hooks run after the AccumulateGrad node of a leaf, and see its gradient."""
        return not self.includes(node) and self._has_hooks(node.register_hook)

    def _is_hooked(self, node: Any, leaf: torch.Tensor) -> bool:
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            return True
        return self._has_hooks(node.register_hook) or self._has_hooks(node.register_prehook)

    def _has_hooks(self, register: Callable[[Any], Any]) -> bool:
        """Whether any of matter is registered there. There is no other way to get at them than to
        register one, as other waves and other threads that look do, too."""
        handle = self.register(register, _nothing)
        hooks = tuple(handle.hooks_dict_ref().values())
        handle.remove()
        return not all(type(hook) is OwnHook for hook in hooks)

    def _forget(self, verdict: weakref.ref[torch.Tensor]) -> None:
        assert isinstance(verdict, _Verdict)
        if self._verdicts.get(verdict.key) is verdict:
            del self._verdicts[verdict.key]


def _nothing(*grads: Any) -> None:
    return None


unwatched = Unwatched()
