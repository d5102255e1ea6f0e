"""Results of `submit`, which stay on the worker that made them."""

from __future__ import annotations

import threading
from typing import Any

from telegrad.errors import TelegradError, WorkerLost

__all__ = ["Value", "lost", "unknown"]


class Value:
    """A result that stays where it was made."""

    def __init__(self) -> None:
        self._is_there = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def set(self, value: Any) -> None:
        self._value = value
        self._is_there.set()

    def fail(self, error: BaseException) -> None:
        """Does nothing if it is there already."""
        if not self._is_there.is_set():
            self._error = error
            self._is_there.set()

    def get(self) -> Any:
        """Ends when the function does that makes it, with the worker where it runs, which is this
        one, or when the worker that has submitted it is found not to know it."""
        self._is_there.wait()
        if self._error is not None:
            raise self._error
        return self._value


def unknown(name: str, maker: str) -> TelegradError:
    return TelegradError(
        f"worker {name!r} was asked for the result of a function that worker {maker!r} does not "
        "know to have submitted to it, or has given up: keep the future until the result was used"
    )


def lost(name: str, reason: str) -> WorkerLost:
    return WorkerLost(
        f"worker {name!r} was lost before it had told what it had submitted: {reason}",
        worker=name,
        reason=reason,
    )
