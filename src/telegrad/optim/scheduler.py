"""Learning-rate schedules for a `DistributedOptimizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from telegrad import rpc
from telegrad.optim.distributed import DistributedOptimizer
from telegrad.optim.local import LocalScheduler, new_local_scheduler
from telegrad.optim.together import check_class, states_of, wait_for_all
from telegrad.rpc import RRef

__all__ = ["DistributedLRScheduler"]


class DistributedLRScheduler:
    """A schedule of the learning rates of a distributed optimizer, kept on each owner.

    Args:
        optimizer: whose rates to set.
        scheduler_class: any of `torch.optim.lr_scheduler`.
        args, kwargs: what the class takes besides the optimizer.

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
        self._by_owner: dict[str, RRef[LocalScheduler]] = wait_for_all(
            "scheduler",
            {
                owner: rpc.rpc_async(
                    owner, new_local_scheduler, (local, scheduler_class, args, kwargs)
                )
                for owner, local in optimizer.optimizers_by_owner.items()
            },
        )

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Goes one step on, on all owners; takes what the scheduler takes (a metric, say)."""
        wait_for_all(
            "scheduler step",
            {owner: s.rpc_async().step(*args, **kwargs) for owner, s in self._by_owner.items()},
        )

    def get_last_lr(self) -> dict[str, list[float]]:
        """The rates of each owner's parameter groups."""
        futures = {owner: s.rpc_async().get_last_lr() for owner, s in self._by_owner.items()}
        return wait_for_all("get_last_lr", futures)

    def state_dict(self) -> dict[str, Any]:
        """The state of each owner's scheduler, by the owner's name."""
        futures = {owner: s.rpc_async().state_dict() for owner, s in self._by_owner.items()}
        return {"workers": wait_for_all("scheduler state_dict", futures)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` gave, for the same owners."""
        states = states_of(state_dict, "DistributedLRScheduler")
        if set(states) != set(self._by_owner):
            raise ValueError(
                f"the state is of schedulers on {', '.join(sorted(states)) or 'no worker'}, and "
                f"these are on {', '.join(sorted(self._by_owner))}"
            )
        wait_for_all(
            "scheduler load_state_dict",
            {
                owner: s.rpc_async().load_state_dict(states[owner])
                for owner, s in self._by_owner.items()
            },
        )
