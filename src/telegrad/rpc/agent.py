"""One worker: makes calls, runs calls, and carries the messages of the layers above.

The way of a synchronous call is written out plainly here, because every step of it is paid by every
call: pack, write, read, unpack at the caller; read, unpack, run, pack, write at the callee. No lock
is taken and no thread is woken on it besides the callee's.

A call from a worker to itself goes through the same packing, so a program behaves the same whether
two roles share a process or not.
"""

from __future__ import annotations

import itertools
import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from telegrad.errors import ProtocolError, TelegradError, WorkerLost
from telegrad.rpc.async_call import AsyncCall
from telegrad.rpc.call_head import name_in, pack_call_head
from telegrad.rpc.conversation import Conversation, Interruption, messages_in
from telegrad.rpc.functions import checked_future
from telegrad.rpc.network import Network, Send
from telegrad.rpc.options import RpcOptions
from telegrad.rpc.outcome import describe_function, pack_failure, rebuild_failure
from telegrad.rpc.peer import Peer
from telegrad.rpc.quick_functions import QuickFunctions
from telegrad.rpc.rendezvous import Directory
from telegrad.rpc.seams import NO_CONTEXT, Handler, Recorder, Rescue, Timer
from telegrad.rpc.worker_info import WorkerInfo
from telegrad.transport.base import ConnectionClosed, TransportTimeout
from telegrad.wire.codec import Codec, Encoded
from telegrad.wire.frames import Flags, Frame, Kind, pack_rider, rider_size, split_rider
from telegrad.wire.references import function_named, name_of

__all__ = ["Agent"]

_log = logging.getLogger("telegrad.rpc")

_HEAD_ROOM = 4096  # of a body, for what stands in front of the payload

_NO_KWARGS: dict[str, Any] = {}

FrameHandler = Callable[[int, Frame, Send], None]
"""Takes a message as it came, and answers it itself, with `Agent.answer`."""


