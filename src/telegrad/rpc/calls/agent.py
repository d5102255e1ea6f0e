"""One worker: makes calls, and carries the messages of the layers above.

The way of a synchronous call is written out plainly here and in `service`, because every step of
it is paid by every call: pack, write, read, unpack at the caller; read, unpack, run, pack, write at
the callee. No lock is taken and no thread is woken on it besides the callee's.

A call from a worker to itself goes through the same packing, so a program behaves the same whether
two roles share a process or not.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import is_grad_enabled
from torch.futures import Future

from telegrad.errors import (
    ReplyLost,
    RpcTimeout,
    SerializationError,
    TelegradError,
    WorkerLost,
)
from telegrad.rpc.calls.async_call import AsyncCall, NotSent
from telegrad.rpc.calls.outcome import (
    describe_call,
    describe_message,
    is_described_by_arguments,
    rebuild_failure,
)
from telegrad.rpc.calls.own_calls import OwnCalls
from telegrad.rpc.calls.service import Service
from telegrad.rpc.connections.conversation import Interruption, messages_in
from telegrad.rpc.connections.multiplex import Multiplex
from telegrad.rpc.connections.network import Network
from telegrad.rpc.connections.peer import SHUT_DOWN, Peer
from telegrad.rpc.connections.requests import not_sent
from telegrad.rpc.connections.thread_pool import DEEPEST
from telegrad.rpc.group.options import RpcOptions
from telegrad.rpc.group.rendezvous import Directory
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.seams import NO_CONTEXT, Handler, Rescue, Timer
from telegrad.transport.base import ConnectionClosed, TransportTimeout
from telegrad.wire.codec import Codec, Encoded
from telegrad.wire.frames import Flags, Frame, Kind, Unread, pack_rider
from telegrad.wire.function_names import name_of, pack_name

__all__ = ["Agent"]

_log = logging.getLogger("telegrad.rpc")

_HEAD_ROOM = 4096  # of a body, for what stands in front of the payload
_CALLS = (Kind.CALL, Kind.REMOTE, Kind.PLAIN_CALL)
_MOST_OPEN = 1024  # asynchronous calls to one worker; beyond it, a caller waits for replies
_ENDS = (Kind.RREF_DELETE, Kind.RREF_DELETED)  # nobody waits for them, and they come in swarms
_LANES_OF_ENDS = 1
_NO_REPLY = 1.0  # seconds without any, after which twice as many may be open


class Agent:
    """A worker of a group. Threads may use it freely.

    Args:
        on_thread_start: runs first in each of the agent's threads: binds it to the agent.
    """

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: bytes,
        key: bytes,
        options: RpcOptions,
        directory: Directory,
        codec: Codec,
        on_thread_start: Callable[[Agent], None],
    ) -> None:
        self.info = info
        self.options = options
        self.directory = directory
        self.codec = codec
        limits = options.limits
        codec.limits = replace(limits, max_body=max(0, limits.max_body - _HEAD_ROOM))
        self.service = Service(info, codec, self._peer)
        self._thread = self.service.thread
        self.rpc_timeout = options.rpc_timeout
        self.network: Network = Network(
            info,
            incarnation,
            key,
            options,
            directory,
            self.service.serve,
            self.service.function_in,
            partial(self._begin_thread, on_thread_start),
        )
        for kind in (Kind.REPLY, Kind.ERROR):
            self.service.handle_frame(kind, self._came_too_late)
        self.service.handle_frame(Kind.UNREAD, self._left_unread)
        self.reply_head: Callable[[Frame], int] = _no_head
        """How long what stands in front of a reply's payload is."""
        self._riders: list[tuple[Kind, Callable[[int], bytes | None]]] = []
        self._call_ids = itertools.count(2, 2)  # those of lanes are odd
        self._own_calls = OwnCalls()
        self._most_open: dict[int, int] = {}  # by worker, where it is not the usual number

    def _begin_thread(self, on_thread_start: Callable[[Agent], None]) -> None:
        self._thread.is_own = True
        on_thread_start(self)

    @property
    def worker_id(self) -> int:
        return self.info.id

    def name_of(self, worker: int) -> str:
        return self.network.members.last_name_of(worker) or f"worker:{worker}"

    # -- calls

    def call(
        self,
        to: int,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Runs `func` on worker `to` and returns its result; what it raises is raised here."""
        if to == self.info.id:
            return self.call_async(to, func, args, kwargs, timeout).wait()
        peer = self.network.members.peer(to)
        head, encoded, context, message = self.pack_call(to, func, args, kwargs)
        seconds = self.rpc_timeout if timeout is None else timeout
        flags = self._thread.depth if is_grad_enabled() else self._thread.depth | Flags.NO_GRAD
        for kind, take in self._riders:
            rider = take(to)
            if rider is not None:
                flags |= Flags.RIDER
                head = pack_rider(kind, rider) + head
                break  # there is room for one

        def what() -> str:
            return describe_call(func, args)

        try:
            frame = peer.requests.exchange(
                Kind.CALL,
                context,
                message,
                (head, encoded.payload),
                encoded.buffers,
                seconds or None,
                what,
                flags,
                encoded.references,
            )
        except TelegradError as error:
            self.take_back_after(encoded, error)
            raise
        try:
            return self.result(to, frame, what)
        except KeyboardInterrupt:  # it may not have been unpacked
            peer.requests.leave_unread(frame.call_id)
            raise

    def begin_call(
        self, to: int, func: Callable[..., Any], args: Sequence[Any]
    ) -> Callable[[], Any]:
        """Sends a call on the synchronous path, and returns what waits for its result: once, on any
        thread. It has no timeout; the loss of the worker ends the wait.

        Each has a lane, and so a thread at the other end. If many are under way, it goes the
        asynchronous way.
        """
        if to == self.info.id or self.network.members.peer(to).requests.has_many_begun:
            return self.call_async(to, func, args, timeout=0).wait
        head, encoded, _, _ = self.pack_call(to, func, args, None)
        if encoded.references is not None:
            encoded.references.leave()
        what = partial(describe_call, func, ())
        flags = self._thread.depth if is_grad_enabled() else self._thread.depth | Flags.NO_GRAD
        begun = self.network.members.peer(to).requests.begin(
            Kind.CALL, (head, encoded.payload), encoded.buffers, what, flags
        )
        return lambda: self.result(to, begun.wait(), what)

    def begin_request(self, to: int, kind: Kind, body: Any) -> Callable[[], Any] | None:
        """The same for a message that has a reply. None if it should go the asynchronous way."""
        peer = None if to == self.info.id else self.network.members.peer(to)
        if peer is None or peer.requests.has_many_begun:
            return None
        encoded = self.codec.encode(body, to)
        what = partial(describe_message, kind)
        flags = self._thread.depth
        begun = peer.requests.begin(kind, (encoded.payload,), encoded.buffers, what, flags)
        return lambda: self.result(to, begun.wait(), what)

    def call_async(
        self,
        to: int,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Future[Any]:
        """The same, without waiting. What goes wrong before the call has left is raised here."""
        head, encoded, context, message = self.pack_call(to, func, args, kwargs)
        what: Callable[[], str] = partial(describe_call, func, ())
        if is_described_by_arguments(func):  # now: the call must not keep its arguments alive
            what = partial(str, describe_call(func, args))
        call = AsyncCall(self, to, context, what)
        call.is_of_program = True
        self.take_back_if_unread(call, encoded)
        self.dispatch(
            call, Kind.CALL, context, message, (head, encoded.payload), encoded.buffers, timeout
        )
        return call.future

    def take_back_if_unread(self, call: AsyncCall, encoded: Encoded) -> None:
        """References that were packed for a worker end if their message does not reach it.
        Those that were packed before its loss do so by that."""
        if encoded.references is not None:
            call.references = encoded.references
            call.on_failure = partial(self.take_back_after, encoded)

    def take_back_after(self, encoded: Encoded, error: Exception) -> None:
        is_unread = isinstance(error, WorkerLost | NotSent) or (
            isinstance(error, RpcTimeout) and not error.was_sent
        )
        if isinstance(error, ReplyLost):
            is_unread = False  # its worker is alive, and may have read them
        if is_unread and encoded.references is not None:
            encoded.references.abandon()

    def pack_call(
        self, to: int, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> tuple[bytes, Encoded, int, int]:
        if not is_grad_enabled() and self._is_in_context():
            # What has a history keeps it: only what is computed over there has none.
            with torch.enable_grad():
                return self.pack_call(to, func, args, kwargs)
        name = name_of(func)
        if name is None or len(name) >= _HEAD_ROOM // 2:
            name = b""
        head = pack_name(name)
        if name:
            encoded = self.codec.encode((args, kwargs or None), to, labels=("args", "kwargs"))
        else:
            encoded = self.codec.encode(
                (func, args, kwargs or None), to, labels=("func", "args", "kwargs")
            )
        try:
            return head, encoded, *self._record(to, encoded)
        except BaseException:  # Ctrl-C, say: the message never leaves
            if encoded.references is not None:
                encoded.references.abandon()
            raise

    def _record(self, to: int, encoded: Encoded) -> tuple[int, int]:
        recorder = self.service.recorder
        if recorder is None:
            return NO_CONTEXT, -1
        context = recorder.current_context()
        if context == NO_CONTEXT:
            return NO_CONTEXT, -1
        return context, recorder.record_send(context, to, encoded.tensors)

    def _is_in_context(self) -> bool:
        recorder = self.service.recorder
        return recorder is not None and recorder.current_context() != NO_CONTEXT

    def bound_here(self, work: Callable[[Any], None]) -> Callable[[Any], None]:
        """`work`, to be run later in the autograd context of this thread, or in none if it has
        none, and with its grad mode."""
        recorder = self.service.recorder
        if recorder is None:
            return work
        context, has_gradients_on = recorder.current_context(), is_grad_enabled()

        def run(argument: Any) -> None:
            with recorder.enter(context), torch.set_grad_enabled(has_gradients_on):
                work(argument)

        return run

    def dispatch(
        self,
        call: AsyncCall,
        kind: Kind,
        context: int,
        message: int,
        body: Sequence[bytes],
        buffers: Sequence[memoryview],
        timeout: float | None,
    ) -> None:
        """Sends the request of an asynchronous call; `call` is settled by whatever ends it."""
        thread = self._thread
        flags = thread.depth if is_grad_enabled() else thread.depth | Flags.NO_GRAD
        seconds = self.rpc_timeout if timeout is None else timeout
        call.seconds = seconds
        call.deadline = time.monotonic() + seconds if seconds else math.inf
        if call.to == self.info.id:
            self._dispatch_to_self(call, kind, flags, context, message, body, buffers)
            return
        call_id = next(self._call_ids)
        peer: Peer | None = None
        multiplex: Multiplex | None = None
        is_expected = False
        try:
            peer = call.peer = self.network.members.peer(call.to)
            multiplex = peer.multiplex(seconds or None)
            is_call = kind in _CALLS
            if multiplex.pending_count >= _MOST_OPEN and is_call and not thread.is_own:
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
            # One that has begun to leave is answered, and settled by that.
            if not call.begun and (multiplex is None or multiplex.forget(call_id)):
                call.settle_error(NotSent(f"{call.what()} was not sent: {type(error).__name__}"))
            raise

    def _wait_for_replies(self, to: int, count: Callable[[], int]) -> None:
        """Slows down a program that makes asynchronous calls faster than they are answered. Ends
        when fewer are open, or when none has been answered for a while: they may wait for what the
        program does next, and more may be open from then on."""
        least, since = count(), time.monotonic()
        while (now_open := count()) >= self._most_open.get(to, _MOST_OPEN):
            if now_open < least:
                least, since = now_open, time.monotonic()
            elif time.monotonic() - since > _NO_REPLY:
                self._most_open[to] = 2 * now_open
                _log.info("%d calls to %s have not been answered", now_open, self.name_of(to))
                return
            time.sleep(0.001)

    def _dispatch_to_self(
        self,
        call: AsyncCall,
        kind: Kind,
        flags: int,
        context: int,
        message: int,
        body: Sequence[bytes],
        buffers: Sequence[memoryview],
    ) -> None:
        frame = _copied(kind, flags, 0, context, message, body, buffers)
        call_id, calls = next(self._call_ids), self._own_calls
        timer: Timer | None = None

        def reply(*parts: Any) -> None:
            pending = calls.take(call_id)
            if pending is None:
                self._came_too_late(self.info.id, _copied(*parts))
                return
            if timer is not None:
                timer.cancel()
            pending.succeed(_copied(*parts))

        def expire() -> None:
            pending = calls.take(call_id)
            if pending is not None:
                pending.expire()

        if len(calls) >= _MOST_OPEN and not self._thread.is_own:
            self._wait_for_replies(call.to, calls.__len__)
        if not calls.add(call_id, call):
            call.fail(SHUT_DOWN)
            return
        if call.seconds:
            # Not on the clock's thread: it runs the callbacks of a program.
            timer = self.network.clock.call_later(
                call.seconds, partial(self.network.work.submit, expire)
            )
        depth = flags // Flags.DEPTH_ONE
        serve = partial(self.service.serve, self.info.id, frame, reply)
        try:
            if call.references is not None:
                call.references.leave()
            self.network.calls.submit(depth, serve)
        except BaseException as error:
            if calls.take(call_id) is not None:
                call.settle_error(NotSent(f"{call.what()} was not sent: {type(error).__name__}"))
            raise

    # -- messages of the layers above

    def post(self, to: int, kind: Kind, body: Any, *, reach: bool = False) -> None:
        encoded = self.codec.encode(body, to)
        conversation = self._thread.conversation
        if (
            conversation is not None
            and conversation.source == to
            and conversation.take(kind, encoded)
        ):
            return
        if to == self.info.id:
            frame = _copied(
                kind, Flags.NO_ANSWER, 0, NO_CONTEXT, -1, (encoded.payload,), encoded.buffers
            )
            self.network.work.submit(partial(self.service.serve, to, frame, _drop))
            return
        peer = self._peer(to) if reach else self._living_peer(to, kind)
        peer.requests.post(
            kind,
            NO_CONTEXT,
            -1,
            (encoded.payload,),
            encoded.buffers,
            partial(describe_message, kind),
            *((_LANES_OF_ENDS,) if kind in _ENDS else ()),
        )

    def _peer(self, worker: int) -> Peer:
        return self.network.members.peer(worker)

    def _living_peer(self, worker: int, kind: Kind) -> Peer:
        """Protocols have drawn their conclusions from a loss. To try whether the worker can be
        reached again, and wait for it, is for a user's call."""
        peer = self.network.members.peer(worker)
        if peer.is_lost:
            raise peer.loss(describe_message(kind))
        return peer

    def converse(
        self,
        to: int,
        kind: Kind,
        body: Any,
        interruption: Interruption,
        meanwhile: Callable[[], None],
    ) -> list[tuple[Kind, Any]]:
        if to == self.info.id:
            self.post(to, kind, body)
            meanwhile()
            return []
        encoded = self.codec.encode(body, to)
        receipt = self._living_peer(to, kind).requests.converse(
            kind,
            (encoded.payload,),
            encoded.buffers,
            interruption,
            partial(self._finish_later, to),
            meanwhile,
        )
        if receipt is None:
            return []
        came: list[tuple[Kind, Any]] = []
        for piece, payload in messages_in(receipt):
            came.append((piece, self.codec.decode(payload)))
        return came

    def end_conversation(self) -> None:
        conversation = self._thread.conversation
        if conversation is not None:
            conversation.end()

    def _finish_later(self, source: int, receive: Callable[[], Frame | None]) -> None:
        def finish() -> None:
            receipt = receive()
            for kind, payload in () if receipt is None else messages_in(receipt):
                self.service.handle_now(source, kind, payload)

        self.network.work.submit(finish)

    def request(
        self, to: int, kind: Kind, body: Any, *, timeout: float | None = None
    ) -> Future[Any]:
        encoded = self.codec.encode(body, to)
        call = AsyncCall(self, to, NO_CONTEXT, partial(describe_message, kind))
        self.dispatch(call, kind, NO_CONTEXT, -1, (encoded.payload,), encoded.buffers, timeout)
        return call.future

    def exchange(
        self, to: int, kind: Kind, body: Any, timeout: float | None, what: Callable[[], str]
    ) -> Any:
        """A request on the synchronous path, within the context of this thread."""
        encoded = self.codec.encode(body, to)
        context, message = self._record(to, encoded)
        seconds = self.rpc_timeout if timeout is None else timeout
        frame = self.network.members.peer(to).requests.exchange(
            kind,
            context,
            message,
            (encoded.payload,),
            encoded.buffers,
            seconds or None,
            what,
            0 if is_grad_enabled() else Flags.NO_GRAD,
        )
        return self.result(to, frame, what)

    def handle(self, kind: Kind, handler: Handler, rescue: Rescue | None = None) -> None:
        self.service.handle(kind, handler, rescue)

    def offer(
        self, kind: Kind, take: Callable[[int], bytes | None], can_wait: Callable[[bytes], bool]
    ) -> None:
        self._riders.append((kind, take))
        self.service.expect_riders(kind, can_wait)

    def watch_losses(self, callback: Callable[[int, str], None]) -> None:
        self.network.watch_losses(callback)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return self.network.clock.call_later(seconds, callback)

    @property
    def depth(self) -> int:
        """Of the calls that this thread makes: see `telegrad.rpc.connections.thread_pool`."""
        return self._thread.depth // Flags.DEPTH_ONE

    @property
    def served_worker(self) -> int:
        """Whose message this thread serves: this worker's own, if none."""
        source = self._thread.source
        return self.info.id if source < 0 else source

    def run_like_a_call(self, work: Callable[[], None], depth: int) -> None:
        """On a thread for calls of this depth: `work` may take long, and call other workers."""
        depth = min(depth, DEEPEST)

        def run() -> None:
            self._thread.depth = min((depth + 1) * Flags.DEPTH_ONE, Flags.DEPTH)
            try:
                work()
            finally:
                self._thread.depth = 0

        self.network.calls.submit(depth, run)

    def run_aside(self, work: Callable[[], None]) -> None:
        self.network.work.submit(work)

    def result(self, source: int, frame: Frame, what: Callable[[], str]) -> Any:
        """What the reply to a call, or to something else, holds: returned, or raised."""
        if frame.kind is Kind.REPLY:
            try:
                return self.service.decode(source, frame, frame.body)
            except SerializationError as error:
                reason = frame.buffers.reason if isinstance(frame.buffers, Unread) else error
                raise SerializationError(
                    f"the result of {what()} on worker {self.name_of(source)!r}: {reason}",
                    path=error.path,
                ) from error
        if frame.kind is Kind.ERROR:
            raise rebuild_failure(self.codec, self.codec.decode(frame.body, frame.buffers))
        raise TelegradError(f"a {frame.kind.name} message came where a reply was expected")

    def _came_too_late(self, source: int, frame: Frame, send: object = None) -> None:
        """A reply that nobody waits for. References in it must be unpacked, so that they end."""
        try:
            frame.body = frame.body[self.reply_head(frame) :]
            frame.context_id = NO_CONTEXT
            self.result(source, frame, lambda: "a call that was given up")
        except BaseException as error:  # noqa: BLE001 - nobody is there to hear of it
            _log.debug("a late reply of worker %d: %r", source, error)

    def _left_unread(self, source: int, frame: Frame, send: object) -> None:
        self._peer(source).unread(frame.body)

    # -- the state of things

    def pending_calls(self) -> int:
        peers = self.network.members.peers()
        return len(self._own_calls) + sum(peer.pending_count for peer in peers)

    def close(self, *, patience: float) -> None:
        """Ends everything, see `Network.close`. What waits for an answer of this worker's own, too,
        fails."""
        for call in self._own_calls.close():
            self.network.work.submit(partial(call.fail, SHUT_DOWN))
        self.network.close(patience=patience)


def _no_head(frame: Frame) -> int:
    return 0


def _copied(
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


def _drop(*parts: Any) -> None:
    """Where the answer to a post to oneself goes."""
