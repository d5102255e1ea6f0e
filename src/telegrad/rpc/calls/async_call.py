"""Asynchronous calls: sending them, and settling their futures.

A call to another worker travels on its multiplexed connection. A call from a worker to itself goes
through the same packing, so a program behaves the same whether or not two roles share a process.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import is_grad_enabled

from telegrad.errors import RpcTimeout, TelegradError, WorkerLost
from telegrad.rpc.calls.futures import CallFuture
from telegrad.rpc.calls.outcome import as_exception, timeout_text
from telegrad.rpc.connections.multiplex import Multiplex, PendingCall
from telegrad.rpc.connections.peer import SHUT_DOWN, Peer
from telegrad.rpc.connections.requests import not_sent
from telegrad.rpc.seams import NO_CONTEXT, Timer
from telegrad.transport.base import ConnectionClosed, TransportTimeout
from telegrad.wire.codec import References
from telegrad.wire.frames import Flags, Frame, Kind

if TYPE_CHECKING:
    from telegrad.rpc.calls.agent import Agent

__all__ = ["AsyncCall", "AsyncCalls", "NotSent", "OwnCalls", "copied"]

_log = logging.getLogger("telegrad.rpc")

_CALLS = (Kind.CALL, Kind.REMOTE, Kind.PLAIN_CALL)
_MOST_OPEN = 1024  # asynchronous calls to one worker; beyond it, a caller waits for replies
_NO_REPLY = 1.0  # seconds without any, after which twice as many may be open


class NotSent(TelegradError):
    """Another exception, such as Ctrl-C, ended a call before it was sent. The program gets that
    exception; the call's future gets this one."""


class AsyncCall(PendingCall):
    """A call whose reply completes a future, in the context in which the call was made."""

    __slots__ = (
        "_agent",
        "_context",
        "begun",
        "future",
        "is_of_program",
        "on_failure",
        "peer",
        "references",
        "seconds",
        "to",
        "what",
    )

    def __init__(self, agent: Agent, to: int, context: int, what: Callable[[], str]) -> None:
        self._agent = agent
        self._context = context
        self.to = to
        self.what = what
        self.begun: list[bool] = []  # has an item once sending the request has started
        self.is_of_program = False  # an unread failure is logged
        self.on_failure: Callable[[Exception], None] | None = None
        self.references: References | None = None
        self.seconds = 0.0
        self.deadline = math.inf
        self.peer: Peer | None = None
        self.future: CallFuture[Any] = CallFuture()

    def succeed(self, frame: Frame) -> None:
        try:
            value = self._agent.result(self.to, frame, self.what)
        except BaseException as error:  # noqa: BLE001 - the caller gets every exception
            self.settle_error(as_exception(error))
            return
        recorder = self._agent.service.recorder
        if self._context == NO_CONTEXT or recorder is None:
            self._settle(self.future.set_result, value)
        else:
            with recorder.enter(self._context):  # callbacks run in it
                self._settle(self.future.set_result, value)

    def settle_error(self, error: Exception) -> None:
        if self.on_failure is not None:
            self.on_failure(error)
        what = ""
        if self.is_of_program and not isinstance(error, WorkerLost | RpcTimeout | NotSent):
            what = f"{self.what()} on worker {self._agent.name_of(self.to)!r}"
        self._settle(self.future.fail, error, what)

    def _settle(self, settle: Callable[..., None], *outcome: Any) -> None:
        try:
            settle(*outcome)
        except RuntimeError:
            if not self.future.done():
                raise
            _log.warning(
                "the reply of %s came for a future that the program had completed", self.what()
            )

    def fail(self, reason: str) -> None:
        if self.peer is not None:
            self.settle_error(self.peer.loss(self.what()))
        else:
            name = self._agent.info.name
            self.settle_error(
                WorkerLost(
                    f"{self.what()} on this worker itself, {name!r}, was given up: {reason}",
                    worker=name,
                    reason=reason,
                )
            )

    def expire(self, *, was_sent: bool = True) -> None:
        if self.peer is not None:
            error = self.peer.timed_out(self.seconds, self.what(), was_sent=was_sent)
            self.settle_error(error)
        else:
            self.settle_error(
                RpcTimeout(
                    timeout_text("this worker itself", self.what(), self.seconds),
                    worker=self._agent.info.name,
                    seconds=self.seconds,
                )
            )


class OwnCalls:
    """Unanswered calls of a worker to itself. Safe to use from any thread.

    There is no connection whose end would fail them when the worker closes. The thread that takes a
    call out of the table settles it: for the reply, the deadline, or the end of the worker.
    """

    def __init__(self) -> None:
        self._calls: dict[int, AsyncCall] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call_id: int, call: AsyncCall) -> bool:
        """False if the table is closed."""
        self._calls[call_id] = call
        return not self._is_closed or self.take(call_id) is None  # or else `close` has taken it

    def take(self, call_id: int) -> AsyncCall | None:
        """None if another thread settles it."""
        return self._calls.pop(call_id, None)

    def close(self) -> list[AsyncCall]:
        """The open calls, for the caller to settle; no more are added."""
        self._is_closed = True
        return [call for call_id in list(self._calls) if (call := self.take(call_id)) is not None]


