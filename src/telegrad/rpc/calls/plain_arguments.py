"""Checks of what a program passes to `telegrad.call`, `submit`, `object` and `module`: which
worker, and what to run there. They run before anything is sent, so a mistake is reported where it
was made, in the words of the program."""

from __future__ import annotations

from telegrad.rpc.api import get_worker_info
from telegrad.rpc.group.worker_info import WorkerInfo

__all__ = ["check_function", "checked_worker"]


def checked_worker(caller: str, worker: object) -> int:
    """The id of the worker that a program has named.

    Raises:
        TypeError: this does not name a worker.
        TelegradError: there is no such worker, or no group.
    """
    if isinstance(worker, WorkerInfo):
        worker = worker.name
    if not isinstance(worker, str | int) or isinstance(worker, bool):
        what = "a class" if isinstance(worker, type) else f"a {type(worker).__name__}"
        raise TypeError(
            f"{caller}() needs the worker first, by name, rank or WorkerInfo, and got {what}: "
            f'{caller}("name", ...)'
        )
    return get_worker_info(worker).id


def check_function(caller: str, fn: object) -> None:
    """
    Raises:
        TypeError: this cannot be called. A frequent mistake is `call("a", f(x))`.
    """
    if not callable(fn):
        what = repr(fn) if isinstance(fn, str | int | float | None) else f"a {type(fn).__name__}"
        raise TypeError(
            f"{caller}() needs a function and its arguments, and got {what} for the function: "
            f'{caller}("name", f, x) runs f(x) there'
        )
