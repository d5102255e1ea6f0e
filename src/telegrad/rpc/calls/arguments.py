"""Checks of what a program passes to a call, before anything is sent.

`args=(x)` is not a tuple: a string or a tensor would be unpacked into its parts, and the function
would run with those.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from telegrad.errors import RemoteError, SerializationError

__all__ = ["checked_arguments", "checked_call", "in_words_of_caller"]

_SIMPLE = (int, float, str, bytes)


def checked_call(
    caller: str, func: object, args: object, kwargs: object, misplaced: Mapping[str, object]
) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    """The arguments of a call as a tuple and a dict.

    Args:
        caller: the function that the program has called, for messages.
        misplaced: what it was given by names that it does not have.

    Raises:
        TypeError: something is not what it must be.
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


def in_words_of_caller(error: SerializationError, places: Mapping[str, str]) -> SerializationError:
    """Names a value that cannot be sent by its place in what the program has passed.

    Args:
        places: by the path that the message had, the path that the program knows.
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
