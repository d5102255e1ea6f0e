"""Exceptions that are kept: in a future, or in the place of a value that could not be made.

Whoever raises an exception writes all frames that it passes through into it, and a frame keeps its
local variables: tensors, the future that was waited for. An exception that is kept, and raised to
whoever asks, would keep the variables of all of them. From a future it would do so for ever: the
garbage collector does not see that a future of torch's, which is C++, keeps its exception, and so
never finds the circle. So what is raised is a copy each time, and what is kept has no frames, only
the text of where it was raised.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch.futures import Future

from telegrad.rpc.calls.error_texts import traceback_of

__all__ = ["again", "fail", "take_origin", "without_frames"]

_ORIGIN = "__telegrad_origin__"
_E = TypeVar("_E", bound=BaseException)


def fail(future: Future[Any], error: BaseException) -> None:
    """Like `future.set_exception`, for an exception that nobody else keeps."""
    future._set_unwrap_func(_raise_again)
    future.set_result(without_frames(error))


def _raise_again(error: BaseException) -> None:
    raise again(error)


def again(error: _E) -> _E:
    """The same exception once more, to be raised."""
    try:
        new = copy.copy(error)
    except BaseException:  # noqa: BLE001 - its constructor wants something else than it keeps
        new = error
    if type(new) is not type(error) or new is error:
        new = type(error).__new__(type(error), *error.args)
        new.__dict__.update(error.__dict__)
    new.__cause__, new.__context__ = error.__cause__, error.__context__
    new.__suppress_context__ = error.__suppress_context__
    return new.with_traceback(None)


def without_frames(error: _E) -> _E:
    """The exception itself, without the frames in it and in those that led to it."""
    if error.__traceback__ is not None:
        error.__dict__.setdefault(_ORIGIN, traceback_of(error))
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        each = todo.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            todo += (each.__cause__, each.__context__)
            each.__traceback__ = None
    return error


def take_origin(error: BaseException) -> str:
    """The text of where an exception was raised that was kept; empty if it was not."""
    origin: str = error.__dict__.pop(_ORIGIN, "")
    return origin
