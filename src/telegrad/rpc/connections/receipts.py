"""Posts whose receipt has not come yet.

A post is acknowledged by a receipt that nobody waits for: it is read when a lane is next wanted, or
when the clock comes by. Until then the lane is not used, because its thread at the other end is
busy, and the post is kept: if the lane breaks, it is sent again. A lane whose receipt does not come
for a long time is closed: its handler is stuck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from telegrad.errors import ProtocolError
from telegrad.rpc.connections.waiting_lanes import WaitingLanes
from telegrad.transport.base import Connection, ConnectionClosed, TransportTimeout
from telegrad.wire.frames import Kind

__all__ = ["Receipts", "Request"]

_SECONDS = 60.0  # without its receipt for so long, a lane is closed


class Request(NamedTuple):
    """What was sent on a lane: the arguments of `Connection.send`."""

    kind: Kind
    flags: int
    number: int
    context_id: int
    message_id: int
    body: Sequence[bytes | memoryview]
    buffers: Sequence[memoryview]


class _Posted(NamedTuple):
    lane: Connection
    request: Request
    at: float


class Receipts(WaitingLanes[_Posted]):
    """
    Args:
        is_open, discard, put_back: see `WaitingLanes`.
        on_broken: gets a lane that has broken, how, and what was posted on it.
    """

    def __init__(
        self,
        is_open: Callable[[Connection], bool],
        discard: Callable[[Connection], None],
        put_back: Callable[[Connection], None],
        on_broken: Callable[[Connection, Exception, Request], None],
    ) -> None:
        super().__init__(is_open, discard, put_back)
        self._on_broken = on_broken

    def expect(self, lane: Connection, request: Request) -> None:
        """A post has left on the lane."""
        self._go_on(_Posted(lane, request, time.monotonic()))

    def take_one(self) -> bool:
        """Puts one lane back whose receipt has come, if there is any. Does not block."""
        for posted in self._taken():
            if self._has_come(posted):
                self._put_back(posted.lane)
                return True
            self._go_on(posted)
        return False

    def look(self, now: float) -> None:
        """Puts all of those back, and closes the lanes that have waited too long."""
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
            return lane.poll() and lane.receive().call_id == posted.request.number
        except (ConnectionClosed, TransportTimeout, ProtocolError) as error:
            self._on_broken(lane, error, posted.request)
            return False
