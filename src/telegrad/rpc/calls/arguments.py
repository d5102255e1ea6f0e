"""Checks of what a program passes to a call. They run before anything is sent, so a mistake is
reported where it is made.

`args=(x)` is not a tuple: without a check, a string or a tensor would be unpacked into its parts,
and the function would run with those.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from telegrad.errors import RemoteError, SerializationError
from telegrad.rpc.group import current
from telegrad.rpc.group.worker_info import WorkerInfo

__all__ = [
    "check_function",
    "checked_arguments",
    "checked_call",
    "checked_worker",
    "in_words_of_caller",
]

_SIMPLE = (int, float, str, bytes)


# -- rpc_sync and its kin


def checked_call(
    caller: str, func: object, args: object, kwargs: object, misplaced: Mapping[str, object]
) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    """The arguments of a call as a tuple and a dict.

    Args:
        caller: the function that the program has called, for error texts.
        misplaced: arguments by names that `caller` does not have.

    Raises:
        TypeError: an argument has the wrong type.
    """
    if misplaced:
        name = next(iter(misplaced))
        given = ", ".join(f"{key!r}: {_short(value)}" for key, value in misplaced.items())
        raise TypeError(
            f"{caller}() got an unexpected keyword argument {name!r}; what is meant for the "
            f"function goes into kwargs={{{given}}}"
        )
    if not callable(func):
        raise TypeError(
            f"{caller}(): func must be callable, got {_described(func)}: pass the function itself, "
            "and its arguments in args="
        )
    return checked_arguments(caller, args, kwargs)


def checked_arguments(
    caller: str, args: object, kwargs: object
) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    """The arguments alone; see `checked_call`."""
    if args is not None and not isinstance(args, (tuple, list)):
        example = "(x,)"
        if kwargs is not None and not isinstance(kwargs, Mapping):  # f(to, func, 1, 2)
            example = f"({_short(args)}, {_short(kwargs)})"
        raise TypeError(
            f"{caller}(): args must be a tuple, got {_described(args)}; write args={example}"
        )
    if kwargs is None:
        return tuple(args or ()), None
    if not isinstance(kwargs, Mapping):
        raise TypeError(
            f"{caller}(): kwargs must be a mapping from names to values, got {_described(kwargs)}"
        )
    for key in kwargs:
        if not isinstance(key, str):
            raise TypeError(
                f"{caller}(): the keys of kwargs must be strings, got {_described(key)}"
            )
    return tuple(args or ()), dict(kwargs)


# -- telegrad.call, submit, object and module


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
    return current.current().agent.network.members.named(worker).id


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


# -- both


def in_words_of_caller(error: SerializationError, places: Mapping[str, str]) -> SerializationError:
    """Names a value that cannot be sent by its place among the program's own arguments.

    Args:
        places: from the path in the message to the path that the program knows.
    """
    if isinstance(error.__cause__, RemoteError):  # raised over there, about another call
        return error
    for ours, theirs in places.items():
        if error.path.startswith(ours):
            path = theirs + error.path[len(ours) :]
            return SerializationError(str(error).replace(error.path, path, 1), path=path)
    return error


def _described(value: object) -> str:
    """A value of a simple type by itself, any other by its type: a tensor may be large."""
    return reprlib.repr(value) if isinstance(value, _SIMPLE) else f"a {type(value).__name__}"


def _short(value: object) -> str:
    """For an example of how to write it."""
    return reprlib.repr(value) if isinstance(value, _SIMPLE) else "..."
