"""Ctrl-C while a script function waits for another worker in an operator.

The interpreter makes a RuntimeError of whatever an operator raises. That it was a KeyboardInterrupt
is noted here, and the call of the script function raises it again. Both happen on the main thread,
the only one that is interrupted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["noted", "raise_noted"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_was_interrupted = False


def noted(operator: Callable[_P, _R]) -> Callable[_P, _R]:
    """An operator that waits."""

    @functools.wraps(operator)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        global _was_interrupted
        try:
            return operator(*args, **kwargs)
        except KeyboardInterrupt:
            _was_interrupted = True
            raise

    return wrapper


def raise_noted() -> None:
    """Raises the KeyboardInterrupt that ended a script function, if it was one."""
    global _was_interrupted
    if _was_interrupted:
        _was_interrupted = False
        raise KeyboardInterrupt
