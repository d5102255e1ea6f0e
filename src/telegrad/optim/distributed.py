"""`DistributedOptimizer`: steps parameters where they live, with the gradients of a context."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from telegrad import autograd, rpc
from telegrad.optim.local import Group, LocalOptimizer, new_local_optimizer
from telegrad.optim.together import wait_for_all
from telegrad.rpc import RRef

__all__ = ["DistributedOptimizer"]

ParameterGroup = Mapping[str, Any]
"""`{"params": [RRef, ...], "lr": ...}`, as in `torch.optim`, with references for parameters."""


class DistributedOptimizer:
    """An optimizer of parameters on any workers.

    One optimizer of the given class is made on each worker that owns some of the parameters.
    Several trainers may step at once, also with optimizers of their own over the same parameters:
    on each worker, steps of the same parameters follow each other.

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

        Parameters without a gradient in the context are left as they are.

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
        wait_for_all("step", futures, {owner: step})

    def state_dict(self) -> dict[str, Any]:
        """The state of each owner's optimizer, by the owner's name."""
        futures = {owner: local.rpc_async().state_dict() for owner, local in self._by_owner.items()}
        return {"workers": wait_for_all("state_dict", futures)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` gave.

        Raises:
            ValueError: it is of an optimizer whose parameters live on other workers.
        """
        states = state_dict["workers"]
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
                f"got a {type(item).__name__}"
            )
        options = {key: value for key, value in item.items() if key != "params"}
        members = [item["params"]] if isinstance(item["params"], RRef) else item["params"]
        split: dict[str, list[RRef[Any]]] = {}
        for rref in members:
            if not isinstance(rref, RRef):
                raise TypeError(
                    "'params' of a parameter group must be RRefs of parameters, got a "
                    f"{type(rref).__name__}"
                )
            split.setdefault(rref.owner_name(), []).append(rref)
        for owner, rrefs in split.items():
            groups.setdefault(owner, []).append(Group(params=rrefs, options=options))
    if not groups:
        raise ValueError("optimizer got parameter groups without a parameter")
    return groups
