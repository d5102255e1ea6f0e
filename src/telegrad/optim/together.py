"""Doing something on several workers at once, and telling what failed where."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.futures import Future

from telegrad.errors import RemoteError, RpcTimeout, WorkerLost

__all__ = ["check_class", "states_of", "wait_for_all"]


def check_class(given: object, name: str, example: str) -> None:
    """
    Raises:
        TypeError: what makes an optimizer or a scheduler is not a class, or a function.
    """
    is_instance = isinstance(given, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler))
    if is_instance or not callable(given):
        what = f"an instance of {type(given).__name__}" if is_instance else reprlib.repr(given)
        raise TypeError(f"{name} must be a class such as {example}, got {what}")


def states_of(state_dict: object, kind: str) -> Mapping[str, Any]:
    """The states in what `state_dict` gave, by worker.

    Raises:
        ValueError: it is something else.
    """
    states = state_dict.get("workers") if isinstance(state_dict, Mapping) else None
    if not isinstance(states, Mapping):
        raise ValueError(
            f"this is not a state of a {kind}, which has 'workers': pass what state_dict() gave"
        )
    return states


def wait_for_all(
    what: str,
    futures: Mapping[str, Future[Any]],
    meanwhile: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, Any]:
    """The results by worker; waits for all, also if one fails.

    Args:
        what: for the message: "step", say.
        meanwhile: what this thread does itself before it waits, by the worker that it concerns.

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
        except Exception as error:  # noqa: BLE001 - raised below, once all have ended
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
