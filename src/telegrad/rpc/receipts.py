"""Posts whose receipt has not come yet.

A post is acknowledged by a receipt that nobody waits for: it is read when a lane is next wanted, or
when the clock comes by. Until then the lane is not used, because its thread at the other end is
busy. One whose receipt does not come for a long time is closed.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import NamedTuple

from telegrad.errors import ProtocolError
from telegrad.transport.base import Connection, ConnectionClosed, TransportTimeout

__all__ = ["Receipts"]

_SECONDS = 60.0  # without its receipt for so long, a lane is closed


class _Posted(NamedTuple):
    lane: Connection
    number: int
    at: float


class Receipts:
    """The lanes of one peer that wait for theirs. Threads may use it freely.

    Args:
        is_open: whether a lane has not been ended since.
        discard, put_back: what becomes of a lane that has ended, and of one whose receipt has come.
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
        self._posted: collections.deque[_Posted] = collections.deque()

    def __len__(self) -> int:
        return len(self._posted)

    def expect(self, lane: Connection, number: int) -> None:
        """A post of this number has left on the lane."""
        self._go_on(_Posted(lane, number, time.monotonic()))

    def take_one(self) -> bool:
        """Puts one lane back whose receipt has come, if there is any. Does not block."""
        for _ in range(len(self._posted)):
            try:
                posted = self._posted.popleft()
            except IndexError:
                return False
            if self._has_come(posted):
                self._put_back(posted.lane)
                return True
            self._go_on(posted)
        return False

    def look(self, now: float) -> None:
        """Puts all of those back, and closes the lanes that have waited too long: the message or
        its receipt was lost, or its handler is stuck."""
        for _ in range(len(self._posted)):
            try:
                posted = self._posted.popleft()
            except IndexError:
                return
            if self._has_come(posted):
                self._put_back(posted.lane)
            elif now - posted.at > _SECONDS:
                self._discard(posted.lane)
            else:
                self._go_on(posted)

    def give_up(self) -> set[Connection]:
        """Waits for none of them any more; returns their lanes."""
        lanes = set()
        while self._posted:
            lanes.add(self._posted.popleft().lane)
        return lanes

    def _has_come(self, posted: _Posted) -> bool:
        lane = posted.lane
        try:
            return lane.poll() and lane.receive().call_id == posted.number
        except (ConnectionClosed, TransportTimeout, ProtocolError):
            self._discard(lane)
            return False

    def _go_on(self, posted: _Posted) -> None:
        if self._is_open(posted.lane):
            self._posted.append(posted)
        else:
            posted.lane.close()
