"""`Service`, the serving side of a worker: runs incoming messages, and answers them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import is_grad_enabled
from torch._C import _set_grad_enabled
from torch.futures import Future

from telegrad.errors import NotAllowed, ProtocolError, SerializationError, TelegradError, WorkerLost
from telegrad.rpc.calls.outcome import describe_message, pack_failure
from telegrad.rpc.connections.conversation import Conversation
from telegrad.rpc.connections.network import Send
from telegrad.rpc.connections.peer import Peer
from telegrad.rpc.functions import checked_future, guarded
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.seams import NO_CONTEXT, Handler, Recorder, Rescue
from telegrad.transport.base import ConnectionClosed, TransportTimeout
from telegrad.wire.allowed.allow_list import AllowList
from telegrad.wire.codec import Codec, References
from telegrad.wire.frames import Flags, Frame, Kind, Unread, rider_size, split_rider
from telegrad.wire.function_names import function_named, name_in
from telegrad.wire.tensor_table.layout import is_leaf
from telegrad.wire.tensor_table.unpack import Attach

__all__ = ["FrameHandler", "Service", "run_function"]

_log = logging.getLogger("telegrad.rpc")

_NO_KWARGS: dict[str, Any] = {}

FrameHandler = Callable[[int, Frame, Send], None]
"""Handles an undecoded message, and answers it itself, with `Service.answer`."""


class Service:
    """
    Args:
        peer_of: finds another worker by its id.
    """

    def __init__(self, info: WorkerInfo, codec: Codec, peer_of: Callable[[int], Peer]) -> None:
        self._info = info
        self._codec = codec
        self._peer_of = peer_of
        self.recorder: Recorder | None = None
        self.on_failure: Callable[[BaseException], None] | None = None
        """Called with each exception that a called function raises, before it is sent to the
        caller."""
        self.admit: Callable[[], None] = _nothing
        """Runs between the unpacking of a call and its function."""
        self.stand_in: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
        """If set, returns the function to run in place of one that was called."""
        self.thread = _Thread()
        self._call_offsets: dict[Kind, int] = {}
        self._handlers: dict[Kind, Handler] = {}
        self._rescues: dict[Kind, Rescue] = {}
        self._can_wait: dict[Kind, Callable[[bytes], bool]] = {}
        self._frame_handlers: dict[Kind, FrameHandler] = {}
        # How much work has begun and ended here, for a graceful shutdown.
        self._begun = _Tally()
        self._ended = _Tally()

    def handle(self, kind: Kind, handler: Handler, rescue: Rescue | None = None) -> None:
        if kind in self._handlers:
            raise TelegradError(f"{kind.name} has a handler already")
        self._handlers[kind] = handler
        if rescue is not None:
            self._rescues[kind] = rescue

    def expect_riders(self, kind: Kind, can_wait: Callable[[bytes], bool]) -> None:
        """See `Messenger.offer`."""
        self._can_wait[kind] = can_wait

    def handle_frame(
        self, kind: Kind, handler: FrameHandler, call_offset: int | None = None
    ) -> None:
        """Registers a handler that answers itself.

        Args:
            call_offset: where the call in such a message begins, if it holds one.
        """
        self._frame_handlers[kind] = handler
        if call_offset is not None:
            self._call_offsets[kind] = call_offset

    def serve(self, source: int, frame: Frame, send: Send) -> None:
        """Runs an incoming message, and answers it, or defers the answer to a future."""
        self.thread.has_called = False
        depth = frame.flags & Flags.DEPTH
        if depth:
            frame.flags &= ~Flags.DEPTH
        self.thread.depth = min(depth + Flags.DEPTH_ONE, Flags.DEPTH)
        outer, self.thread.source = self.thread.source, source
        counted = frame.kind is not Kind.GATHER  # those ask whether work is left
        if counted:
            self._begun.add()
        deferred: Future[Any] | None = None
        rider: tuple[Kind, bytes] | None = None
        for loan in frame.loans:
            loan.hold()  # the answer must not take more memory than the request
        try:
            if frame.flags & Flags.RIDER:
                kind, news, frame.body = split_rider(frame.body)
                frame.flags &= ~Flags.RIDER
                if self._may_be_late(kind, news):
                    rider = kind, news
                else:
                    self._handle_rider(source, kind, news)
            handler = self._frame_handlers.get(frame.kind)
            if handler is not None:
                handler(source, frame, send)
            elif frame.flags & Flags.CONVERSATION:
                self._serve_conversation(source, frame, send)
            else:
                if frame.context_id == NO_CONTEXT or self.recorder is None:
                    value, deferred = self._run(source, frame)
                else:
                    with self.recorder.enter(frame.context_id):
                        value, deferred = self._run(source, frame)
                if deferred is None:
                    self.answer(source, frame, send, value)
        except BaseException as error:  # noqa: BLE001 - raised at the caller
            try:
                self.answer_failure(source, frame, send, error)
            except BaseException:  # out of memory, for example: it ends the connection
                if counted:
                    self._ended.add()
                raise
        finally:
            self.thread.depth = 0  # callbacks may run on this thread next
            self.thread.source = outer
            for loan in frame.loans:
                loan.end()
        if rider is not None:  # after the answer, for which the caller waits
            self._handle_rider(source, *rider)
        if deferred is not None:
            deferred.add_done_callback(partial(self._answer_deferred, source, frame, send))
        elif counted:
            self._ended.add()

    def _serve_conversation(self, source: int, frame: Frame, send: Send) -> None:
        def post(kind: Kind, payload: bytes) -> None:
            what = partial(describe_message, kind)
            self._peer_of(source).requests.post(kind, NO_CONTEXT, -1, (payload,), (), what)

        conversation = Conversation(source, frame, send, post)
        self.thread.conversation = conversation
        try:
            self._run(source, frame)
        except Exception as error:  # noqa: BLE001 - no caller waits for it
            self._post_failed(source, frame.kind, frame.body, error)
        finally:
            self.thread.conversation = None
            conversation.end()

    def _post_failed(
        self, source: int, kind: Kind, payload: bytes | memoryview, error: Exception
    ) -> None:
        """A message without an answer could not be handled: ends the waits for its effect."""
        _log.error("handling a %s message failed", kind.name, exc_info=error)
        rescue = self._rescues.get(kind)
        try:
            if rescue is not None:
                rescue(source, payload, error)
                return
        except Exception:  # noqa: BLE001 - the sender is dropped below
            _log.exception("and so did the handler of that failure")
        if source != self._info.id:
            self._peer_of(source).lose(f"its {kind.name} message could not be handled: {error}")

    def has_called(self) -> bool:
        """Whether what this thread has served last has called other workers."""
        return self.thread.has_called

    def name_of(self, frame: Frame) -> bytes:
        """What a message asks for: the function that it calls, or else its kind."""
        if frame.kind is not Kind.CALL and frame.kind not in self._call_offsets:
            return b"\0%d" % frame.kind
        return self.function_in(frame)

    def function_in(self, frame: Frame) -> bytes:
        """The name of the function that a message calls; empty if it has no name, or there is no
        call."""
        offset = 0 if frame.kind is Kind.CALL else self._call_offsets.get(frame.kind)
        if offset is None:
            return b""
        try:
            if frame.flags & Flags.RIDER:
                offset += rider_size(frame.body)
            return name_in(frame.body, offset)[0]
        except (struct.error, ProtocolError):
            return b""  # serving it raises the error

    def _run(self, source: int, frame: Frame) -> tuple[Any, Future[Any] | None]:
        """The message's value, or a future of it."""
        if frame.kind is Kind.CALL:
            func, args, kwargs = self.unpack_call(source, frame, 0)
            value = run_function(frame, func, args, kwargs)
            if hasattr(func, "_wrapped_async_rpc_function"):
                return None, checked_future(func, value)
            return value, None
        handler = self._handlers.get(frame.kind)
        if handler is None:
            raise TelegradError(f"this worker does not handle {frame.kind.name} messages")
        body = self.decode(source, frame, frame.body)
        frame.buffers = []
        value = handler(source, body)
        if isinstance(value, torch._C.Future):
            return None, value  # type: ignore[return-value]
        return value, None

    def unpack_call(
        self, source: int, frame: Frame, offset: int, attach: Attach | None = None
    ) -> tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]:
        """The function and arguments in a request, whose call head begins at `offset`.

        Args:
            attach: gives the arguments their history, instead of the recorder.
        """
        name, start = name_in(frame.body, offset)
        payload = memoryview(frame.body)[start:]
        allowed = self._codec.allowed
        if allowed is not None:
            func = self._allowed_function(allowed, name, payload)
            args, kwargs = self.decode(source, frame, payload, attach)
        elif name:
            # First, even if there is no such function, so that references in it are unpacked.
            args, kwargs = self.decode(source, frame, payload, attach)
            func = function_named(name)
        else:
            func, args, kwargs = self.decode(source, frame, payload, attach)
        self.admit()
        if self.stand_in is not None:
            func = self.stand_in(func)
        return func, args, kwargs or _NO_KWARGS

    def _allowed_function(
        self, allowed: AllowList, name: bytes, payload: memoryview
    ) -> Callable[..., Any]:
        try:
            if not name:
                allowed.refuse_by_value()
            return guarded(allowed.function(name), allowed)
        except (NotAllowed, SerializationError):
            self._codec.discard(payload)
            raise

    def context_of(self, frame: Frame) -> AbstractContextManager[None]:
        """Enters the autograd context of a message."""
        if frame.context_id == NO_CONTEXT or self.recorder is None:
            return nullcontext()
        return self.recorder.enter(frame.context_id)

    def decode(
        self,
        source: int,
        frame: Frame,
        payload: bytes | memoryview,
        attach_plain: Attach | None = None,
    ) -> Any:
        """The value in a message, with its history: of the message's context, or of a plain
        call."""
        if attach_plain is not None:
            return self._codec.decode(payload, frame.buffers, attach_plain)
        context, recorder = frame.context_id, self.recorder
        if recorder is None or (context == NO_CONTEXT and not frame.flags & Flags.HISTORY_LEFT):
            return self._codec.decode(payload, frame.buffers)
        has_history = False

        def attach(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            nonlocal has_history
            has_history = True
            return recorder.record_receive(context, frame.message_id, source, tensors)

        value = self._codec.decode(payload, frame.buffers, attach)
        if not has_history and context != NO_CONTEXT:
            recorder.record_receive(context, frame.message_id, source, [])
        return value

    def answer(
        self,
        source: int,
        frame: Frame,
        send: Send,
        value: Any,
        *,
        is_of_continuation: bool = False,
    ) -> None:
        """Answers a message with a value.

        Args:
            is_of_continuation: the value may have been computed with gradients on, although they
            are
                off at the caller.
        """
        if frame.flags & Flags.NO_ANSWER:
            return
        try:
            if not frame.flags and is_grad_enabled():
                encoded = self._codec.encode(value, source, root="result")
            else:
                is_recorded = frame.context_id != NO_CONTEXT and not is_of_continuation
                keeps_histories = is_recorded or not frame.flags & Flags.NO_GRAD
                with torch.set_grad_enabled(keeps_histories):
                    encoded = self._codec.encode(value, source, root="result")
            message, flags = -1, 0
            if frame.context_id != NO_CONTEXT and self.recorder is not None:
                message = self.recorder.record_send(frame.context_id, source, encoded.tensors)
            elif encoded.tensors and not all(map(is_leaf, encoded.tensors)):
                flags = Flags.HISTORY_LEFT
        except Exception as error:  # noqa: BLE001 - a result that cannot be sent fails its call
            self.answer_failure(source, frame, send, error)
            return
        try:
            send(
                Kind.REPLY,
                flags,
                frame.call_id,
                frame.context_id,
                message,
                (encoded.payload,),
                encoded.buffers,
            )
        except (ConnectionClosed, TransportTimeout):
            # The caller gave up, left or died, and does not unpack this.
            if encoded.references is not None:
                encoded.references.abandon()
            return
        if encoded.references is not None:
            self.sent_references(source, frame, encoded.references)
        if message != -1 and self.recorder is not None:
            self.recorder.foresee(frame.context_id, message)

    def sent_references(self, source: int, frame: Frame, references: References) -> None:
        """The answer to a message was sent with these references. Its caller may not unpack it."""
        if source != self._info.id:
            with contextlib.suppress(WorkerLost):  # it has left meanwhile
                self._peer_of(source).sent_references.answered(frame.call_id, references)

    def answer_failure(self, source: int, frame: Frame, send: Send, error: BaseException) -> None:
        """Answers a message with an exception."""
        if isinstance(frame.buffers, Unread):
            error = SerializationError(frame.buffers.reason)  # this has caused the error
        if frame.flags & Flags.NO_ANSWER:
            if isinstance(error, Exception):
                self._post_failed(source, frame.kind, frame.body, error)
            return
        if self.on_failure is not None:
            self.on_failure(error)
        encoded = pack_failure(self._codec, error, self._info)
        try:
            send(Kind.ERROR, 0, frame.call_id, NO_CONTEXT, -1, (encoded.payload,), encoded.buffers)
        except (ConnectionClosed, TransportTimeout):
            pass  # the caller no longer waits for it

    def _answer_deferred(self, source: int, frame: Frame, send: Send, future: Future[Any]) -> None:
        is_of_continuation = frame.kind is Kind.CALL
        try:
            value = future.wait()  # it is done
            self.answer(source, frame, send, value, is_of_continuation=is_of_continuation)
        except BaseException as error:  # noqa: BLE001 - raised at the caller
            self.answer_failure(source, frame, send, error)
        finally:
            self._ended.add()

    def handle_now(self, source: int, kind: Kind, payload: bytes | memoryview) -> None:
        """Handles a message without an answer that came inside another one."""
        try:
            self._handlers[kind](source, self._codec.decode(payload))
        except Exception as error:  # noqa: BLE001 - no caller waits for it
            self._post_failed(source, kind, payload, error)

    def _may_be_late(self, kind: Kind, news: bytes) -> bool:
        """Whether a message that came with a call may be handled after it."""
        can_wait = self._can_wait.get(kind)
        try:
            return can_wait is not None and can_wait(news)
        except Exception:  # noqa: BLE001 - it is damaged; handling it raises
            return False

    def _handle_rider(self, source: int, kind: Kind, news: bytes) -> None:
        try:
            self._handlers[kind](source, news)
        except Exception as error:  # noqa: BLE001 - no caller waits for it
            self._post_failed(source, kind, news, error)

    def work_counts(self) -> tuple[int, int]:
        """How many messages this worker has begun and ended to handle."""
        ended = self._ended.look()  # read first, so that it is not larger
        return self._begun.look(), ended


def run_function(
    frame: Frame, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Runs the function that a message calls. In an autograd context its gradients are off if they
    are off at its caller; otherwise it may use gradients of its own."""
    frame.buffers = []  # so that the function's end frees the memory of tensor arguments
    try:
        if frame.flags & Flags.NO_GRAD and frame.context_id != NO_CONTEXT:
            _set_grad_enabled(False)
        return func(*args, **kwargs)
    finally:
        _set_grad_enabled(True)  # a function may have left it off


class _Thread(threading.local):
    """What one thread does."""

    conversation: Conversation | None = None
    has_called = False
    """It has called other workers since it began to serve a message, and may have waited."""
    depth = 0
    """The depth of its calls, as in `Flags.DEPTH`: 0 unless it serves a call."""
    source = -1
    """The worker whose message it serves; -1 if it serves none."""
    is_own = False
    """Whether the agent has started it, so that others may wait for its work."""


class _Tally:
    """A count to which any thread may add, in one step of the interpreter and without a lock."""

    __slots__ = ("_lock", "_looks", "add")

    def __init__(self) -> None:
        self.add = itertools.count().__next__
        self._looks = 0
        self._lock = threading.RLock()  # guards the number of looks

    def look(self) -> int:
        with self._lock:
            count = self.add() - self._looks  # each look has added one itself
            self._looks += 1
            return count


def _nothing() -> None:
    pass
