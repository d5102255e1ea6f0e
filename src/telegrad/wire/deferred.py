"""Values of this worker that a message refers to, found after the message has been unpacked.

A future or a stand-in among the arguments of a call stands for a value that is here. With an
allow-list no stream may get hold of such a value while it is loaded: a pickle can call what it has,
set its state, add to it and iterate over it, so it would run methods of classes that are not on the
list. So the stream gets a mark, which can do nothing. When loading is over, marks are replaced, in
lists, tuples and dictionaries only; a mark anywhere else is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from telegrad.errors import NotAllowed

__all__ = ["Deferred"]


class _Mark:
    """Is known by its identity, so what a stream does to it does not matter."""

    __slots__ = ()


class Deferred:
    """The marks of one stream, and what they stand for."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[_Mark, Callable[..., Any], tuple[Any, ...]]] = {}
        self._values: dict[int, Any] = {}

    def later(self, function: Callable[..., Any], *args: Any) -> object:
        """A mark for `function(*args)`."""
        mark = _Mark()
        self._calls[id(mark)] = mark, function, args
        return mark

    def resolved(self, value: Any) -> Any:
        """The value of the stream, with what the marks stand for in their places.

        Raises:
            NotAllowed: a mark is somewhere else.
            Exception: what finding a value raises.
        """
        if not self._calls:
            return value
        found = self._replaced(value, {})
        if len(self._values) < len(self._calls):
            raise NotAllowed(
                "a future of telegrad.submit or a stand-in of telegrad.object is inside of a value "
                "that is not a list, tuple or dictionary: RpcOptions(allow=...) of this worker "
                "forbids that. Pass it as an argument of its own"
            )
        return found

    def _replaced(self, value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
        """
        Args:
            seen: by id, containers that were looked at, and what replaces them. It keeps them
                alive, or else their ids would be used again.
        """
        key = id(value)
        if key in self._calls:
            if key not in self._values:
                _, function, args = self._calls[key]
                self._values[key] = function(*args)
            return self._values[key]
        kind = type(value)
        if kind is not list and kind is not dict and not isinstance(value, tuple):
            return value
        if key in seen:
            return seen[key][1]
        if kind is list:
            seen[key] = value, value
            value[:] = [self._replaced(each, seen) for each in list(value)]
            return value
        if kind is dict:
            seen[key] = value, value
            for name, each in list(value.items()):
                new = self._replaced(each, seen)
                if new is not each:
                    value[name] = new
            return value
        items = list(tuple.__iter__(value))
        new_items = [self._replaced(each, seen) for each in items]
        if any(new is not old for new, old in zip(new_items, items, strict=True)):
            new = tuple.__new__(kind, new_items)
        else:
            new = value
        seen[key] = value, new
        return new
