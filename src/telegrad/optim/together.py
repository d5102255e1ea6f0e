"""Doing something on several workers at once, and telling what failed where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.futures import Future

from telegrad.errors import RemoteError, RpcTimeout, WorkerLost

__all__ = ["wait_for_all"]


def wait_for_all(what: str, futures: Mapping[str, Future[Any]]) -> dict[str, Any]:
    """The results by worker; waits for all, also if one fails.

    Args:
        what: for the message: "step", say.

    Raises:
        RpcTimeout, WorkerLost: a worker did not answer.
        RemoteError: it raised; its own exception is the cause.
    """
    results: dict[str, Any] = {}
    errors: dict[str, Exception] = {}
    for worker, future in futures.items():
        try:
            results[worker] = future.wait()
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
