"""Another worker, as this one sees it: the connections to it, and whether it is alive.

A *lane* carries one call at a time. The caller takes an idle one, writes its request and reads the
reply itself; at the other end a thread of the lane's own runs the call. Nobody has to be woken
besides those two. There are as many lanes as there ever were calls at a time, so a call that comes
back around a circle of workers always finds a thread.

A post travels on a lane too, and is acknowledged by a receipt that nobody waits for.

Requests on a lane are numbered, and so are their answers: an answer that comes twice, or to a
request that came twice, is not taken for another's.

A peer that is lost comes back as soon as it can be connected to again, under the same incarnation
(the network had failed) or another (the worker was restarted).
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from telegrad.errors import AuthenticationError, ProtocolError, RpcTimeout, WorkerLost
from telegrad.rpc.conversation import Interruption
from telegrad.rpc.late_replies import LateReplies
from telegrad.rpc.liveness import (
    Connected,
    DeclareLost,
    Effect,
    Ended,
    Heard,
    Liveness,
    SendPing,
    State,
    TimePassed,
)
from telegrad.rpc.multiplex import Multiplex
from telegrad.rpc.outcome import describe_message
from telegrad.rpc.receipts import Receipts
from telegrad.rpc.worker_info import WorkerInfo
from telegrad.transport.base import Connection, ConnectionClosed, TransportTimeout
from telegrad.transport.handshake import Purpose
from telegrad.transport.shm import SharedMemory
from telegrad.wire.frames import Flags, Frame, Kind

__all__ = ["SHUT_DOWN", "Peer", "not_sent"]

SHUT_DOWN = "this worker has shut down"
"""Why calls fail that are open when it does."""

# How long an idle lane may take to swallow a message. It is the usual timeout of calls: a lane that
# serves both does not have to be told a new one each time.
_POST_SECONDS = 60.0
_MOST_POSTED = 32  # lanes with a receipt outstanding; beyond it posts share the multiplex
_IDLE_SECONDS = 30.0  # after which a lane that nobody needed is closed
_KEPT_LANES = 2


class Peer:
    """
    Args:
        connect: opens and authenticates a connection to the worker, within so many seconds; raises
            TransportTimeout if these are fewer than there are for any connection.
        new_multiplex: wraps a connection, not yet started.
        on_lost: hears once of each loss, and why.
        memory: what large tensors travel through on one host, or None.
        heartbeat: seconds between signs of life, and seconds of silence that mean a loss.
        on_late: gets what reads a reply that nobody waits for any more, and may block.
    """

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: bytes,
        connect: Callable[[Peer, Purpose, float | None], Connection],
        new_multiplex: Callable[[Peer, Connection], Multiplex],
        on_lost: Callable[[Peer, str], None],
        memory: SharedMemory | None,
        heartbeat: tuple[float, float],
        on_late: Callable[[Peer, Callable[[], Frame | None]], None],
    ) -> None:
        self.info = info
        self.incarnation = incarnation
        self.memory = memory
        self._connect = connect
        self._new_multiplex = new_multiplex
        self._on_lost = on_lost
        self._idle: list[Connection] = []  # append and pop are atomic: no lock on the way of a call
        self._is_closed = False
        self._used_lanes: set[Connection] = set()  # since they were last trimmed
        self._lanes_trimmed_at = time.monotonic()
        keepers = self._is_open, self._discard, partial(self._put_back, is_cold=True)
        self._receipts = Receipts(*keepers)
        self._late = LateReplies(*keepers, partial(on_late, self))
        self._numbers = itertools.count(1)
        self._connections: set[Connection] = set()  # every open one, so that a loss can end them
        self._connections_lock = threading.Lock()  # guards the set above and the two below
        self._multiplexes: list[Multiplex] = []
        self._liveness = Liveness(*heartbeat, time.monotonic())
        self._opening_lock = threading.Lock()  # one thread opens the first multiplex

    def __repr__(self) -> str:
        state = self._liveness.state.name
        return f"Peer({self.info.name}, connections={len(self._connections)}, {state})"

    # -- the synchronous path

    def exchange(
        self,
        kind: Kind,
        context_id: int,
        message_id: int,
        body: Sequence[bytes | memoryview],
        buffers: Sequence[memoryview],
        timeout: float | None,
        what: Callable[[], str],
        flags: int = 0,
        on_unsent: Callable[[], None] | None = None,
    ) -> Frame:
        """Sends a request and waits for its reply, on this thread.

        Ends in the reply, in `RpcTimeout` after `timeout` seconds, or in `WorkerLost` when the
        connection ends, which the heartbeat sees to if the peer no longer answers.

        Args:
            on_unsent: called if something else ends it, Ctrl-C say, before all of it was sent.
        """
        lane = self._idle_lane()
        seconds = timeout
        if lane is None:
            try:
                lane, seconds = self._open_lane_within(timeout)
            except TransportTimeout:
                raise self.timed_out(timeout or 0.0, what(), was_sent=False) from None
            except WorkerLost as error:
                raise not_sent(error, what()) from None
            except BaseException:
                if on_unsent is not None:
                    on_unsent()
                raise
        number = next(self._numbers)
        reads = -1
        try:
            lane.set_timeout(seconds, None if seconds is None else time.monotonic() + seconds)
            lane.send(kind, flags, number, context_id, message_id, body, buffers)
            reads = lane.reads
            frame = lane.receive()
            while frame.call_id != number:
                frame = lane.receive()
        except TransportTimeout:
            if lane.reads == reads:
                self._late.keep(lane, number)
            else:  # in the middle of a message
                self._discard(lane)
            raise self.timed_out(timeout or 0.0, what(), was_sent=reads >= 0) from None
        except (ConnectionClosed, ProtocolError) as error:
            self._discard(lane)
            self.lose(str(error))
            raise self.loss(what()) from None
        except BaseException:  # Ctrl-C while waiting: the reply would be taken for the next call's
            self._discard(lane)
            if reads < 0 and on_unsent is not None:
                on_unsent()
            raise
        self._put_back(lane)
        return frame

    def post(
        self,
        kind: Kind,
        context_id: int,
        message_id: int,
        body: Sequence[bytes | memoryview],
        buffers: Sequence[memoryview],
        what: Callable[[], str],
    ) -> None:
        """Sends a message that has no answer."""
        try:
            if len(self._receipts) >= _MOST_POSTED and not self._receipts.take_one():
                self.multiplex().send(
                    kind, Flags.NO_ANSWER, 0, context_id, message_id, body, buffers
                )
                return
            lane = self._idle_lane() or self._open_lane(None)
        except ConnectionClosed as error:
            self.lose(str(error))
            raise self.loss(what()) from None
        except WorkerLost as error:
            raise not_sent(error, what()) from None
        number = next(self._numbers)
        try:
            lane.set_timeout(_POST_SECONDS)
            lane.send(kind, Flags.NO_ANSWER, number, context_id, message_id, body, buffers)
        except (ConnectionClosed, TransportTimeout) as error:
            self._discard(lane)
            self.lose(str(error) or f"it has taken no message for {_POST_SECONDS:g} seconds")
            raise self.loss(what()) from None
        except BaseException:
            self._discard(lane)
            raise
        self._receipts.expect(lane, number)

    def converse(
        self,
        kind: Kind,
        body: Sequence[bytes | memoryview],
        buffers: Sequence[memoryview],
        interruption: Interruption,
        finish_later: Callable[[Callable[[], Frame | None]], None],
        meanwhile: Callable[[], None],
    ) -> Frame | None:
        """Sends a post and waits for its receipt, on this thread.

        Ends in the receipt, in `WorkerLost`, or in None if it is interrupted: then `finish_later`
        gets what is to be run on another thread, and returns the receipt there, if it comes.
        """
        lane = self._idle_lane() or self._open_lane(None)
        number = next(self._numbers)
        try:
            lane.set_timeout(_POST_SECONDS)
            lane.send(kind, Flags.CONVERSATION, number, -1, -1, body, buffers)
            meanwhile()
            descriptor = lane.fileno()
            if descriptor < 0:
                lane.set_timeout(None)
                return self._receipt(lane, number, kind)
            is_there = lane.has_more()
            while not is_there and interruption.wait_for(descriptor):
                is_there = lane.poll()  # or else it was nothing but a call to wake up
            if is_there:
                return self._receipt(lane, number, kind)
            lane.set_timeout(None)
        except (ConnectionClosed, TransportTimeout) as error:
            self._discard(lane)
            self.lose(str(error) or f"it has taken no message for {_POST_SECONDS:g} seconds")
            raise self.loss(describe_message(kind)) from None
        except WorkerLost:
            raise
        except BaseException:
            self._discard(lane)
            raise
        finish_later(partial(self._receipt_or_nothing, lane, number, kind))
        return None

    def _receipt(self, lane: Connection, number: int, kind: Kind) -> Frame:
        try:
            frame = lane.receive()
            while frame.call_id != number:
                frame = lane.receive()
        except (ConnectionClosed, TransportTimeout, ProtocolError) as error:
            self._discard(lane)
            self.lose(str(error))
            raise self.loss(describe_message(kind)) from None
        self._put_back(lane)
        return frame

    def _receipt_or_nothing(self, lane: Connection, number: int, kind: Kind) -> Frame | None:
        try:
            return self._receipt(lane, number, kind)
        except WorkerLost:
            return None  # told to all who watch

    def _idle_lane(self) -> Connection | None:
        while True:
            try:
                lane = self._idle.pop()
            except IndexError:
                if not self._receipts.take_one():
                    return None
                continue
            if lane in self._connections:
                return lane
            lane.close()  # it is from before a loss, and was in use then

    def _open_lane_within(self, seconds: float | None) -> tuple[Connection, float | None]:
        """A new lane, and how much of the time is left then."""
        if seconds is None:
            return self._open_lane(None), None
        end = time.monotonic() + seconds
        return self._open_lane(seconds), max(end - time.monotonic(), 1e-3)

    def _put_back(self, lane: Connection, *, is_cold: bool = False) -> None:
        """Calls take the lane that was put back last: its thread is still awake at the other end.
        One that has not been used for a while goes behind the others."""
        if lane in self._connections:
            self._used_lanes.add(lane)
            if is_cold:
                self._idle.insert(0, lane)
            else:
                self._idle.append(lane)
        else:
            lane.close()

    def _is_open(self, lane: Connection) -> bool:
        return lane in self._connections

    def _open_lane(self, seconds: float | None) -> Connection:
        self.multiplex(seconds)  # it watches the lanes: without it nobody would hear of a loss
        lane = self._connect(self, Purpose.LANE, seconds)
        self.add(lane)
        lane.open_mailbox()
        return lane

    # -- connections

    def multiplex(self, seconds: float | None = None) -> Multiplex:
        """The connection for everything that is not answered in turn; opened at first use.

        Args:
            seconds: how long that may take, if less than for any connection.

        Raises:
            WorkerLost: the worker cannot be reached.
            TransportTimeout: not within `seconds`.
        """
        for multiplex in self._multiplexes:
            if not multiplex.is_closed:
                return multiplex
        # Whoever opens it needs no longer than any connection does.
        if not self._opening_lock.acquire(timeout=-1 if seconds is None else seconds):
            raise TransportTimeout(f"no connection within {seconds:g} seconds")
        try:
            for multiplex in self._multiplexes:
                if not multiplex.is_closed:
                    return multiplex
            connection = self._connect(self, Purpose.MULTIPLEX, seconds)
            multiplex = self._new_multiplex(self, connection)
            self.add(connection)
            try:
                self.adopt(multiplex, is_opener=True)
            except ConnectionClosed as error:
                self.remove(connection)
                raise self.unreachable(error) from None
            return multiplex
        finally:
            self._opening_lock.release()

    def adopt(self, multiplex: Multiplex, *, is_opener: bool = False) -> None:
        """Takes a multiplex into use; one that the peer has opened serves both ways.

        Args:
            is_opener: this worker has opened it.

        Raises:
            ConnectionClosed: it cannot be read.
        """
        with self._connections_lock:
            self._multiplexes = [m for m in self._multiplexes if not m.is_closed] + [multiplex]
            self._liveness.handle(Connected(), time.monotonic())
        multiplex.start(is_opener=is_opener)

    def add(self, connection: Connection) -> None:
        if self.memory is not None:
            connection.share_memory(self.memory)
        with self._connections_lock:
            self._connections.add(connection)
        if self._is_closed:
            connection.interrupt()  # too late: nobody else would end it any more

    def watch(self, connection: Connection) -> None:
        """Ends a connection that is being opened, too, when the worker is lost."""
        with self._connections_lock:
            self._connections.add(connection)

    def remove(self, connection: Connection) -> None:
        with self._connections_lock:
            self._connections.discard(connection)

    def _discard(self, lane: Connection) -> None:
        self.remove(lane)
        lane.close()

    @property
    def is_lost(self) -> bool:
        return self._liveness.state is State.LOST

    def lose(self, reason: str) -> None:
        """The worker is gone: ends every connection to it and every wait on them."""
        with self._connections_lock:
            effects = self._liveness.handle(Ended(reason), time.monotonic())
        self._carry_out(effects)

    def multiplex_ended(self, multiplex: Multiplex, reason: str) -> None:
        """The worker is gone with it, unless there is another one: of two, the last to end tells,
        and a worker that has come back is not lost by what is left of before."""
        with self._connections_lock:
            if any(not other.is_closed for other in self._multiplexes if other is not multiplex):
                return
            effects = self._liveness.handle(Ended(reason), time.monotonic())
        self._carry_out(effects)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, DeclareLost):
                self._end_connections()
                self._on_lost(self, effect.reason)

    def _end_connections(self) -> None:
        with self._connections_lock:
            connections = list(self._connections)
            self._connections.clear()
        idle = set()
        while self._idle:
            idle.add(self._idle.pop())
        idle |= self._receipts.give_up() | self._late.give_up()
        for connection in connections:
            connection.interrupt()  # whoever waits on it wakes, and closes it
        for lane in idle:
            lane.close()

    def loss(self, what: str) -> WorkerLost:
        reason = self._liveness.reason or "the connection was closed"
        return WorkerLost(
            f"worker {self.info.name!r} was lost during {what}: {reason}. How much of it was "
            "done there is not known",
            worker=self.info.name,
            reason=reason,
        )

    def timed_out(self, seconds: float, what: str, *, was_sent: bool = True) -> RpcTimeout:
        return RpcTimeout(
            f"RPC ran for more than set timeout ({seconds * 1000:.0f} ms) and will now be marked "
            f"with an error: {what} on worker {self.info.name!r}",
            worker=self.info.name,
            seconds=seconds,
            was_sent=was_sent,
        )

    def unreachable(self, error: Exception) -> WorkerLost:
        if isinstance(error, AuthenticationError | ProtocolError):
            reason = str(error)
        else:
            reason = f"cannot connect: {error}"
        reason = self._liveness.reason or reason
        return WorkerLost(
            f"worker {self.info.name!r} cannot be reached: {reason}",
            worker=self.info.name,
            reason=reason,
        )

    # -- signs of life

    def tick(self, now: float) -> bool:
        """Looks after the connections, and whether the peer is alive; returns whether it is to be
        asked for a sign of life."""
        live = [m for m in self._multiplexes if not m.is_closed]
        for multiplex in live:
            multiplex.tick(now)
        if not live:
            return False
        with self._connections_lock:
            self._liveness.handle(Heard(), max(m.heard_at for m in live))
            effects = self._liveness.handle(TimePassed(), now)
        self._carry_out(effects)
        return SendPing() in effects

    def trim(self, now: float) -> bool:
        """Lets go of what has not been used for a while, and of what nobody waits for; returns
        whether there is something to `decline`."""
        self._receipts.look(now)
        self._late.look()
        self._trim_lanes(now)
        if self.memory is None:
            return False
        self.memory.trim(now)
        return self.memory.has_declined

    def _trim_lanes(self, now: float) -> None:
        """Closes lanes that many threads needed once: each of them is a thread at the peer."""
        if now - self._lanes_trimmed_at < _IDLE_SECONDS:
            return
        unused = [lane for lane in self._idle if lane not in self._used_lanes]
        for lane in unused[: max(0, len(self._idle) - _KEPT_LANES)]:
            try:
                self._idle.remove(lane)
            except ValueError:
                continue  # somebody has just taken it
            self._discard(lane)
        self._used_lanes.clear()
        self._lanes_trimmed_at = now

    def ping(self) -> None:
        """Asks for a sign of life. May block on a full socket: not for the clock's thread."""
        for multiplex in self._multiplexes:
            if not multiplex.is_closed:
                try:
                    multiplex.send_if_free(Kind.PING)
                except (ConnectionClosed, TransportTimeout):
                    continue  # its reader sees the end as well, and tells

    def decline(self) -> None:
        """Tells of shared memory that could not be taken. May block, as `ping` may."""
        memory = self.memory
        declined = [] if memory is None else memory.take_declined()
        if declined:
            body = struct.pack(f"<{len(declined)}I", *declined)
            try:
                self.multiplex().send(Kind.DECLINED, body=(body,))
            except (ConnectionClosed, TransportTimeout, WorkerLost):
                pass  # with the worker, its memory is lost

    def declined(self, body: bytes) -> None:
        """The worker could not take these."""
        if self.memory is not None:
            self.memory.abandon(struct.unpack(f"<{len(body) // 4}I", body))

    @property
    def pending_count(self) -> int:
        return sum(m.pending_count for m in self._multiplexes)

    def close(self, *, goodbye_until: float) -> None:
        """Ends all connections, and fails what waits on them; the peer is told that this is no
        accident, if it listens until then, a time of `time.monotonic`."""
        self._is_closed = True
        for multiplex in self._multiplexes:
            if not multiplex.is_closed:
                multiplex.say_goodbye(max(1e-3, goodbye_until - time.monotonic()))
        self.lose(SHUT_DOWN)
        self._end_connections()  # also if it was lost before
        for multiplex in self._multiplexes:
            multiplex.give_up(SHUT_DOWN)

    def join(self) -> None:
        """Waits for the threads that read from the worker, once it is closed. They end by that,
        unless a callback of a program keeps one; it gets a few seconds."""
        for multiplex in self._multiplexes:
            multiplex.join(5.0)
        if self.memory is not None:
            self.memory.close()


def not_sent(error: WorkerLost, what: str) -> WorkerLost:
    """The error of a call for which no connection could be had."""
    return WorkerLost(f"{error}; {what} was not sent", worker=error.worker, reason=error.reason)
