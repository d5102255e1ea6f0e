"""Posts whose receipt has not come yet.

A post is acknowledged by a receipt that nobody waits for: it is read when a lane is next wanted, or
when the clock comes by. Until then the lane is not used, because its thread at the other end is
busy. One whose receipt does not come for a long time is closed.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from telegrad.errors import ProtocolError
from telegrad.rpc.waiting_lanes import WaitingLanes
from telegrad.transport.base import Connection, ConnectionClosed, TransportTimeout

__all__ = ["Receipts"]

_SECONDS = 60.0  # without its receipt for so long, a lane is closed


class _Posted(NamedTuple):
    lane: Connection
    number: int
    at: float


class Receipts(WaitingLanes[_Posted]):
    def expect(self, lane: Connection, number: int) -> None:
        """A post of this number has left on the lane."""
        self._go_on(_Posted(lane, number, time.monotonic()))

    def take_one(self) -> bool:
        """Puts one lane back whose receipt has come, if there is any. Does not block."""
        for posted in self._taken():
            if self._has_come(posted):
                self._put_back(posted.lane)
                return True
            self._go_on(posted)
        return False

    def look(self, now: float) -> None:
        """Puts all of those back, and closes the lanes that have waited too long: the message or
        its receipt was lost, or its handler is stuck."""
        for posted in self._taken():
            if self._has_come(posted):
                self._put_back(posted.lane)
            elif now - posted.at > _SECONDS:
                self._discard(posted.lane)
            else:
                self._go_on(posted)

    def _has_come(self, posted: _Posted) -> bool:
        lane = posted.lane
        try:
            return lane.poll() and lane.receive().call_id == posted.number
        except (ConnectionClosed, TransportTimeout, ProtocolError):
            self._discard(lane)
            return False
