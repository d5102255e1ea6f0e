"""Doing something on several workers at once, and telling what failed where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.futures import Future

from telegrad.errors import RemoteError, RpcTimeout, WorkerLost

__all__ = ["wait_for_all"]


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
