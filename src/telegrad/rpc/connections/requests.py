"""Requests to one peer, over its lanes, and what becomes of them when a lane breaks.

There are four ways to make one:

| | who reads the answer |
|---|---|
| `exchange` | the caller, at once |
| `begin` | whoever waits for it later |
| `post` | no thread: it is acknowledged by a receipt (`lanes`) |
| `converse` | the caller; the receipt brings what the handler has posted back (`conversation`) |

Requests on a lane are numbered, and so are their answers: an answer that comes twice, or to a
request that came twice, is not taken for another's.

A lane that breaks decides nothing about the worker. Once the worker has given a sign of life, the
request is sent again on another lane. The other end knows by the number whether it has begun
already (`begun_requests`), so nothing runs twice.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from telegrad.errors import ProtocolError, ReplyLost, RpcTimeout, TelegradError, WorkerLost
from telegrad.rpc.calls.outcome import describe_message
from telegrad.rpc.connections.conversation import Interruption
from telegrad.rpc.connections.lanes import Lanes, Request
from telegrad.transport.base import Connection, ConnectionClosed, TransportTimeout
from telegrad.wire.codec import References
from telegrad.wire.frames import Flags, Frame, Kind

if TYPE_CHECKING:
    from telegrad.rpc.connections.peer import Peer

__all__ = ["POST_SECONDS", "BegunExchange", "Requests", "not_sent", "number_of_unread"]

POST_SECONDS = 60.0
"""How long an idle lane may take to swallow a message. It is the usual timeout of calls, so a lane
that serves both does not have to be told a new one each time."""

_MOST_POSTED = 32  # lanes with a receipt outstanding: each is a thread at the peer
_MOST_BEGUN = 16  # the same for requests whose reply is waited for later
_NUMBER = struct.Struct("<q")  # of a request
_TRIES = 3  # lanes on which a request is sent again, when one breaks after the other


class BegunExchange:
    """A request that was sent on a lane, which stays its own until the reply has come.

    Args:
        lane: None if it broke.
        what: describes the request; without a lane, sends it again and waits for the reply.
    """

    __slots__ = ("_lane", "_requests", "_what", "request")

    def __init__(
        self, requests: Requests, lane: Connection | None, request: Request, what: Callable[[], Any]
    ) -> None:
        self._requests = requests
        self._lane = lane
        self.request = request
        self._what = what
        if lane is not None:
            requests.lanes.begun.add(lane)

    def wait(self) -> Frame:
        """Waits for the reply. Call it once, on any thread.

        Ends with the reply, with `WorkerLost`, or with `ReplyLost`.
        """
        lane, self._lane = self._lane, None
        if lane is None:
            frame: Frame = self._what()
            return frame
        self._requests.lanes.begun.discard(lane)
        return self._requests.end(self, lane, self._what)

    def __del__(self) -> None:
        lane = self._lane
        if lane is not None:  # no thread waits for it any more
            self._requests.lanes.begun.discard(lane)
            self._requests.lanes.discard(lane)


class Requests:
    """
    Args:
        on_late: gets a function that reads a reply which no thread waits for, and may block.
    """

    def __init__(self, peer: Peer, on_late: Callable[[Callable[[], Frame | None]], None]) -> None:
        self._peer = peer
        self._on_late = on_late
        self._lanes = Lanes(peer, self._post_broke, on_late)
        self._numbers = itertools.count(1, 2)  # an agent's other calls have even ones

    @property
    def lanes(self) -> Lanes:
        return self._lanes

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

        Ends with the reply, with `RpcTimeout` after `timeout` seconds, with `WorkerLost` when the
        worker is lost (by the heartbeat, if it no longer answers), or with `ReplyLost`.

        Args:
            references: those in the request. They are abandoned if anything else, such as Ctrl-C,
                ends it before it was sent.
        """
        seconds = timeout
        try:
            lane = self._lanes.take()
            if lane is None:
                lane, seconds = self._lanes.open_within(timeout)
        except TransportTimeout:
            raise self._peer.timed_out(timeout or 0.0, what(), was_sent=False) from None
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
            frame = _answer(lane, number)
            self._lanes.put_back(lane)
        except TransportTimeout:
            if lane.reads == reads:
                self._lanes.give_up(lane, number)
            else:  # in the middle of a message
                self._lanes.discard(lane)
            raise self._peer.timed_out(timeout or 0.0, what(), was_sent=reads >= 0) from None
        except (ConnectionClosed, ProtocolError) as error:
            broken = self._broken(lane, error)
            request = Request(kind, flags, number, context_id, message_id, body, buffers)
            return self._exchange_again(request, reads >= 0, broken, what, timeout, until)
        except BaseException:
            # Ctrl-C while waiting: the next call would take this reply for its own.
            self._lanes.discard(lane)
            self.leave_unread(number)
            if reads < 0 and references is not None:
                references.abandon()
            raise
        return frame

    def leave_unread(self, number: int) -> None:
        """The reply to this request will not be unpacked; it may hold references. Whether the
        request has arrived, or the reply was sent, is not known."""
        self._on_late(partial(self._tell_unread, number))

    def _tell_unread(self, number: int) -> None:
        with contextlib.suppress(TelegradError):  # a lost worker has no references
            what = partial(describe_message, Kind.UNREAD)
            self.post(Kind.UNREAD, -1, -1, (_NUMBER.pack(number),), (), what)

    @property
    def has_many_begun(self) -> bool:
        """Whether many requests are under way whose reply is waited for later."""
        return len(self._lanes.begun) >= _MOST_BEGUN

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
            lane = self._lanes.take() or self._lanes.open()
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
            self._lanes.discard(lane)
            raise
        return BegunExchange(self, lane, request, what)

    def end(self, begun: BegunExchange, lane: Connection, what: Callable[[], str]) -> Frame:
        request = begun.request
        try:
            frame = _answer(lane, request.number)
        except (ConnectionClosed, ProtocolError) as error:
            broken = self._broken(lane, error)
            return self._exchange_again(request, True, broken, what, None, None)
        except BaseException:
            self._lanes.discard(lane)
            raise
        self._lanes.put_back(lane)
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
        the lane breaks. A large message, or one of many, takes the multiplexed connection instead,
        whose end is the worker's loss.

        Args:
            lanes: on how many lanes a receipt may be outstanding before it takes the multiplex.
        """
        try:
            is_crowded = self._lanes.posted_count >= lanes and not self._lanes.reclaim()
            if buffers or is_crowded:
                message = (kind, Flags.NO_ANSWER, 0, context_id, message_id, body, buffers)
                self._send_on_multiplex(message, what)
                return
            lane = self._lanes.take() or self._lanes.open()
        except WorkerLost as error:
            raise not_sent(error, what()) from None
        number = next(self._numbers)
        request = Request(kind, Flags.NO_ANSWER, number, context_id, message_id, body, ())
        try:
            lane.set_timeout(POST_SECONDS)
            lane.send(*request)
        except TransportTimeout:
            self._lanes.discard(lane)
            raise self._peer.silent(what()) from None
        except ConnectionClosed as error:
            self._send_again_later(request, self._broken(lane, error), was_sent=False)
            return
        except BaseException:
            self._lanes.discard(lane)
            raise
        self._lanes.expect_receipt(lane, request)

    def _send_on_multiplex(self, message: tuple[Any, ...], what: Callable[[], str]) -> None:
        multiplex = self._peer.multiplex()
        try:
            multiplex.send(*message)
        except ConnectionClosed as error:
            self._peer.multiplex_ended(multiplex, str(error))
            raise self._peer.loss(what()) from None

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

        Ends with the receipt, with `WorkerLost`, or with None if it is interrupted: then
        `finish_later` gets a function for another thread, which returns the receipt if it comes.
        """
        lane = self._lanes.take() or self._lanes.open()
        number = next(self._numbers)
        was_sent = False
        try:
            lane.set_timeout(POST_SECONDS)
            lane.send(kind, Flags.CONVERSATION, number, -1, -1, body, buffers)
            was_sent = True
            meanwhile()
            descriptor = lane.fileno()
            if descriptor < 0:
                lane.set_timeout(None)
                return self._receipt(lane, number)
            is_there = lane.has_more()
            while not is_there and interruption.wait_for(descriptor):
                is_there = lane.poll()  # if not, the frame only served to wake this thread
            if is_there:
                return self._receipt(lane, number)
            lane.set_timeout(None)
            receive: Callable[[], Frame] = partial(self._receipt, lane, number)
        except TransportTimeout:
            self._lanes.discard(lane)
            raise self._peer.silent(describe_message(kind)) from None
        except (ConnectionClosed, ProtocolError) as error:
            broken = self._broken(lane, error)
            if broken.was_lost:
                raise self._peer.loss(describe_message(kind)) from None
            if not was_sent:
                meanwhile()
            receive = partial(_raise, broken)
        except WorkerLost:
            raise
        except BaseException:
            self._lanes.discard(lane)
            raise
        request = Request(kind, Flags.CONVERSATION, number, -1, -1, body, buffers)
        finish_later(partial(self._receipt_or_nothing, receive, lane, request, was_sent))
        return None

    def _receipt(self, lane: Connection, number: int) -> Frame:
        frame = _answer(lane, number)
        self._lanes.put_back(lane)
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
        """Drops a lane that broke; returns what is known about it."""
        was_lost = not self._peer.is_open(lane)
        self._lanes.discard(lane)
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

        Each wait ends with the reply, at `until`, or with the loss of the lane or the worker.
        """
        for _ in range(_TRIES):
            if broken.was_lost:
                break
            try:
                self._peer.wait_for_sign_of_life(what)
                lane = self._lanes.open()
            except WorkerLost as error:
                broken = _Broken(error.reason, was_lost=self._peer.has_no_multiplex())
                continue
            if was_sent:
                request = request._replace(flags=request.flags | Flags.RESENT)
            try:
                seconds = None if until is None else max(until - time.monotonic(), 1e-3)
                lane.set_timeout(seconds, until)
                lane.send(*request)
                was_sent = True
                frame = _answer(lane, request.number)
            except TransportTimeout:
                self._lanes.discard(lane)
                raise self._peer.timed_out(timeout or 0.0, what(), was_sent=was_sent) from None
            except (ConnectionClosed, ProtocolError) as error:
                broken = self._broken(lane, error)
                continue
            except BaseException:
                self._lanes.discard(lane)
                self.leave_unread(request.number)
                raise
            self._lanes.put_back(lane)
            if frame.flags & Flags.RESENT:
                break  # it has begun, and its answer is lost
            return frame
        if broken.was_lost or not was_sent:
            raise self._peer.loss(what(), str(broken))
        name = self._peer.info.name
        raise ReplyLost(
            f"the connection to worker {name!r} broke during {what()}: {broken}. The worker is "
            "alive; how much of the call was done there is not known",
            worker=name,
            reason=str(broken),
        )

    def _post_broke(self, lane: Connection, error: Exception, request: Request) -> None:
        self._send_again_later(request, self._broken(lane, error), was_sent=True)

    def _send_again_later(self, request: Request, broken: _Broken, *, was_sent: bool) -> None:
        """Sends it again on another thread, because that may have to wait."""
        if not broken.was_lost:
            self._on_late(partial(self._deliver, request, was_sent, broken))

    def _deliver(self, request: Request, was_sent: bool, broken: _Broken) -> Frame | None:
        """Sends a message again and returns its receipt; None if the worker is lost. The worker is
        declared lost if the message, or what it has posted back, is lost for good."""
        what = partial(describe_message, request.kind)
        until = time.monotonic() + POST_SECONDS
        try:
            return self._exchange_again(request, was_sent, broken, what, POST_SECONDS, until)
        except ReplyLost as error:
            if not request.flags & Flags.CONVERSATION:
                return None  # it has begun, which is all that a post needs
            self._peer.lose(str(error))
        except RpcTimeout as error:
            self._peer.lose(str(error))
        except WorkerLost as error:
            self._peer.lose(error.reason)  # unless that is known already
        return None


def _answer(lane: Connection, number: int) -> Frame:
    """What answers the request of this number: older answers may lie before it."""
    frame = lane.receive()
    while frame.call_id != number:
        frame = lane.receive()
    return frame


class _Broken(Exception):
    """How a lane ended.

    Attributes:
        was_lost: it ended because the worker was lost.
    """

    def __init__(self, reason: str, *, was_lost: bool) -> None:
        super().__init__(reason)
        self.was_lost = was_lost


def _raise(broken: _Broken) -> NoReturn:
    raise broken


def not_sent(error: WorkerLost, what: str) -> WorkerLost:
    """The error of a call for which no connection could be made."""
    return WorkerLost(f"{error}; {what} was not sent", worker=error.worker, reason=error.reason)


def number_of_unread(body: bytes) -> int:
    """Of an `UNREAD` message: the request whose reply was not unpacked."""
    number: int = _NUMBER.unpack(body)[0]
    return number
