"""`Agent`, one worker: it makes calls, and carries the messages of the layers above.

A synchronous call is written out plainly here and in `service`, because every call pays for every
step: pack, write, read, unpack at the caller; read, unpack, run, pack, write at the callee. It
takes no lock and wakes no thread but the callee's. `async_call` has the asynchronous ones.
"""

from __future__ import annotations

import logging
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
from telegrad.rpc.calls.async_call import AsyncCall, AsyncCalls, NotSent, copied
from telegrad.rpc.calls.outcome import (
    describe_call,
    describe_message,
    is_described_by_arguments,
    rebuild_failure,
)
from telegrad.rpc.calls.service import Service
from telegrad.rpc.connections.conversation import Interruption, messages_in
from telegrad.rpc.connections.network import Network
from telegrad.rpc.connections.peer import Peer
from telegrad.rpc.connections.thread_pool import DEEPEST
from telegrad.rpc.group.directory import Directory
from telegrad.rpc.group.options import RpcOptions
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.seams import NO_CONTEXT, Handler, Rescue, Timer
from telegrad.wire.codec import Codec, Encoded
from telegrad.wire.frames import Flags, Frame, Kind, Unread, pack_rider
from telegrad.wire.function_names import name_of, pack_name

__all__ = ["Agent"]

_log = logging.getLogger("telegrad.rpc")

_HEAD_ROOM = 4096  # of a body, for what stands in front of the payload
_ENDS = (Kind.RREF_DELETE, Kind.RREF_DELETED)  # not urgent, and often many at once
_LANES_OF_ENDS = 1


class Agent:
    """A worker of a group. Safe to use from any thread.

    Args:
        on_thread_start: runs first in each of the agent's threads, to bind it to the agent.
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
            self.service.name_of,
            self.service.has_called,
            partial(self._begin_thread, on_thread_start),
        )
        for kind in (Kind.REPLY, Kind.ERROR):
            self.service.handle_frame(kind, self.drop_late_reply)
        self.service.handle_frame(Kind.UNREAD, self._left_unread)
        self.reply_head: Callable[[Frame], int] = _no_head
        """The size of what precedes a reply's payload."""
        self._riders: list[tuple[Kind, Callable[[int], bytes | None]]] = []
        self.async_calls = AsyncCalls(self)

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
        """Runs `func` on worker `to`; returns its result, or raises its exception."""
        if to == self.info.id:
            return self.call_async(to, func, args, kwargs, timeout).wait()
        self._thread.has_called = True
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
        except KeyboardInterrupt:  # perhaps before it was unpacked
            peer.requests.leave_unread(frame.call_id)
            raise

    def begin_call(
        self, to: int, func: Callable[..., Any], args: Sequence[Any]
    ) -> Callable[[], Any]:
        """Sends a call on the synchronous path. Returns a function that waits for its result, to be
        called once, on any thread. It has no timeout; the loss of the worker ends the wait.

        Each such call occupies a lane, and a thread of the callee. If many are under way, the call
        is sent asynchronously instead.
        """
        if to == self.info.id or self.network.members.peer(to).requests.has_many_begun:
            return self.call_async(to, func, args, timeout=0).wait
        self._thread.has_called = True
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
        """The same for a message that has a reply. None if it must be sent asynchronously."""
        peer = None if to == self.info.id else self.network.members.peer(to)
        if peer is None or peer.requests.has_many_begun:
            return None
        self._thread.has_called = True
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
        """The same, without waiting. Raises what goes wrong before the call is sent."""
        head, encoded, context, message = self.pack_call(to, func, args, kwargs)
        what: Callable[[], str] = partial(describe_call, func, ())
        if is_described_by_arguments(func):  # now: the call must not keep its arguments alive
            what = partial(str, describe_call(func, args))
        call = AsyncCall(self, to, context, what)
        call.is_of_program = True
        self.take_back_if_unread(call, encoded)
        self.async_calls.send(
            call, Kind.CALL, context, message, (head, encoded.payload), encoded.buffers, timeout
        )
        return call.future

    def take_back_if_unread(self, call: AsyncCall, encoded: Encoded) -> None:
        """Ends the references in a message that does not reach its worker. (The loss of the worker
        ends those that were packed before it.)"""
        if encoded.references is not None:
            call.references = encoded.references
            call.on_failure = partial(self.take_back_after, encoded)

    def take_back_after(self, encoded: Encoded, error: Exception) -> None:
        is_unread = isinstance(error, WorkerLost | NotSent) or (
            isinstance(error, RpcTimeout) and not error.was_sent
        )
        if isinstance(error, ReplyLost):
            is_unread = False  # its worker is alive and may have read them
        if is_unread and encoded.references is not None:
            encoded.references.abandon()

    def pack_call(
        self, to: int, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> tuple[bytes, Encoded, int, int]:
        if not is_grad_enabled() and self._is_in_context():
            # The arguments keep their history; only what is computed there has none.
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
        except BaseException:  # such as Ctrl-C: the message is never sent
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
        """`work`, bound to the autograd context (or its absence) and grad mode of this thread."""
        recorder = self.service.recorder
        if recorder is None:
            return work
        context, has_gradients_on = recorder.current_context(), is_grad_enabled()

        def run(argument: Any) -> None:
            with recorder.enter(context), torch.set_grad_enabled(has_gradients_on):
                work(argument)

        return run

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
            frame = copied(
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
        """The peer, for a protocol: it has handled the loss of a lost worker already. Only a user's
        call tries to reach that worker again."""
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
        self._thread.has_called = True
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
        parts = (encoded.payload,), encoded.buffers
        self.async_calls.send(call, kind, NO_CONTEXT, -1, *parts, timeout)
        return call.future

    def exchange(
        self, to: int, kind: Kind, body: Any, timeout: float | None, what: Callable[[], str]
    ) -> Any:
        """A request on the synchronous path, in this thread's context."""
        self._thread.has_called = True
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
        """How deeply nested the calls of this thread are; see
        `telegrad.rpc.connections.thread_pool`."""
        return self._thread.depth // Flags.DEPTH_ONE

    @property
    def served_worker(self) -> int:
        """The worker whose message this thread serves; this worker, if it serves none."""
        source = self._thread.source
        return self.info.id if source < 0 else source

    def run_like_a_call(self, work: Callable[[], None], depth: int) -> None:
        """Runs `work` on a thread for calls of this depth: it may block and call other workers."""
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
        """The value in a reply; raises the exception in an ERROR message."""
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

    def drop_late_reply(self, source: int, frame: Frame, send: object = None) -> None:
        """Handles a reply whose call was given up. Unpacks it, so that references in it end."""
        try:
            frame.body = frame.body[self.reply_head(frame) :]
            frame.context_id = NO_CONTEXT
            self.result(source, frame, lambda: "a call that was given up")
        except BaseException as error:  # noqa: BLE001 - no caller is left to raise it to
            _log.debug("a late reply of worker %d: %r", source, error)

    def _left_unread(self, source: int, frame: Frame, send: object) -> None:
        self._peer(source).unread(frame.body)

    # -- the state of things

    def pending_calls(self) -> int:
        peers = self.network.members.peers()
        return self.async_calls.pending_to_self + sum(peer.pending_count for peer in peers)

    def close(self, *, patience: float) -> None:
        """Ends everything, see `Network.close`; calls of this worker to itself fail, too."""
        self.async_calls.close()
        self.network.close(patience=patience)


def _no_head(frame: Frame) -> int:
    return 0


def _drop(*parts: Any) -> None:
    """Takes the answer to a post of a worker to itself."""
