"""The lanes to one peer, and what each of them is at.

A *lane* is a connection that carries one request at a time. The caller writes the request and reads
the reply itself; at the other end a thread of the lane's own runs it. There are as many lanes as
there ever were requests at a time, so a call that comes back around a circle of workers always
finds a thread.

| a lane is | and leaves that state by |
|---|---|
| idle | a request that takes it; it is closed when nobody needs it for a while |
| in use | the reply (idle), or an error (closed) |
| begun: its reply is waited for later | the wait for it (in use) |
| posted on: its receipt has not come | the receipt (idle), or 60 seconds without it (closed) |
| given up: its reply may still come | the reply (handed over, idle), or its end |

A post is acknowledged by a receipt that no thread waits for: it is read when a lane is next wanted,
or when the clock comes by. A call that was given up has a lane on which its reply may still come;
it may hold references, which end only when it is unpacked.

Every lane that is lost, whatever it is at, is closed by the peer's loss.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from telegrad.errors import ProtocolError
from telegrad.transport.base import Connection, ConnectionClosed, TransportTimeout
from telegrad.transport.handshake import Purpose
from telegrad.wire.frames import Frame, Kind

if TYPE_CHECKING:
    from telegrad.rpc.connections.peer import Peer

__all__ = ["Lanes", "Request"]

_IDLE_SECONDS = 30.0  # after which a lane that no thread needed is closed
_KEPT_LANES = 2
_RECEIPT_SECONDS = 60.0  # without its receipt for so long, a lane is closed: its handler is stuck
_MOST_GIVEN_UP = 64  # beyond it the oldest is closed, and what it would have brought is lost
_REPLY_SECONDS = 60.0  # for the rest of a reply that has begun to come

_BROKEN = (ConnectionClosed, TransportTimeout, ProtocolError)


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


class _GivenUp(NamedTuple):
    lane: Connection
    number: int


_Awaiting = TypeVar("_Awaiting", _Posted, _GivenUp)


class Lanes:
    """Threads may use it freely. It takes no lock: appending and popping are atomic.

    Args:
        on_post_broken: gets a lane that broke before its receipt came, how, and what was posted.
        on_late_reply: gets what reads a reply that no thread waits for any more; that may block,
            and returns None if the reply does not come.
    """

    def __init__(
        self,
        peer: Peer,
        on_post_broken: Callable[[Connection, Exception, Request], None],
        on_late_reply: Callable[[Callable[[], Frame | None]], None],
    ) -> None:
        self._peer = peer
        self._on_post_broken = on_post_broken
        self._on_late_reply = on_late_reply
        self._idle: list[Connection] = []
        self.begun: set[Connection] = set()
        self._posted: collections.deque[_Posted] = collections.deque()
        self._given_up: collections.deque[_GivenUp] = collections.deque()
        self._used: set[Connection] = set()  # since they were last trimmed
        self._trimmed_at = time.monotonic()

    # -- idle, and in use

    def take(self) -> Connection | None:
        """An idle lane, if there is one."""
        while True:
            try:
                lane = self._idle.pop()
            except IndexError:
                if not self.reclaim():
                    return None
                continue
            if self._peer.is_open(lane):
                return lane
            lane.close()  # it is from before a loss, and was in use then

    def open(self, seconds: float | None = None) -> Connection:
        """A new lane.

        Raises:
            WorkerLost: the worker cannot be reached.
            TransportTimeout: not within `seconds`.
        """
        peer = self._peer
        peer.multiplex(seconds)  # it watches the lanes: without it a loss would not be noticed
        lane = peer.connect(Purpose.LANE, seconds)
        peer.add(lane)
        lane.open_mailbox()
        return lane

    def open_within(self, seconds: float | None) -> tuple[Connection, float | None]:
        """A new lane, and how much of the time is left then."""
        if seconds is None:
            return self.open(), None
        end = time.monotonic() + seconds
        return self.open(seconds), max(end - time.monotonic(), 1e-3)

    def put_back(self, lane: Connection, *, is_cold: bool = False) -> None:
        """The lane is idle. The next request takes the one that was put back last, because its
        thread is still awake at the other end; a cold one goes behind the others."""
        if not self._peer.is_open(lane):
            lane.close()
            return
        self._used.add(lane)
        if is_cold:
            self._idle.insert(0, lane)
        else:
            self._idle.append(lane)

    def discard(self, lane: Connection) -> None:
        self._peer.remove(lane)
        lane.close()

    # -- posted on

    @property
    def posted_count(self) -> int:
        return len(self._posted)

    def expect_receipt(self, lane: Connection, request: Request) -> None:
        """A post has left on the lane."""
        self._await(self._posted, _Posted(lane, request, time.monotonic()))

    def reclaim(self) -> bool:
        """Makes one lane idle whose receipt has come, if there is any. Does not block."""
        for posted in self._taken(self._posted):
            if self._has_receipt(posted):
                self.put_back(posted.lane, is_cold=True)
                return True
            self._await(self._posted, posted)
        return False

    def _has_receipt(self, posted: _Posted) -> bool:
        lane = posted.lane
        has_come = False
        try:
            has_come = lane.poll()
            return has_come and lane.receive().call_id == posted.request.number
        except _BROKEN as error:
            self._on_post_broken(lane, error, posted.request)
            return False
        except BaseException:  # Ctrl-C
            if has_come:
                self.discard(lane)  # a part of the receipt may have been read
            else:
                self._await(self._posted, posted)
            raise

    # -- given up

    @property
    def given_up_count(self) -> int:
        return len(self._given_up)

    def give_up(self, lane: Connection, number: int) -> None:
        """No thread waits any more for the reply to the request of this number."""
        if len(self._given_up) >= _MOST_GIVEN_UP:
            oldest = next(self._taken(self._given_up), None)
            if oldest is not None:
                self.discard(oldest.lane)
        lane.set_timeout(_REPLY_SECONDS)
        self._await(self._given_up, _GivenUp(lane, number))

    def _read_late(self, given_up: _GivenUp) -> Frame | None:
        lane = given_up.lane
        try:
            frame = lane.receive()
            while frame.call_id != given_up.number:
                frame = lane.receive()
        except _BROKEN:
            self.discard(lane)
            return None
        self.put_back(lane, is_cold=True)
        return frame

    # -- by the clock

    def look(self, now: float) -> None:
        """Sees which receipts and late replies have come, and closes lanes that have waited or been
        idle for too long. Does not block."""
        for posted in self._taken(self._posted):
            if self._has_receipt(posted):
                self.put_back(posted.lane, is_cold=True)
            elif now - posted.at > _RECEIPT_SECONDS:
                self.discard(posted.lane)
            else:
                self._await(self._posted, posted)
        for given_up in self._taken(self._given_up):
            try:
                has_come = given_up.lane.poll()
            except _BROKEN:
                self.discard(given_up.lane)
                continue
            if has_come:
                self._on_late_reply(partial(self._read_late, given_up))
            else:
                self._await(self._given_up, given_up)
        if now - self._trimmed_at >= _IDLE_SECONDS:
            self._trimmed_at = now
            self._trim()

    def _trim(self) -> None:
        """Closes lanes that many threads needed once: each of them is a thread at the peer."""
        unused = [lane for lane in self._idle if lane not in self._used]
        for lane in unused[: max(0, len(self._idle) - _KEPT_LANES)]:
            try:
                self._idle.remove(lane)
            except ValueError:
                continue  # a request has just taken it
            self.discard(lane)
        self._used.clear()

    # -- the end

    def end(self) -> set[Connection]:
        """The peer is lost: returns those that no thread uses, to be closed."""
        unused = {posted.lane for posted in self._taken(self._posted)}
        unused |= {given_up.lane for given_up in self._taken(self._given_up)}
        while True:
            try:
                unused.add(self._idle.pop())
            except IndexError:  # another thread may take the last one: that closes it
                return unused

    def _await(self, awaiting: collections.deque[_Awaiting], entry: _Awaiting) -> None:
        if self._peer.is_open(entry.lane):
            awaiting.append(entry)
        else:
            entry.lane.close()

    @staticmethod
    def _taken(awaiting: collections.deque[_Awaiting]) -> Iterator[_Awaiting]:
        """Takes out those that are here now, the longest waiting first. Another thread may be
        taking some too."""
        for _ in range(len(awaiting)):
            try:
                yield awaiting.popleft()
            except IndexError:
                return
