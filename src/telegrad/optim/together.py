"""What optimizers and schedules have in common: a part on each owner of parameters."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.futures import Future

from telegrad.errors import RemoteError, RpcTimeout, WorkerLost
from telegrad.rpc import RRef

__all__ = ["StatesByOwner", "check_class", "wait_for_all"]


def check_class(given: object, name: str, example: str) -> None:
    """
    Raises:
        TypeError: it is neither a class nor a function that makes an optimizer or a scheduler.
    """
    is_instance = isinstance(given, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler))
    if is_instance or not callable(given):
        what = f"an instance of {type(given).__name__}" if is_instance else reprlib.repr(given)
        raise TypeError(f"{name} must be a class such as {example}, got {what}")


class StatesByOwner:
    """An optimizer or a schedule with a part on each owner of parameters.

    Args:
        parts: references to the parts, by the owner's name.
    """

    def __init__(self, parts: dict[str, RRef[Any]]) -> None:
        self._by_owner = parts

    def state_dict(self) -> dict[str, Any]:
        """The state of each owner's part, by the owner's name."""
        futures = {owner: part.rpc_async().state_dict() for owner, part in self._by_owner.items()}
        return {"workers": wait_for_all("state_dict", futures)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: it has other owners.
        """
        kind = type(self).__name__
        states = state_dict.get("workers") if isinstance(state_dict, Mapping) else None
        if not isinstance(states, Mapping):
            raise ValueError(
                f"this is not a state of a {kind}, which has 'workers': pass what state_dict() gave"
            )
        if set(states) != set(self._by_owner):
            raise ValueError(
                f"the state is of parameters on {', '.join(sorted(states)) or 'no worker'}, and "
                f"those of this {kind} are on {', '.join(sorted(self._by_owner))}"
            )
        futures = {
            owner: part.rpc_async().load_state_dict(states[owner])
            for owner, part in self._by_owner.items()
        }
        wait_for_all("load_state_dict", futures)


def wait_for_all(
    what: str,
    futures: Mapping[str, Future[Any]],
    meanwhile: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, Any]:
    """The results by worker. Waits for all, even if one fails.

    Args:
        what: for the message, such as "step".
        meanwhile: what this thread does before it waits, by worker.

    Raises:
        RpcTimeout, WorkerLost: a worker did not answer.
        RemoteError: it raised; its own exception is the cause.
    """
    results: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    waits = {worker: future.wait for worker, future in futures.items()}
    for worker, result in {**(meanwhile or {}), **waits}.items():
        try:
            results[worker] = result()
        except Exception as error:  # noqa: BLE001 - raised below, when all have ended
            errors[worker] = error
    if not errors:
        return results
    worker, first = next(iter(errors.items()))
    if isinstance(first, (RpcTimeout, WorkerLost)):
        raise first
    texts = [f"{name!r}: {type(e).__name__}: {e}" for name, e in errors.items()]
    raise RemoteError(
        f"the optimizer's {what} failed on worker {'; '.join(texts)}",
        worker=worker,
        traceback=str(first.__cause__ or ""),
    ) from first
