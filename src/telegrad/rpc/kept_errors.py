"""Exceptions that are kept: in a future, or in the place of a value that could not be made.

Whoever raises an exception writes all frames that it passes through into it, and a frame keeps its
local variables: tensors, the future that was waited for. An exception that is kept, and raised to
whoever asks, would keep the variables of all of them. From a future it would do so for ever: the
garbage collector does not see that a future of torch's, which is C++, keeps its exception, and so
never finds the circle. So what is raised is a copy each time, and what is kept knows where it was
raised, but not what the variables were then.
"""

from __future__ import annotations

import copy
import inspect
import types
from typing import Any

from torch.futures import Future

__all__ = ["again", "fail", "without_locals"]

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def fail(future: Future[Any], error: BaseException) -> None:
    """Like `future.set_exception`, for an exception that nobody else keeps."""
    future._set_unwrap_func(_raise_again)
    future.set_result(without_locals(error))


def _raise_again(error: BaseException) -> None:
    raise again(error)


def again(error: BaseException) -> BaseException:
    """The same exception once more, to be raised."""
    try:
        new = copy.copy(error)
    except Exception:  # noqa: BLE001 - its constructor wants something else than it keeps
        new = error
    if type(new) is not type(error) or new is error:
        new = type(error).__new__(type(error), *error.args)
        new.__dict__.update(error.__dict__)
    new.__cause__, new.__context__ = error.__cause__, error.__context__
    new.__suppress_context__ = error.__suppress_context__
    return new.with_traceback(error.__traceback__)


def without_locals(error: BaseException) -> BaseException:
    """The exception itself, and those that led to it, without what the variables of functions were
    that have ended, and without the functions that run still: they are about to handle it."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        todo += (each.__cause__, each.__context__)
        ended: list[types.TracebackType] = []
        step = each.__traceback__
        while step is not None:
            if _clear(step.tb_frame):
                ended.append(step)
            step = step.tb_next
        kept: types.TracebackType | None = None
        for step in reversed(ended):
            kept = types.TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
        each.__traceback__ = kept
    return error


def _clear(frame: types.FrameType) -> bool:
    """Lets go of the variables of a function that has ended; False if it has not."""
    if frame.f_code.co_flags & _SUSPENDABLE:
        return False  # it may be suspended, and clearing would end it
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True