class Agent:
    """A worker of a group. Threads may use it freely.

    Args:
        on_thread_start: runs first in each of the agent's threads: binds it to the agent.
    """

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: bytes,
        secret: bytes,
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
        self.recorder: Recorder | None = None
        self.rpc_timeout = options.rpc_timeout
        self.network = Network(
            info,
            incarnation,
            secret,
            options,
            directory,
            self._serve,
            self._is_quick,
            self._name_of,
            lambda: self._thread.has_called,
            partial(on_thread_start, self),
        )
        self.on_failure: Callable[[BaseException], None] | None = None
        """Hears of what functions raise here that others call; these are told in any case."""
        self.admit: Callable[[], None] = _nothing
        """Runs between the unpacking of a call and its function."""
        self.quick = QuickFunctions()
        self._call_offsets: dict[Kind, int] = {}
        self._thread = _Thread()
        self._handlers: dict[Kind, Handler] = {}
        self._rescues: dict[Kind, Rescue] = {}
        self._riders: list[tuple[Kind, Callable[[int], Any]]] = []
        self._frame_handlers: dict[Kind, FrameHandler] = {}
        self._call_ids = itertools.count(1)
        # Work begun and ended here, for a graceful shutdown.
        self._begun = _Tally()
        self._ended = _Tally()

    @property
    def worker_id(self) -> int:
        return self.info.id

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
        self._thread.has_called = True
        head, encoded, context, message = self.pack_call(to, func, args, kwargs)
        peer = self.network.peer(to)
        seconds = self.rpc_timeout if timeout is None else timeout
        flags = 0
        for kind, take in self._riders:
            rider = take(to)
            if rider is not None:
                flags = Flags.RIDER
                head = pack_rider(kind, self.codec.encode(rider, to).payload) + head
                break  # there is room for one
        frame = peer.exchange(
            Kind.CALL,
            context,
            message,
            (head, encoded.payload),
            encoded.buffers,
            seconds or None,
            lambda: f"the call of {describe_function(func)}",
            flags,
        )
        return self.result(to, frame)

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
        call = AsyncCall(self, to, context, lambda: f"the call of {describe_function(func)}")
        self.dispatch(
            call, Kind.CALL, context, message, (head, encoded.payload), encoded.buffers, timeout
        )
        return call.future

    def pack_call(
        self, to: int, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> tuple[bytes, Encoded, int, int]:
        name = name_of(func)
        if name is not None and len(name) < _HEAD_ROOM // 2:
            encoded = self.codec.encode_arguments(args, kwargs, to)
            head = pack_call_head(name)
        else:
            encoded = self.codec.encode(
                (func, args, kwargs or None), to, labels=("func", "args", "kwargs")
            )
            head = pack_call_head(b"")
        return head, encoded, *self._record(to, encoded)

    def _record(self, to: int, encoded: Encoded) -> tuple[int, int]:
        recorder = self.recorder
        if recorder is None:
            return NO_CONTEXT, -1
        context = recorder.current_context()
        if context == NO_CONTEXT:
            return NO_CONTEXT, -1
        return context, recorder.record_send(context, to, encoded.tensors)

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
        self._thread.has_called = True
        seconds = self.rpc_timeout if timeout is None else timeout
        call.seconds = seconds
        call.deadline = time.monotonic() + seconds if seconds else math.inf
        if call.to == self.info.id:
            self._dispatch_to_self(call, kind, context, message, body, buffers)
            return
        call_id = next(self._call_ids)
        try:
            peer = call.peer = self.network.peer(call.to)
            multiplex = peer.multiplex()
            multiplex.expect(call_id, call)
        except ConnectionClosed:
            call.settle_error(peer.loss(call.what()))
            return
        except WorkerLost as error:
            call.settle_error(error)
            return
        try:
            multiplex.send(kind, 0, call_id, context, message, body, buffers)
        except (ConnectionClosed, TransportTimeout) as error:
            peer.lose(str(error))
            if multiplex.forget(call_id):
                call.fail(str(error))
        except BaseException:
            # Ctrl-C in the middle of a message: what follows on this connection is garbage.
            multiplex.interrupt()
            raise

    def _dispatch_to_self(
        self,
        call: AsyncCall,
        kind: Kind,
        context: int,
        message: int,
        body: Sequence[bytes],
        buffers: Sequence[memoryview],
    ) -> None:
        frame = _copied(kind, 0, 0, context, message, body, buffers)
        outstanding = [call]  # emptied by whoever settles the call: the reply or the deadline

        def reply(*parts: Any) -> None:
            if outstanding:
                outstanding.clear()
                call.succeed(_copied(*parts))

        def expire() -> None:
            if outstanding:
                outstanding.clear()
                call.expire()

        if call.seconds:
            # Not on the clock's thread: it runs the callbacks of a program.
            self.network.clock.call_later(call.seconds, partial(self.network.work.submit, expire))
        self.network.work.submit(partial(self._serve, self.info.id, frame, reply))

    # -- messages of the layers above

    def post(self, to: int, kind: Kind, body: Any) -> None:
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
            self.network.work.submit(partial(self._serve, to, frame, _drop))
            return
        self._living_peer(to, kind).post(
            kind, NO_CONTEXT, -1, (encoded.payload,), encoded.buffers, lambda: kind.name
        )

    def _living_peer(self, worker: int, kind: Kind) -> Peer:
        """Protocols have drawn their conclusions from a loss. To try whether the worker can be
        reached again, and wait for it, is for a user's call."""
        peer = self.network.peer(worker)
        if peer.is_lost:
            raise peer.loss(kind.name)
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
        receipt = self._living_peer(to, kind).converse(
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
                try:
                    self._handlers[kind](source, self.codec.decode(payload))
                except Exception as error:  # noqa: BLE001 - nobody is there to raise it to
                    self._post_failed(source, kind, payload, error)

        self.network.work.submit(finish)

    def request(
        self, to: int, kind: Kind, body: Any, *, timeout: float | None = None
    ) -> Future[Any]:
        encoded = self.codec.encode(body, to)
        call = AsyncCall(self, to, NO_CONTEXT, lambda: kind.name)
        self.dispatch(call, kind, NO_CONTEXT, -1, (encoded.payload,), encoded.buffers, timeout)
        return call.future

    def exchange(
        self, to: int, kind: Kind, body: Any, timeout: float | None, what: Callable[[], str]
    ) -> Any:
        """A request on the synchronous path, within the context of this thread."""
        self._thread.has_called = True
        encoded = self.codec.encode(body, to)
        context, message = self._record(to, encoded)
        seconds = self.rpc_timeout if timeout is None else timeout
        frame = self.network.peer(to).exchange(
            kind,
            context,
            message,
            (encoded.payload,),
            encoded.buffers,
            seconds or None,
            what,
        )
        return self.result(to, frame)

    def handle(self, kind: Kind, handler: Handler, rescue: Rescue | None = None) -> None:
        if kind in self._handlers:
            raise TelegradError(f"{kind.name} has a handler already")
        self._handlers[kind] = handler
        if rescue is not None:
            self._rescues[kind] = rescue

    def handle_frame(self, kind: Kind, handler: FrameHandler, call_offset: int) -> None:
        """Registers the handler of a kind of message that holds a call, beginning there."""
        self._frame_handlers[kind] = handler
        self._call_offsets[kind] = call_offset

    def offer(self, kind: Kind, take: Callable[[int], Any]) -> None:
        self._riders.append((kind, take))

    def watch_losses(self, callback: Callable[[int, str], None]) -> None:
        self.network.watch_losses(callback)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return self.network.clock.call_later(seconds, callback)

    def run_aside(self, work: Callable[[], None]) -> None:
        self.network.work.submit(work)

    # -- serving

    def _serve(self, source: int, frame: Frame, send: Send) -> None:
        """Runs a message that came in, and answers it now or, if it is deferred, later."""
        self._thread.has_called = False
        counted = frame.kind is not Kind.GATHER  # those ask whether anything is going on
        if counted:
            self._begun.add()
        deferred: Future[Any] | None = None
        rider: tuple[Kind, bytes] | None = None
        for loan in frame.loans:
            loan.hold()  # the answer may need as much memory as the request, and no more
        try:
            if frame.flags & Flags.RIDER:
                kind, payload, frame.body = split_rider(frame.body)
                frame.flags &= ~Flags.RIDER
                rider = kind, payload
            handler = self._frame_handlers.get(frame.kind)
            if handler is not None:
                handler(source, frame, send)
            elif frame.flags & Flags.CONVERSATION:
                self._serve_conversation(source, frame, send)
            else:
                begun = time.perf_counter()
                if frame.context_id == NO_CONTEXT or self.recorder is None:
                    value, deferred = self._run(source, frame)
                else:
                    with self.recorder.enter(frame.context_id):
                        value, deferred = self._run(source, frame)
                took = time.perf_counter() - begun
                if deferred is None:
                    self.answer(source, frame, send, value)
                if frame.kind is Kind.CALL:
                    self.quick.ran(name_in(frame.body, 0)[0], took)
        except BaseException as error:  # noqa: BLE001 - whatever a function raises is its caller's
            self._answer_failure(source, frame, send, error)
        finally:
            for loan in frame.loans:
                loan.end()
        if rider is not None:  # it has time: whoever waits, waits for the answer
            self._serve_rider(source, *rider)
        if deferred is not None:
            deferred.add_done_callback(partial(self._answer_deferred, source, frame, send))
        elif counted:
            self._ended.add()

    def _serve_rider(self, source: int, kind: Kind, payload: bytes) -> None:
        try:
            self._handlers[kind](source, self.codec.decode(payload))
        except Exception as error:  # noqa: BLE001 - nobody is there to raise it to
            self._post_failed(source, kind, payload, error)

    def _serve_conversation(self, source: int, frame: Frame, send: Send) -> None:
        def post(kind: Kind, payload: bytes) -> None:
            self.network.peer(source).post(kind, NO_CONTEXT, -1, (payload,), (), lambda: kind.name)

        conversation = Conversation(source, frame, send, post)
        self._thread.conversation = conversation
        try:
            self._run(source, frame)
        except Exception as error:  # noqa: BLE001 - nobody is there to raise it to
            self._post_failed(source, frame.kind, frame.body, error)
        finally:
            self._thread.conversation = None
            conversation.end()

    def _post_failed(
        self, source: int, kind: Kind, payload: bytes | memoryview, error: Exception
    ) -> None:
        """A message without an answer could not be handled: whoever waits for it must hear."""
        _log.error("handling a %s message failed", kind.name, exc_info=error)
        rescue = self._rescues.get(kind)
        try:
            if rescue is not None:
                rescue(source, payload, error)
                return
        except Exception:  # noqa: BLE001 - the sender is given up below
            _log.exception("and so did telling who waits for it")
        if source != self.info.id:
            self.network.peer(source).lose(f"its {kind.name} message could not be handled: {error}")

    def _is_quick(self, frame: Frame) -> bool:
        if frame.kind is not Kind.CALL and frame.kind not in self._call_offsets:
            return False
        return self.quick.is_quick(self._name_of(frame))

    def _name_of(self, frame: Frame) -> bytes:
        """What a message asks for: the function that it calls, or else its kind."""
        kind = frame.kind
        offset = 0 if kind is Kind.CALL else self._call_offsets.get(kind)
        if offset is None:
            return b"\0%d" % kind
        try:
            if frame.flags & Flags.RIDER:
                offset += rider_size(frame.body)
            return name_in(frame.body, offset)[0]
        except (struct.error, ProtocolError):
            return b""  # whoever serves it will find out

    def _run(self, source: int, frame: Frame) -> tuple[Any, Future[Any] | None]:
        """The message's value, or the future that will have it."""
        if frame.kind is Kind.CALL:
            func, args, kwargs = self.unpack_call(source, frame, 0)
            frame.buffers = []  # a tensor argument's memory is free again when the function is done
            value = func(*args, **kwargs)
            if hasattr(func, "_wrapped_async_rpc_function"):
                return None, checked_future(func, value)
            return value, None
        handler = self._handlers.get(frame.kind)
        if handler is None:
            raise TelegradError(f"this worker does not handle {frame.kind.name} messages")
        body = self._decode(source, frame, frame.body)
        frame.buffers = []
        value = handler(source, body)
        if isinstance(value, torch._C.Future):
            return None, value  # type: ignore[return-value]
        return value, None

    def unpack_call(
        self, source: int, frame: Frame, offset: int
    ) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
        """The function and arguments in a request, whose call head begins at `offset`."""
        name, start = name_in(frame.body, offset)
        payload = memoryview(frame.body)[start:]
        if name:
            func = function_named(name)
            args, kwargs = self._decode(source, frame, payload)
        else:
            func, args, kwargs = self._decode(source, frame, payload)
        self.admit()
        return func, args, kwargs or _NO_KWARGS

    def context_of(self, frame: Frame) -> AbstractContextManager[None]:
        """The autograd context that a message belongs to, for the work it asks for."""
        if frame.context_id == NO_CONTEXT or self.recorder is None:
            return nullcontext()
        return self.recorder.enter(frame.context_id)

    def _decode(self, source: int, frame: Frame, payload: bytes | memoryview) -> Any:
        context, recorder = frame.context_id, self.recorder
        if context == NO_CONTEXT or recorder is None:
            return self.codec.decode(payload, frame.buffers)
        has_history = False

        def attach(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            nonlocal has_history
            has_history = True
            return recorder.record_receive(context, frame.message_id, source, tensors)

        value = self.codec.decode(payload, frame.buffers, attach)
        if not has_history:
            recorder.record_receive(context, frame.message_id, source, [])
        return value

    def answer(self, source: int, frame: Frame, send: Send, value: Any) -> None:
        """Answers a message with a value."""
        if frame.flags & Flags.NO_ANSWER:
            return
        try:
            encoded = self.codec.encode(value, source, root="result")
            message = -1
            if frame.context_id != NO_CONTEXT and self.recorder is not None:
                message = self.recorder.record_send(frame.context_id, source, encoded.tensors)
        except Exception as error:  # noqa: BLE001 - a result that cannot be sent fails its call
            self._answer_failure(source, frame, send, error)
            return
        try:
            send(
                Kind.REPLY,
                0,
                frame.call_id,
                frame.context_id,
                message,
                (encoded.payload,),
                encoded.buffers,
            )
        except (ConnectionClosed, TransportTimeout):
            return  # the caller gave up, left or died: nobody waits for this
        if message != -1 and self.recorder is not None:
            self.recorder.foresee(frame.context_id, message)

    def _answer_failure(self, source: int, frame: Frame, send: Send, error: BaseException) -> None:
        if frame.flags & Flags.NO_ANSWER:
            if isinstance(error, Exception):
                self._post_failed(source, frame.kind, frame.body, error)
            return
        if self.on_failure is not None:
            self.on_failure(error)
        encoded = pack_failure(self.codec, error, self.info)
        try:
            send(Kind.ERROR, 0, frame.call_id, NO_CONTEXT, -1, (encoded.payload,), encoded.buffers)
        except (ConnectionClosed, TransportTimeout):
            pass  # nobody waits for this any more

    def _answer_deferred(self, source: int, frame: Frame, send: Send, future: Future[Any]) -> None:
        try:
            value = future.wait()  # it is done: this does not wait
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            self._answer_failure(source, frame, send, error)
        else:
            self.answer(source, frame, send, value)
        if frame.kind is not Kind.GATHER:
            self._ended.add()

    def result(self, source: int, frame: Frame) -> Any:
        """What a reply holds: returned, or raised."""
        if frame.kind is Kind.REPLY:
            return self._decode(source, frame, frame.body)
        if frame.kind is Kind.ERROR:
            raise rebuild_failure(self.codec, self.codec.decode(frame.body, frame.buffers))
        raise TelegradError(f"a {frame.kind.name} message came where a reply was expected")

    # -- the state of things

    def work_counts(self) -> tuple[int, int]:
        """How many messages have been begun and ended here, ever."""
        ended = self._ended.count  # read first: what ends in between must not look unbegun
        return self._begun.count, ended

    def pending_calls(self) -> int:
        return sum(peer.pending_count for peer in self.network.peers())


class _Thread(threading.local):
    """What one thread is at."""

    conversation: Conversation | None = None
    has_called = False
    """It has called other workers since it began to serve a message, and may have waited."""


class _Tally:
    """A count that any thread may add to."""

    __slots__ = ("_lock", "count")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self) -> None:
        with self._lock:
            self.count += 1


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


def _nothing() -> None:
    pass


def _drop(*parts: Any) -> None:
    """Where the answer to a post to oneself goes."""
