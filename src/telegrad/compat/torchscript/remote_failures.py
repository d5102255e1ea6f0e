"""What another worker raised, on its way through TorchScript.

The interpreter keeps the type and text of an exception and nothing else. That it came from another
worker, and from which, is told by its cause: so that is raised instead, whose text has all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from telegrad.errors import RemoteError

__all__ = ["telling_where", "with_place"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_place(error: BaseException) -> BaseException:
    """The exception whose text says on which worker it was raised, if that was another one."""
    return error.__cause__ if isinstance(error.__cause__, RemoteError) else error


def telling_where(operator: Callable[_P, _R]) -> Callable[_P, _R]:
    """An operator that raises what another worker has raised."""

    @functools.wraps(operator)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return operator(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - it is raised again
            raise with_place(error) from None

    return wrapper
