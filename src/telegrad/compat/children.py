"""Processes that `multiprocessing` starts follow their parent.

A forked child has everything already. A spawned one begins from nothing, and is sent a dict that
tells it how to prepare (`sys.path`, the main module, ...) before it unpickles what it is to do. An
entry is added to that dict which installs telegrad as it is unpickled: before the child's main
module is imported, so that the names which that binds are telegrad's from the start.
"""

from __future__ import annotations

import multiprocessing.spawn
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["follow", "unfollow"]

_KEY = "telegrad"
_INSTALL = """
import sys
before = list(sys.path)
sys.path[:] = {path!r}  # the child gets its parent's path only later
try:
    import telegrad
    telegrad.install()
finally:
    sys.path[:] = before
"""

_original: Callable[[str], dict[str, Any]] | None = None


class _InstallOnArrival:
    """Unpickled, it has installed telegrad, and is None."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_INSTALL.format(path=list(sys.path)), {})


def follow() -> None:
    global _original
    if _original is None:
        _original = multiprocessing.spawn.get_preparation_data
        multiprocessing.spawn.get_preparation_data = _get_preparation_data


def unfollow() -> None:
    global _original
    if _original is not None:
        multiprocessing.spawn.get_preparation_data = _original  # type: ignore[assignment]
        _original = None


def _get_preparation_data(name: str) -> dict[str, Any]:
    assert _original is not None
    return {_KEY: _InstallOnArrival(), **_original(name)}
