"""Optimizers and learning-rate schedules for parameters that live on other workers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from telegrad import autograd, rpc
from telegrad.optim.local import (
    Group,
    LocalOptimizer,
    new_local_optimizer,
    new_local_scheduler,
    unstepped_leaves,
)
from telegrad.optim.together import StatesByOwner, check_class, wait_for_all
from telegrad.rpc import RRef

__all__ = ["DistributedLRScheduler", "DistributedOptimizer"]

_WRAP = ". Wrap parameters of this worker: [rpc.RRef(p) for p in module.parameters()]"

ParameterGroup = Mapping[str, Any]
"""`{"params": [RRef, ...], "lr": ...}`, as in `torch.optim`, with references for parameters."""


class DistributedOptimizer(StatesByOwner):
    """An optimizer of parameters on any workers.

    Each worker that owns some of the parameters gets an optimizer of the given class. Several
    trainers may step at once, even with separate optimizers of the same parameters: on each worker,
    steps on the same parameters run one at a time.

    It differs from `torch.optim` in two ways: `step` takes the context whose gradients it applies,
    and `zero_grad` is not needed. For schedules of learning rates use `DistributedLRScheduler`: the
    classes of `torch.optim.lr_scheduler` do not accept this optimizer.

    Args:
        optimizer_class: a class of `torch.optim`, or one like it.
        params_rref: references to the parameters; or parameter groups, dicts with `"params"` and
            options, as in `torch.optim`.
        args, kwargs: further arguments of the class.

    Raises:
        RemoteError: a worker could not make its optimizer; the message names the worker.
        ValueError: there are no parameters.
        TypeError: an item is neither a reference nor a parameter group.

    Example::

        with dist_autograd.context() as context_id:
            loss = model(x).sum()
            dist_autograd.backward(context_id, [loss])
            optimizer = DistributedOptimizer(torch.optim.SGD, model.remote_parameters(), lr=0.05)
            optimizer.step(context_id)
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params_rref: Iterable[RRef[Any]] | Iterable[ParameterGroup],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        check_class(optimizer_class, "optimizer_class", "torch.optim.AdamW")
        by_owner = _groups_by_owner(params_rref)
        made = wait_for_all(
            "construction",
            {
                owner: rpc.rpc_async(
                    owner, new_local_optimizer, (optimizer_class, groups, args, kwargs)
                )
                for owner, groups in by_owner.items()
            },
        )
        super().__init__(made)

    @property
    def remote_optimizers(self) -> list[RRef[LocalOptimizer]]:
        """References to the optimizers, one for each owner of parameters."""
        return list(self._by_owner.values())

    @property
    def optimizers_by_owner(self) -> dict[str, RRef[LocalOptimizer]]:
        return dict(self._by_owner)

    def step(self, context_id: int) -> None:
        """Applies the gradients of the context, on all owners at once.

        Parameters without a gradient in the context stay as they are. If none has one, it warns:
        `backward` was not called, or the loss uses other parameters.

        Raises:
            ContextError: there is no such context on this worker, or it has ended; no parameter
                has changed.
            RemoteError: a step failed; the message names the worker. Other owners may have stepped.
            TypeError: a closure was given. It would have to run forward and backward through all
                workers: write that loop in the program.
        """
        if callable(context_id):
            raise TypeError(
                "step() takes the id of an autograd context, and no closure: a closure would have "
                "to run forward and backward through all workers; do that before each step()"
            )
        # The owners hear of its end a moment later, and would step until then.
        autograd._retrieve_context(context_id)
        others = dict(self._by_owner)
        # This thread takes one step itself, or waits for its answer on a lane: no other thread has
        # to be woken for it.
        owner = next((owner for owner in others if others[owner].is_owner()), [*others][-1])
        local = others.pop(owner)
        futures = {other: others[other].rpc_async().step(context_id) for other in others}
        if local.is_owner():
            step = partial(local.local_value().step, context_id)
        else:
            step = partial(local.rpc_sync().step, context_id)
        left = wait_for_all("step", futures, {owner: step})
        if None not in left.values():
            self._warn_of_empty_step(left)

    def _warn_of_empty_step(self, gradients: Mapping[str, int]) -> None:
        found = ", ".join(f"{count} on {owner!r}" for owner, count in gradients.items())
        warnings.warn(
            "step(): none of the optimizer's parameters has a gradient in this context; it has "
            f"gradients of other tensors: {found}. Was backward() called? Are these the parameters "
            "that the loss uses, and not copies of them?",
            UserWarning,
            stacklevel=3,
        )

    def zero_grad(self, set_to_none: bool = True) -> NoReturn:
        """Not needed: each context starts without gradients."""
        raise TypeError(
            "zero_grad() is not needed: gradients belong to a dist_autograd.context(), and each "
            "starts without any"
        )

    def unstepped(self, context_id: int) -> dict[str, list[tuple[int, ...]]]:
        """The shapes of leaves that have a gradient in the context and are not parameters of this
        optimizer, by worker. `step` does not change them. Shows parameters that were forgotten.

        Raises:
            ContextError: there is no such context on this worker.
        """
        autograd._retrieve_context(context_id)
        found: dict[str, list[tuple[int, ...]]] = {}
        ahead, seen = {rpc.get_worker_info().name, *self._by_owner}, set[str]()
        while ahead:
            seen |= ahead
            futures = {
                worker: rpc.rpc_async(
                    worker, unstepped_leaves, (context_id, self._by_owner.get(worker))
                )
                for worker in sorted(ahead)
            }
            ahead = set()
            for worker, (shapes, others) in wait_for_all("unstepped", futures).items():
                if shapes:
                    found[worker] = shapes
                ahead.update(name for name in others if name not in seen)
        return found


