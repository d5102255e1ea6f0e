"""`DistributedOptimizer`: steps parameters where they live, with the gradients of a context."""

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
    unstepped_leaves,
)
from telegrad.optim.together import check_class, states_of, wait_for_all
from telegrad.rpc import RRef

__all__ = ["DistributedOptimizer"]

_WRAP = ". Wrap parameters of this worker: [rpc.RRef(p) for p in module.parameters()]"

ParameterGroup = Mapping[str, Any]
"""`{"params": [RRef, ...], "lr": ...}`, as in `torch.optim`, with references for parameters."""


class DistributedOptimizer:
    """An optimizer of parameters on any workers.

    One optimizer of the given class is made on each worker that owns some of the parameters.
    Several trainers may step at once, also with optimizers of their own over the same parameters:
    on each worker, steps of the same parameters follow each other.

    It differs from `torch.optim` in two ways: `step` takes the context whose gradients it applies,
    and `zero_grad` is not needed. Learning rates are scheduled by `DistributedLRScheduler`: the
    classes of `torch.optim.lr_scheduler` do not take this optimizer themselves.

    Args:
        optimizer_class: any of `torch.optim`, or another of that kind.
        params_rref: references to the parameters; or parameter groups, dicts with `"params"` and
            options, as `torch.optim` takes them.
        args, kwargs: what the class takes besides the parameters.

    Raises:
        RemoteError: the optimizer could not be made on some worker; it says on which.
        ValueError: there are no parameters.
        TypeError: something among them is no reference, and no group of them.

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
        self._by_owner: dict[str, RRef[LocalOptimizer]] = made

    @property
    def remote_optimizers(self) -> list[RRef[LocalOptimizer]]:
        """References to the optimizers, one for each owner of parameters."""
        return list(self._by_owner.values())

    @property
    def optimizers_by_owner(self) -> dict[str, RRef[LocalOptimizer]]:
        return dict(self._by_owner)

    def step(self, context_id: int) -> None:
        """Applies the gradients that the context has gathered, on all owners at once.

        Parameters without a gradient in the context are left as they are. If that is so for all of
        them, it warns: `backward` was not called, or the loss uses other parameters.

        Raises:
            ContextError: there is no such context on this worker, or it has ended; nothing was
                stepped.
            RemoteError: a step failed; it says where. Other owners may have stepped.
            TypeError: a closure was given. It would have to run the forward pass again, with the
                backward pass through all workers: write that loop in the program.
        """
        if callable(context_id):
            raise TypeError(
                "step() takes the id of an autograd context, and no closure: a closure would have "
                "to run forward and backward through all workers; do that before each step()"
            )
        # Its end takes a moment to reach the owners: until then they would step.
        autograd._retrieve_context(context_id)
        others = dict(self._by_owner)
        # One step this thread takes itself, or waits for on its own connection: no other thread
        # has to be woken for it.
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
        """The leaves that have a gradient in the context and are not parameters of this optimizer,
        as their shapes, by worker. `step` leaves them as they are: a list of parameters that leaves
        some out shows here.

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

    def state_dict(self) -> dict[str, Any]:
        """The state of each owner's optimizer, by the owner's name."""
        futures = {owner: local.rpc_async().state_dict() for owner, local in self._by_owner.items()}
        return {"workers": wait_for_all("state_dict", futures)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` gave.

        Raises:
            ValueError: it is of an optimizer whose parameters live on other workers.
        """
        states = states_of(state_dict, "DistributedOptimizer")
        if set(states) != set(self._by_owner):
            raise ValueError(
                f"the state is of parameters on {', '.join(sorted(states)) or 'no worker'}, and "
                f"this optimizer's are on {', '.join(sorted(self._by_owner))}"
            )
        wait_for_all(
            "load_state_dict",
            {
                owner: local.rpc_async().load_state_dict(states[owner])
                for owner, local in self._by_owner.items()
            },
        )


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
