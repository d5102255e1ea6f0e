"""Lanes on which something is still to come, and which nobody may use until then."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from telegrad.transport.base import Connection

__all__ = ["Waiting", "WaitingLanes"]


class Waiting(Protocol):
    @property
    def lane(self) -> Connection: ...


WaitingT = TypeVar("WaitingT", bound=Waiting)


class WaitingLanes(Generic[WaitingT]):
    """Those of one peer, the longest waiting first. Threads may use it freely.

    Args:
        is_open: whether a lane has not been ended since.
        discard, put_back: what becomes of a lane that has ended, and of one that can be used again.
    """

    def __init__(
        self,
        is_open: Callable[[Connection], bool],
        discard: Callable[[Connection], None],
        put_back: Callable[[Connection], None],
    ) -> None:
        self._is_open = is_open
        self._discard = discard
        self._put_back = put_back
        self._waiting: collections.deque[WaitingT] = collections.deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def give_up(self) -> set[Connection]:
        """Waits for nothing any more; returns the lanes."""
        return {waiting.lane for waiting in self._taken()}

    def _taken(self) -> Iterator[WaitingT]:
        """Takes those out that are here now, one by one. Another thread may be taking some too."""
        for _ in range(len(self._waiting)):
            try:
                yield self._waiting.popleft()
            except IndexError:
                return

    def _go_on(self, waiting: WaitingT) -> None:
        if self._is_open(waiting.lane):
            self._waiting.append(waiting)
        else:
            waiting.lane.close()
