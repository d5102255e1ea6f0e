"""Another worker, as this one sees it: the connections to it, and whether it is alive.

A *lane* carries one call at a time. The caller takes an idle one, writes its request and reads the
reply itself; at the other end a thread of the lane's own runs the call. Nobody has to be woken
besides those two. There are as many lanes as there ever were calls at a time, so a call that comes
back around a circle of workers always finds a thread.

A post travels on a lane too, and is acknowledged by a receipt that nobody waits for.

Requests on a lane are numbered, and so are their answers: an answer that comes twice, or to a
request that came twice, is not taken for another's.

Who decides that the worker is lost: `Liveness`, by what happens on the multiplexed connection. It
ends, it is silent for too long, it brings a goodbye, or a new worker has taken the place. A lane
decides nothing. One that breaks is dropped; once the worker has given a sign of life, its request
is sent again on another lane. The other end knows by the number whether it has begun already
(`begun_requests`), so nothing runs twice.

A peer that is lost comes back as soon as it can be connected to again, under the same incarnation
(the network had failed) or another (the worker was restarted).
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from telegrad.errors import (
    AuthenticationError,
    ProtocolError,
    ReplyLost,
    RpcTimeout,
    TelegradError,
    WorkerLost,
)
from telegrad.locks import is_held_here
from telegrad.rpc.calls.error_texts import timeout_text
from telegrad.rpc.calls.outcome import describe_message
from telegrad.rpc.connections.begun_requests import BegunRequests
from telegrad.rpc.connections.conversation import Interruption
from telegrad.rpc.connections.late_replies import LateReplies
from telegrad.rpc.connections.liveness import (
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
from telegrad.rpc.connections.multiplex import Multiplex
from telegrad.rpc.connections.processor_time import ProcessorTime
from telegrad.rpc.connections.receipts import Receipts, Request
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.sent_references import SentReferences
from telegrad.transport.base import Connection, ConnectionClosed, TransportTimeout
from telegrad.transport.handshake import Purpose
from telegrad.transport.same_host.shm import SharedMemory
from telegrad.wire.codec import References
from telegrad.wire.frames import Flags, Frame, Kind

__all__ = ["SHUT_DOWN", "BegunExchange", "Peer", "not_sent"]

SHUT_DOWN = "this worker has shut down"
"""Why calls fail that are open when it does."""

# How long an idle lane may take to swallow a message. It is the usual timeout of calls: a lane that
# serves both does not have to be told a new one each time.
_POST_SECONDS = 60.0
_MOST_POSTED = 32  # lanes with a receipt outstanding: each is a thread at the peer
_MOST_BEGUN = 16  # the same for requests whose reply is waited for later
_IDLE_SECONDS = 30.0  # after which a lane that nobody needed is closed
_KEPT_LANES = 2
_NUMBER = struct.Struct("<q")  # of a request
_TRIES = 3  # lanes on which a request is sent again, when one breaks after the other


class BegunExchange:
    """A request that was sent, on a lane that is its own until its reply has come.

    Args:
        lane: None if it broke.
        what: describes the request; or, without a lane, sends it again and waits.
    """

    __slots__ = ("_lane", "_peer", "_what", "request")

    def __init__(
        self, peer: Peer, lane: Connection | None, request: Request, what: Callable[[], Any]
    ) -> None:
        self._peer = peer
        self._lane = lane
        self.request = request
        self._what = what
        if lane is not None:
            peer._begun.add(lane)

    def wait(self) -> Frame:
        """The reply. Call it once, on any thread.

        Ends in the reply, in `WorkerLost` when the worker is lost, or in `ReplyLost`.
        """
        lane, self._lane = self._lane, None
        if lane is None:
            frame: Frame = self._what()
            return frame
        self._peer._begun.discard(lane)
        return self._peer._end(self, lane, self._what)

    def __del__(self) -> None:
        lane = self._lane
        if lane is not None:  # nobody waits any more; a destructor takes no lock
            self._peer._begun.discard(lane)
            self._peer._connections.discard(lane)
            lane.close()


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
        on_lost: Callable[[Peer, DeclareLost], None],
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
        self._begun: set[Connection] = set()  # lanes whose reply is waited for later
        self._idle: list[Connection] = []  # append and pop are atomic: no lock on the way of a call
        self._is_closed = False
        self._used_lanes: set[Connection] = set()  # since they were last trimmed
        self._lanes_trimmed_at = time.monotonic()
        self._on_late = partial(on_late, self)
        keepers = self._is_open, self._discard, partial(self._put_back, is_cold=True)
        self._receipts = Receipts(*keepers, self._post_broke)
        self._late = LateReplies(*keepers, self._on_late)
        self._numbers = itertools.count(1, 2)  # an agent's other calls have even ones
        self.begun = BegunRequests()
        """Of the requests that the worker has made here."""
        self.sent_references = SentReferences()
        self._connections: set[Connection] = set()  # every open one, so that a loss can end them
        self._connections_lock = threading.RLock()  # guards the set above and the two below
        self._multiplexes: list[Multiplex] = []
        self._liveness = Liveness(*heartbeat, time.monotonic())
        self._last_loss = ""  # why it was lost when it was last; it may be back
        self._reads: dict[Connection, int] = {}  # as they were at the last tick
        self._computing = ProcessorTime(heartbeat[1])
        self._opening_lock = threading.RLock()  # one thread opens the first multiplex

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
        references: References | None = None,
    ) -> Frame:
        """Sends a request and waits for its reply, on this thread.

        Ends in the reply, in `RpcTimeout` after `timeout` seconds, in `WorkerLost` when the worker
        is lost, which the heartbeat sees to if it no longer answers, or in `ReplyLost`.

        Args:
            references: in the request. They are abandoned if something else ends it, Ctrl-C say,
                before all of it was sent.
        """
        seconds = timeout
        try:
            lane = self._idle_lane()
            if lane is None:
                lane, seconds = self._open_lane_within(timeout)
        except TransportTimeout:
            raise self.timed_out(timeout or 0.0, what(), was_sent=False) from None
        except WorkerLost as error:
            raise not_sent(error, what()) from None
        except BaseException:
            if references is not None:
                references.abandon()
            raise
        number = next(self._numbers)
        until = None if seconds is None else time.monotonic() + seconds
        reads = -1
        try:
            lane.set_timeout(seconds, until)
            if references is not None:
                references.leave()
            lane.send(kind, flags, number, context_id, message_id, body, buffers)
            reads = lane.reads
            frame = lane.receive()
            while frame.call_id != number:
                frame = lane.receive()
            self._put_back(lane)
        except TransportTimeout:
            if lane.reads == reads:
                self._late.keep(lane, number)
            else:  # in the middle of a message
                self._discard(lane)
            raise self.timed_out(timeout or 0.0, what(), was_sent=reads >= 0) from None
        except (ConnectionClosed, ProtocolError) as error:
            broken = self._broken(lane, error)
            request = Request(kind, flags, number, context_id, message_id, body, buffers)
            return self._exchange_again(request, reads >= 0, broken, what, timeout, until)
        except BaseException:
            # Ctrl-C while waiting: the reply would be taken for the next call's.
            self._discard(lane)
            self.leave_unread(number)
            if reads < 0 and references is not None:
                references.abandon()
            raise
        return frame

    def leave_unread(self, number: int) -> None:
        """Nobody unpacks the reply to this request of a lane, which may hold references. Whether
        the request has arrived, and the reply left, is not known."""
        self._on_late(partial(self._tell_unread, number))

    def _tell_unread(self, number: int) -> None:
        with contextlib.suppress(TelegradError):  # it is lost, and its references with it
            what = partial(describe_message, Kind.UNREAD)
            self.post(Kind.UNREAD, -1, -1, (_NUMBER.pack(number),), (), what)

    @property
    def has_many_begun(self) -> bool:
        """Whether many requests are under way whose reply is waited for later."""
        return len(self._begun) >= _MOST_BEGUN

    def begin(
        self,
        kind: Kind,
        body: Sequence[bytes | memoryview],
        buffers: Sequence[memoryview],
        what: Callable[[], str],
        flags: int = 0,
    ) -> BegunExchange:
        """Sends a request whose reply is waited for later.

        Raises:
            WorkerLost: it cannot be sent.
        """
        try:
            lane = self._idle_lane() or self._open_lane(None)
        except WorkerLost as error:
            raise not_sent(error, what()) from None
        request = Request(kind, flags, next(self._numbers), -1, -1, body, buffers)
        try:
            lane.set_timeout(None)
            lane.send(*request)
        except (ConnectionClosed, ProtocolError) as error:
            again = partial(
                self._exchange_again, request, False, self._broken(lane, error), what, None, None
            )
            return BegunExchange(self, None, request, again)
        except BaseException:
            self._discard(lane)
            raise
        return BegunExchange(self, lane, request, what)

    def _end(self, begun: BegunExchange, lane: Connection, what: Callable[[], str]) -> Frame:
        request = begun.request
        try:
            frame = lane.receive()
            while frame.call_id != request.number:
                frame = lane.receive()
        except (ConnectionClosed, ProtocolError) as error:
            broken = self._broken(lane, error)
            return self._exchange_again(request, True, broken, what, None, None)
        except BaseException:
            self._discard(lane)
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
        lanes: int = _MOST_POSTED,
    ) -> None:
        """Sends a message that has no answer.

        It travels on a lane and is kept until its receipt has come, so that it can be sent again if
        the lane breaks. One that is large, or that comes when many others are under way, takes the
        multiplexed connection, whose end is the worker's loss.

        Args:
            lanes: how many may have a receipt outstanding; beyond it, it shares the multiplex.
        """
        try:
            is_crowded = len(self._receipts) >= lanes and not self._receipts.take_one()
            if buffers or is_crowded:
                message = (kind, Flags.NO_ANSWER, 0, context_id, message_id, body, buffers)
                self._send_on_multiplex(message, what)
                return
            lane = self._idle_lane() or self._open_lane(None)
        except WorkerLost as error:
            raise not_sent(error, what()) from None
        number = next(self._numbers)
        request = Request(kind, Flags.NO_ANSWER, number, context_id, message_id, body, ())
        try:
            lane.set_timeout(_POST_SECONDS)
            lane.send(*request)
        except TransportTimeout:
            self._discard(lane)
            raise self.silent(what()) from None
        except ConnectionClosed as error:
            self._send_again_later(request, self._broken(lane, error), was_sent=False)
            return
        except BaseException:
            self._discard(lane)
            raise
        self._receipts.expect(lane, request)

    def _send_on_multiplex(self, message: tuple[Any, ...], what: Callable[[], str]) -> None:
        multiplex = self.multiplex()
        try:
            multiplex.send(*message)
        except ConnectionClosed as error:
            self.multiplex_ended(multiplex, str(error))
            raise self.loss(what()) from None

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
        was_sent = False
        try:
            lane.set_timeout(_POST_SECONDS)
            lane.send(kind, Flags.CONVERSATION, number, -1, -1, body, buffers)
            was_sent = True
            meanwhile()
            descriptor = lane.fileno()
            if descriptor < 0:
                lane.set_timeout(None)
                return self._receipt(lane, number)
            is_there = lane.has_more()
            while not is_there and interruption.wait_for(descriptor):
                is_there = lane.poll()  # or else it was nothing but a call to wake up
            if is_there:
                return self._receipt(lane, number)
            lane.set_timeout(None)
            receive: Callable[[], Frame] = partial(self._receipt, lane, number)
        except TransportTimeout:
            self._discard(lane)
            raise self.silent(describe_message(kind)) from None
        except (ConnectionClosed, ProtocolError) as error:
            broken = self._broken(lane, error)
            if broken.was_lost:
                raise self.loss(describe_message(kind)) from None
            if not was_sent:
                meanwhile()
            receive = partial(_raise, broken)
        except WorkerLost:
            raise
        except BaseException:
            self._discard(lane)
            raise
        request = Request(kind, Flags.CONVERSATION, number, -1, -1, body, buffers)
        finish_later(partial(self._receipt_or_nothing, receive, lane, request, was_sent))
        return None

    def _receipt(self, lane: Connection, number: int) -> Frame:
        frame = lane.receive()
        while frame.call_id != number:
            frame = lane.receive()
        self._put_back(lane)
        return frame

    def _receipt_or_nothing(
        self,
        receive: Callable[[], Frame],
        lane: Connection,
        request: Request,
        was_sent: bool,
    ) -> Frame | None:
        try:
            return receive()
        except _Broken as error:
            broken = error
        except (ConnectionClosed, TransportTimeout, ProtocolError) as error:
            broken = self._broken(lane, error)
        return self._deliver(request, was_sent, broken)

    # -- a lane that has broken

    def _broken(self, lane: Connection, error: Exception) -> _Broken:
        """What there is to know of a lane that has broken, which is dropped."""
        was_lost = lane not in self._connections
        self._discard(lane)
        return _Broken(str(error), was_lost=was_lost)

    def _exchange_again(
        self,
        request: Request,
        was_sent: bool,
        broken: _Broken,
        what: Callable[[], str],
        timeout: float | None,
        until: float | None,
    ) -> Frame:
        """Sends a request on another lane, and waits for its reply.

        What ends each wait: the reply, `until`, another broken lane, or the worker's loss.
        """
        for _ in range(_TRIES):
            if broken.was_lost:
                break
            try:
                self._wait_for_sign_of_life(what)
                lane = self._open_lane(None)
            except WorkerLost as error:
                broken = _Broken(error.reason, was_lost=self._has_no_multiplex())
                continue
            if was_sent:
                request = request._replace(flags=request.flags | Flags.RESENT)
            try:
                seconds = None if until is None else max(until - time.monotonic(), 1e-3)
                lane.set_timeout(seconds, until)
                lane.send(*request)
                was_sent = True
                frame = lane.receive()
                while frame.call_id != request.number:
                    frame = lane.receive()
            except TransportTimeout:
                self._discard(lane)
                raise self.timed_out(timeout or 0.0, what(), was_sent=was_sent) from None
            except (ConnectionClosed, ProtocolError) as error:
                broken = self._broken(lane, error)
                continue
            except BaseException:
                self._discard(lane)
                self.leave_unread(request.number)
                raise
            self._put_back(lane)
            if frame.flags & Flags.RESENT:
                break  # it has begun, and what it has answered is lost
            return frame
        if broken.was_lost or not was_sent:
            raise self.loss(what(), str(broken))
        raise ReplyLost(
            f"the connection to worker {self.info.name!r} broke during {what()}: {broken}. The "
            "worker is alive; how much of the call was done there is not known",
            worker=self.info.name,
            reason=str(broken),
        )

    def _post_broke(self, lane: Connection, error: Exception, request: Request) -> None:
        self._send_again_later(request, self._broken(lane, error), was_sent=True)

    def _send_again_later(self, request: Request, broken: _Broken, *, was_sent: bool) -> None:
        """On another thread: it may have to wait."""
        if not broken.was_lost:
            self._on_late(partial(self._deliver, request, was_sent, broken))

    def _deliver(self, request: Request, was_sent: bool, broken: _Broken) -> Frame | None:
        """Sends a message again and returns its receipt; None if the worker is lost. It also counts
        as lost if what it has posted back, or the message itself, is lost for good."""
        what = partial(describe_message, request.kind)
        until = time.monotonic() + _POST_SECONDS
        try:
            return self._exchange_again(request, was_sent, broken, what, _POST_SECONDS, until)
        except ReplyLost as error:
            if not request.flags & Flags.CONVERSATION:
                return None  # it has begun, and that is all
            self.lose(str(error))
        except RpcTimeout as error:
            self.lose(str(error))
        except WorkerLost as error:
            self.lose(error.reason)  # if it is not known yet
        return None

    def _wait_for_sign_of_life(self, what: Callable[[], str]) -> None:
        """Waits until the multiplexed connection brings something, now that another connection has
        broken; the worker may be dead, and that be known in a moment. Ends by that, too: the
        heartbeat sees to it.

        Raises:
            WorkerLost
        """
        reads = {multiplex: multiplex.reads for multiplex in self._multiplexes}
        self.ping()
        pause = 0.0002
        while not self._is_closed and not self._has_no_multiplex():
            if any(multiplex.reads > before for multiplex, before in reads.items()):
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        raise self.loss(what())

    def _has_no_multiplex(self) -> bool:
        return self.is_lost or all(multiplex.is_closed for multiplex in self._multiplexes)

    # -- lanes

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
        is_second = is_held_here(self._opening_lock)
        # Whoever opens it needs no longer than any connection does.
        is_opening: list[bool] = []
        try:
            # Noted in the step that takes it: Ctrl-C between two would keep it for good.
            is_opening.extend(
                map(self._opening_lock.acquire, (True,), (-1 if seconds is None else seconds,))
            )
            if not is_opening[0]:
                raise TransportTimeout(f"no connection within {seconds:g} seconds")
            for multiplex in self._multiplexes:
                if not multiplex.is_closed:
                    return multiplex
            purpose = Purpose.SECOND_MULTIPLEX if is_second else Purpose.MULTIPLEX
            connection = self._connect(self, purpose, seconds)
            multiplex = self._new_multiplex(self, connection)
            self.add(connection)
            try:
                self.adopt(multiplex, is_opener=True)
            except ConnectionClosed as error:
                self.remove(connection)
                raise self.unreachable(error) from None
            return multiplex
        finally:
            if is_opening and is_opening[0]:
                self._opening_lock.release()

    def adopt(
        self, multiplex: Multiplex, *, is_opener: bool = False, is_second: bool = False
    ) -> None:
        """Takes a multiplex into use; one that the peer has opened serves both ways.

        Args:
            is_opener: this worker has opened it.
            is_second: the peer has opened it as a `SECOND_MULTIPLEX`.

        Raises:
            ConnectionClosed: it cannot be read.
        """
        with self._connections_lock:
            self._multiplexes = [m for m in self._multiplexes if not m.is_closed] + [multiplex]
            self._liveness.handle(Connected(), time.monotonic())
        multiplex.is_second = is_second
        multiplex.start(is_opener=is_opener)

    def reopened(self) -> None:
        """The worker opens another multiplexed connection. If the one is still open here that it
        had opened before, it has lost this worker meanwhile: it was silent, and that is not known
        here yet. What depends on the old connection ends before the new one is used."""
        if any(not (m.is_closed or m.is_opener or m.is_second) for m in self._multiplexes):
            self.lose("it had lost this worker, and has connected again")

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
        """The worker has left, was replaced, or cannot be relied on: ends every connection to it
        and every wait on them."""
        with self._connections_lock:
            effects = self._liveness.handle(Ended(reason), time.monotonic())
        self._carry_out(effects)

    def multiplex_ended(self, multiplex: Multiplex, reason: str) -> None:
        """The worker is gone with it, unless there is another one: of two, the last to end tells,
        and a worker that has come back is not lost by what is left of before."""
        with self._connections_lock:
            if any(not other.is_closed for other in self._multiplexes if other is not multiplex):
                return
            self._liveness.handle(Heard(), multiplex.heard_at)
            effects = self._liveness.handle(Ended(reason, is_break=True), time.monotonic())
        self._carry_out(effects)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, DeclareLost):
                self._last_loss = effect.reason
                self.sent_references.clear()
                self._end_connections()
                self._on_lost(self, effect)

    def _end_connections(self) -> None:
        with self._connections_lock:
            connections = list(self._connections)
            self._connections.clear()
        idle = self._receipts.give_up() | self._late.give_up()
        while True:
            try:
                idle.add(self._idle.pop())
            except IndexError:  # another thread may take the last one: that closes it
                break
        for connection in connections:
            connection.interrupt()  # whoever waits on it wakes, and closes it
        for lane in idle:
            lane.close()

    def loss(self, what: str, reason: str = "") -> WorkerLost:
        """The error of something that needed the worker, which is lost.

        Args:
            reason: why, if nothing else is known.
        """
        reason = self._liveness.reason or self._last_loss or reason or "the connection was closed"
        return WorkerLost(
            f"worker {self.info.name!r} was lost during {what}: {reason}. How much of it was "
            "done there is not known",
            worker=self.info.name,
            reason=reason,
        )

    def silent(self, what: str) -> WorkerLost:
        """The error of a message that the worker does not take."""
        reason = f"it has taken no message for {_POST_SECONDS:g} seconds"
        return WorkerLost(
            f"{what} could not be sent to worker {self.info.name!r}: {reason}",
            worker=self.info.name,
            reason=reason,
        )

    def timed_out(self, seconds: float, what: str, *, was_sent: bool = True) -> RpcTimeout:
        return RpcTimeout(
            timeout_text(f"worker {self.info.name!r}", what, seconds, was_sent=was_sent),
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
        heard_at = max(m.heard_at for m in live)
        with self._connections_lock:
            before, self._reads = self._reads, {c: c.reads for c in self._connections}
            if any(reads > before.get(c, reads) for c, reads in self._reads.items()):
                heard_at = now
            self._liveness.handle(Heard(), heard_at)
            if self._liveness.is_quiet(now) and self._computing.has_grown(
                live[0].peer_process, now
            ):
                self._liveness.handle(Heard(), now)
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
        """Asks for a sign of life. Does not wait."""
        for multiplex in self._multiplexes:
            if not multiplex.is_closed:
                try:
                    multiplex.send_if_free(Kind.PING)
                except (ConnectionClosed, TransportTimeout):
                    continue  # its reader sees the end as well, and tells

    def unread(self, body: bytes) -> None:
        """The worker has not unpacked the reply to a request of its own."""
        self.sent_references.unread(_NUMBER.unpack(body)[0])

    def decline(self) -> None:
        """Tells of shared memory that could not be taken. May block."""
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
    def waiting_senders(self) -> int:
        """How many threads wait until the worker takes what they send."""
        return sum(len(m.senders) for m in self._multiplexes)

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


class _Broken(Exception):
    """How a lane has ended.

    Attributes:
        was_lost: the worker was lost before, and the lane ended by that.
    """

    def __init__(self, reason: str, *, was_lost: bool) -> None:
        super().__init__(reason)
        self.was_lost = was_lost


def _raise(broken: _Broken) -> NoReturn:
    raise broken


def not_sent(error: WorkerLost, what: str) -> WorkerLost:
    """The error of a call for which no connection could be had."""
    return WorkerLost(f"{error}; {what} was not sent", worker=error.worker, reason=error.reason)
