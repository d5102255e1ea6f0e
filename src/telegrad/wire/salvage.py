"""What is left of a pickle that cannot be loaded.

A message may hold things that somebody counts, and may not be loadable as a whole: a class is
missing here, or its constructor raises. So it is read once more, with every name in it standing for
nothing, but for the one function whose arguments are wanted.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

__all__ = ["arguments_in"]


class _Nothing:
    """Whatever a pickle does with it, nothing comes of it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    append = extend = __setitem__ = __setstate__ = __call__


class _Salvager(pickle.Unpickler):
    def __init__(self, stream: bytes, place: tuple[str, str], found: Callable[..., Any]) -> None:
        super().__init__(io.BytesIO(stream), buffers=itertools.repeat(b""))
        self._place = place
        self._found = found

    def find_class(self, module: str, name: str) -> Any:
        return self._found if (module, name) == self._place else _Nothing


def arguments_in(stream: bytes | bytearray | memoryview, function: Any) -> list[tuple[Any, ...]]:
    """What a pickle would call a function with. Nothing is imported or run for that."""
    calls: list[tuple[Any, ...]] = []

    def found(*args: Any) -> _Nothing:
        calls.append(args)
        return _Nothing()

    place = (function.__module__, function.__qualname__)
    try:
        _Salvager(bytes(stream), place, found).load()
    except Exception:  # noqa: BLE001 - it is damaged: then what was found before that
        return calls
    return calls
