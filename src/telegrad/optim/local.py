"""The part of a distributed optimizer on the worker that owns the parameters.

A parameter's `.grad` belongs to the program on its worker. The gradients of a context are put there
only while the optimizer steps, and then what was there is restored. The optimizers of two trainers
may share a parameter, so parameters have locks: those that an optimizer is the first to use share
one. A step takes all locks of its parameters, always in the order in which they were made.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from telegrad import autograd, rpc
from telegrad.rpc import RRef

__all__ = [
    "Group",
    "LocalOptimizer",
    "LocalScheduler",
    "new_local_optimizer",
    "new_local_scheduler",
    "unstepped_leaves",
]

_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Group:
    """A parameter group: parameters of one worker, and their options."""

    params: list[RRef[torch.Tensor]]
    options: dict[str, Any]


@dataclass(frozen=True, order=True)
class _ParameterLock:
    number: int = field(default_factory=lambda: next(_numbers))
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False)


_locks: Any = WeakIdKeyDictionary()  # parameter → its lock
_locks_lock = threading.RLock()  # guards the table above


def _locks_of(params: Sequence[torch.Tensor]) -> list[_ParameterLock]:
    new = _ParameterLock()
    with _locks_lock:
        return sorted({_locks.setdefault(param, new) for param in params})


class LocalOptimizer:
    """An optimizer of this worker's parameters."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        groups: Sequence[Group],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        local = [
            {"params": [rref.local_value() for rref in group.params], **group.options}
            for group in groups
        ]
        self._params: list[torch.Tensor] = [p for group in local for p in group["params"]]
        is_plain = len(local) == 1 and not groups[0].options
        self.optimizer = optimizer_class(self._params if is_plain else local, *args, **kwargs)
        self._locks = _locks_of(self._params)

    def step(self, context_id: int) -> int | None:
        """
        Returns:
            The number of other tensors here with a gradient, if none of the parameters has one.
        """
        gradients = autograd.get_gradients(context_id)
        has_any = any(param in gradients for param in self._params)
        with self.alone():
            before = [param.grad for param in self._params]
            try:
                for param in self._params:
                    param.grad = gradients.get(param)
                self.optimizer.step()
            finally:
                for param, grad in zip(self._params, before, strict=True):
                    param.grad = grad
        return None if has_any else len(gradients)

    def leaves_beside(self, gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The leaves that are not parameters of this optimizer."""
        own = set(map(id, self._params))
        return [leaf for leaf in gradients if id(leaf) not in own]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other steps on these parameters out of the block."""
        with contextlib.ExitStack() as stack:
            for parameter_lock in self._locks:
                stack.enter_context(parameter_lock.lock)
            yield

    def state_dict(self) -> dict[str, Any]:
        with self.alone():
            return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self.alone():
            self.optimizer.load_state_dict(state)


class LocalScheduler:
    """A learning-rate scheduler of a local optimizer."""

    def __init__(
        self,
        optimizer: LocalOptimizer,
        scheduler_class: type[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._optimizer = optimizer
        with optimizer.alone():
            self._scheduler = scheduler_class(optimizer.optimizer, *args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> None:
        with self._optimizer.alone():
            self._scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        rates: list[float] = self._scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._optimizer.alone():
            self._scheduler.load_state_dict(state)


def new_local_optimizer(
    optimizer_class: type[torch.optim.Optimizer],
    groups: Sequence[Group],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RRef[LocalOptimizer]:
    """Runs on the worker that owns the parameters."""
    return RRef(LocalOptimizer(optimizer_class, groups, args, kwargs))


def unstepped_leaves(
    context_id: int, optimizer: RRef[LocalOptimizer] | None
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Runs on any worker of a context. Returns the shapes of leaves with a gradient that are not
    parameters of the optimizer, and the names of this worker's contacts in the context."""
    if not autograd._is_valid_context(context_id):
        return [], []
    leaves = list(autograd.get_gradients(context_id))
    if optimizer is not None:
        leaves = optimizer.local_value().leaves_beside(leaves)
    others = autograd._retrieve_context(context_id)._known_worker_ids()
    return [tuple(leaf.shape) for leaf in leaves], [rpc.get_worker_info(o).name for o in others]


def new_local_scheduler(
    optimizer: RRef[LocalOptimizer],
    scheduler_class: type[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RRef[LocalScheduler]:
    """Runs on the worker that owns the optimizer."""
    return RRef(LocalScheduler(optimizer.local_value(), scheduler_class, args, kwargs))
