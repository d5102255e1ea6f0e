"""Replies that nobody waits for any more.

A call that was given up has a lane of its own on which its reply may still come. It may hold
references to values, whose owners keep them until somebody has unpacked them: so the lane is kept
until then, and after that can be used again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from telegrad.errors import ProtocolError
from telegrad.rpc.connections.waiting_lanes import WaitingLanes
from telegrad.transport.base import Connection, ConnectionClosed, TransportTimeout
from telegrad.wire.frames import Frame

__all__ = ["LateReplies"]

_MOST = 64  # lanes; beyond it the oldest is closed, and what it would have brought is lost
_SECONDS = 60.0  # for the rest of a reply that has begun to come


class _Awaited(NamedTuple):
    lane: Connection
    number: int  # of the call


class LateReplies(WaitingLanes[_Awaited]):
    """
    Args:
        is_open, discard, put_back: see `WaitingLanes`.
        hand_over: gets what reads a reply. That may block, and returns None if it does not come.
    """

    def __init__(
        self,
        is_open: Callable[[Connection], bool],
        discard: Callable[[Connection], None],
        put_back: Callable[[Connection], None],
        hand_over: Callable[[Callable[[], Frame | None]], None],
    ) -> None:
        super().__init__(is_open, discard, put_back)
        self._hand_over = hand_over

    def keep(self, lane: Connection, number: int) -> None:
        """Somebody gave up waiting for the reply of this number."""
        if len(self) >= _MOST:
            oldest = next(self._taken(), None)
            if oldest is not None:
                self._discard(oldest.lane)
        lane.set_timeout(_SECONDS)
        self._go_on(_Awaited(lane, number))

    def look(self) -> None:
        """Hands over those that have come. Does not block."""
        for awaited in self._taken():
            try:
                has_come = awaited.lane.poll()
            except (ConnectionClosed, TransportTimeout, ProtocolError):
                self._discard(awaited.lane)
                continue
            if has_come:
                self._hand_over(partial(self._receive, awaited))
            else:
                self._go_on(awaited)

    def _receive(self, awaited: _Awaited) -> Frame | None:
        lane = awaited.lane
        try:
            frame = lane.receive()
            while frame.call_id != awaited.number:
                frame = lane.receive()
        except (ConnectionClosed, TransportTimeout, ProtocolError):
            self._discard(lane)
            return None
        self._put_back(lane)
        return frame
