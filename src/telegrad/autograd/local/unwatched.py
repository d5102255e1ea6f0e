"""Which leaves have no hooks.

torch cannot tell whether a leaf's AccumulateGrad node has hooks. The only way is to register one
and look at its neighbours, which takes longer than the hook itself. But every registration of a
hook, of whatever kind, makes a `RemovableHandle`, and torch counts these. So a leaf that had no
hooks has none as long as that count stays, even if its node has died with the graphs that lead to
it and been replaced.

Hooks that C++ registers are not counted. Only DistributedDataParallel does that; its parameters are
recognized otherwise (`grad_field`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from telegrad.autograd.local.grad_field import needs_grad_field
from telegrad.autograd.torch_internals import (
    has_default_group,
    has_post_accumulate_hooks,
    has_tensor_hooks,
    hooks_ever_registered,
)

__all__ = ["OwnHook", "Unwatched", "unwatched"]


class _Verdict(weakref.ref[torch.Tensor]):
    """A leaf, and the count at which it had no hooks."""

    __slots__ = ("count", "key")
    count: int
    key: int


class OwnHook(functools.partial[Any]):
    """A hook of telegrad's. It does nothing outside its own wave."""


class Unwatched:
    """The leaves of this process without hooks. Thread-safe."""

    def __init__(self) -> None:
        self._verdicts: dict[int, _Verdict] = {}
        self._own = 0  # registrations that do not count
        self._registering: dict[object, None] = {}  # a token for each such registration under way

    def register(self, register: Callable[[Any], Any], hook: Callable[..., Any]) -> Any:
        """Registers a hook of telegrad's own; returns its handle."""
        token = object()
        self._registering[token] = None
        try:
            handle = register(OwnHook(hook))
            self._own += 1
        finally:
            del self._registering[token]
        return handle

    def _count(self) -> int | None:
        """How many hooks of the program have ever been registered. None while that is unknown: a
        count that is too high could become right later, with other hooks."""
        own = self._own
        count = hooks_ever_registered() - own
        return None if self._registering or self._own != own else count

    def are_hooks_possible(self) -> bool:
        """Whether the program has ever registered a hook in this process."""
        return self._count() != 0

    def includes(self, node: Any) -> bool:
        """Whether no hook has to see the total gradient of the leaf of this AccumulateGrad node."""
        return self.include_all((node,))

    def include_all(self, nodes: Iterable[Any]) -> bool:
        """The same for several."""
        verdicts, count = self._verdicts, self._count()
        may_be_of_ddp = has_default_group()
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
        """Whether hooks run after the AccumulateGrad node of a leaf."""
        return not self.includes(node) and self._has_hooks(node.register_hook)

    def _is_hooked(self, node: Any, leaf: torch.Tensor) -> bool:
        if has_tensor_hooks(leaf) or has_post_accumulate_hooks(leaf):
            return True
        return self._has_hooks(node.register_hook) or self._has_hooks(node.register_prehook)

    def _has_hooks(self, register: Callable[[Any], Any]) -> bool:
        """Whether the program has registered any there. Other waves and threads may be looking at
        the same time, with hooks like this one."""
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