class DistributedLRScheduler(StatesByOwner):
    """A schedule of the learning rates of a distributed optimizer, on each owner.

    Args:
        optimizer: the optimizer whose rates it sets.
        scheduler_class: a class of `torch.optim.lr_scheduler`.
        args, kwargs: further arguments of the class.

    Example::

        scheduler = DistributedLRScheduler(optimizer, torch.optim.lr_scheduler.StepLR, step_size=10)
        for epoch in range(epochs):
            train(optimizer)
            scheduler.step()
    """

    def __init__(
        self, optimizer: DistributedOptimizer, scheduler_class: type[Any], *args: Any, **kwargs: Any
    ) -> None:
        if not isinstance(optimizer, DistributedOptimizer):
            raise TypeError(
                "the optimizer comes first, and must be a DistributedOptimizer: "
                f"DistributedLRScheduler(optimizer, StepLR, ...), got a {type(optimizer).__name__}"
            )
        check_class(scheduler_class, "scheduler_class", "torch.optim.lr_scheduler.StepLR")
        made = wait_for_all(
            "scheduler",
            {
                owner: rpc.rpc_async(
                    owner, new_local_scheduler, (local, scheduler_class, args, kwargs)
                )
                for owner, local in optimizer.optimizers_by_owner.items()
            },
        )
        super().__init__(made)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Steps the schedule on all owners, with the scheduler's arguments, such as a metric."""
        wait_for_all(
            "scheduler step",
            {owner: s.rpc_async().step(*args, **kwargs) for owner, s in self._by_owner.items()},
        )

    def get_last_lr(self) -> dict[str, list[float]]:
        """The rates of each owner's parameter groups."""
        futures = {owner: s.rpc_async().get_last_lr() for owner, s in self._by_owner.items()}
        return wait_for_all("get_last_lr", futures)


def _groups_by_owner(
    params: Iterable[RRef[Any]] | Iterable[ParameterGroup],
) -> dict[str, list[Group]]:
    given = list(params)
    if not given:
        raise ValueError("optimizer got an empty parameter list")
    if all(isinstance(item, RRef) for item in given):
        given = [{"params": given}]
    groups: dict[str, list[Group]] = {}
    for item in given:
        if not isinstance(item, Mapping) or "params" not in item:
            raise TypeError(
                "parameters must be RRefs, or all be groups: dicts with 'params' and options; "
                f"got a {type(item).__name__}{_WRAP}"
            )
        options = {key: value for key, value in item.items() if key != "params"}
        members = [item["params"]] if isinstance(item["params"], RRef) else item["params"]
        split: dict[str, list[RRef[Any]]] = {}
        for rref in members:
            if not isinstance(rref, RRef):
                raise TypeError(
                    "'params' of a parameter group must be RRefs of parameters, got a "
                    f"{type(rref).__name__}{_WRAP}"
                )
            split.setdefault(rref.owner_name(), []).append(rref)
        for owner, rrefs in split.items():
            groups.setdefault(owner, []).append(Group(params=rrefs, options=options))
    if not groups:
        raise ValueError("optimizer got parameter groups without a parameter")
    return groups