class AsyncCalls:
    """Sends the asynchronous calls of one agent. Safe to use from any thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._call_ids = itertools.count(2, 2)  # those of lanes are odd
        self._own = OwnCalls()
        self._most_open: dict[int, int] = {}  # by worker, where it differs from the default

    @property
    def pending_to_self(self) -> int:
        return len(self._own)

    def close(self) -> None:
        """Fails the calls of the worker to itself; those to others end with their connections."""
        for call in self._own.close():
            self._agent.run_aside(partial(call.fail, SHUT_DOWN))

    def send(
        self,
        call: AsyncCall,
        kind: Kind,
        context: int,
        message: int,
        body: Sequence[bytes],
        buffers: Sequence[memoryview],
        timeout: float | None,
    ) -> None:
        """Sends a call's request. `call` is settled by its reply, by its timeout, or by the loss of
        its worker."""
        agent, thread = self._agent, self._agent.service.thread
        thread.has_called = True
        flags = thread.depth if is_grad_enabled() else thread.depth | Flags.NO_GRAD
        seconds = agent.rpc_timeout if timeout is None else timeout
        call.seconds = seconds
        call.deadline = time.monotonic() + seconds if seconds else math.inf
        if call.to == agent.info.id:
            self._send_to_self(call, kind, flags, context, message, body, buffers)
            return
        call_id = next(self._call_ids)
        peer: Peer | None = None
        multiplex: Multiplex | None = None
        is_expected = False
        try:
            peer = call.peer = agent.network.members.peer(call.to)
            multiplex = peer.multiplex(seconds or None)
            if multiplex.pending_count >= _MOST_OPEN and kind in _CALLS and not thread.is_own:
                self._wait_for_replies(call.to, lambda: multiplex.pending_count)
            multiplex.expect(call_id, call)
            is_expected = True
            if call.references is not None:
                call.references.leave()
            multiplex.send(
                kind,
                flags,
                call_id,
                context,
                message,
                body,
                buffers,
                until=call.deadline,
                begun=call.begun,
            )
        except TransportTimeout:
            if multiplex is None or multiplex.forget(call_id):
                call.expire(was_sent=False)
        except ConnectionClosed as error:
            if peer is not None and multiplex is not None:
                peer.multiplex_ended(multiplex, str(error))
                if not is_expected or multiplex.forget(call_id):
                    call.fail(str(error))
        except WorkerLost as error:
            call.settle_error(not_sent(error, call.what()))
        except BaseException as error:
            # If sending has started, the reply settles the call.
            if not call.begun and (multiplex is None or multiplex.forget(call_id)):
                call.settle_error(NotSent(f"{call.what()} was not sent: {type(error).__name__}"))
            raise

    def _wait_for_replies(self, to: int, count: Callable[[], int]) -> None:
        """Slows down a program that makes calls faster than they are answered. Ends when fewer are
        open, or when none has been answered for a while: the replies may depend on what the program
        does next, so the limit is then doubled."""
        least, since = count(), time.monotonic()
        while (now_open := count()) >= self._most_open.get(to, _MOST_OPEN):
            if now_open < least:
                least, since = now_open, time.monotonic()
            elif time.monotonic() - since > _NO_REPLY:
                self._most_open[to] = 2 * now_open
                name = self._agent.name_of(to)
                _log.info("%d calls to %s have not been answered", now_open, name)
                return
            time.sleep(0.001)

    def _send_to_self(
        self,
        call: AsyncCall,
        kind: Kind,
        flags: int,
        context: int,
        message: int,
        body: Sequence[bytes],
        buffers: Sequence[memoryview],
    ) -> None:
        agent, own = self._agent, self._agent.info.id
        network, service = agent.network, agent.service
        frame = copied(kind, flags, 0, context, message, body, buffers)
        call_id, calls = next(self._call_ids), self._own
        timer: Timer | None = None

        def reply(*parts: Any) -> None:
            pending = calls.take(call_id)
            if pending is None:
                agent.drop_late_reply(own, copied(*parts))
                return
            if timer is not None:
                timer.cancel()
            pending.succeed(copied(*parts))

        def expire() -> None:
            pending = calls.take(call_id)
            if pending is not None:
                pending.expire()

        if len(calls) >= _MOST_OPEN and not service.thread.is_own:
            self._wait_for_replies(own, calls.__len__)
        if not calls.add(call_id, call):
            call.fail(SHUT_DOWN)
            return
        if call.seconds:
            # On a thread of the pool: it runs callbacks of the program, which may block the clock.
            timer = agent.call_later(call.seconds, partial(network.work.submit, expire))
        try:
            if call.references is not None:
                call.references.leave()
            network.calls.submit(
                flags // Flags.DEPTH_ONE, partial(service.serve, own, frame, reply)
            )
        except BaseException as error:
            if calls.take(call_id) is not None:
                call.settle_error(NotSent(f"{call.what()} was not sent: {type(error).__name__}"))
            raise


def copied(
    kind: Kind,
    flags: int = 0,
    call_id: int = 0,
    context_id: int = NO_CONTEXT,
    message_id: int = -1,
    body: Sequence[bytes | memoryview] = (),
    buffers: Sequence[memoryview] = (),
) -> Frame:
    """A message as it would come off a connection."""
    copies = [bytearray(buffer) for buffer in buffers]
    return Frame(kind, flags, call_id, context_id, message_id, b"".join(body), list(copies))
