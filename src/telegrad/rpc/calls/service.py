"""The serving side of a worker: runs the messages that come in, and answers them."""

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

__all__ = ["FrameHandler", "Service", "runs_without_gradients"]

_log = logging.getLogger("telegrad.rpc")

_NO_KWARGS: dict[str, Any] = {}

FrameHandler = Callable[[int, Frame, Send], None]
"""Takes a message as it came, and answers it itself, with `Service.answer`."""


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
        """Hears of what functions raise here that others call; these are told in any case."""
        self.admit: Callable[[], None] = _nothing
        """Runs between the unpacking of a call and its function."""
        self.stand_in: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
        """Gives what is run in the place of a function that others call, if set."""
        self.thread = _Thread()
        self._call_offsets: dict[Kind, int] = {}
        self._handlers: dict[Kind, Handler] = {}
        self._rescues: dict[Kind, Rescue] = {}
        self._can_wait: dict[Kind, Callable[[bytes], bool]] = {}
        self._frame_handlers: dict[Kind, FrameHandler] = {}
        # Work begun and ended here, for a graceful shutdown.
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
            call_offset: where in such a message the call that it holds begins.
        """
        self._frame_handlers[kind] = handler
        if call_offset is not None:
            self._call_offsets[kind] = call_offset

    def serve(self, source: int, frame: Frame, send: Send) -> None:
        """Runs a message that came in, and answers it now or, if it is deferred, later."""
        depth = frame.flags & Flags.DEPTH
        if depth:
            frame.flags &= ~Flags.DEPTH
        self.thread.depth = min(depth + Flags.DEPTH_ONE, Flags.DEPTH)
        outer, self.thread.source = self.thread.source, source
        counted = frame.kind is not Kind.GATHER  # those ask whether anything is going on
        if counted:
            self._begun.add()
        deferred: Future[Any] | None = None
        rider: tuple[Kind, bytes] | None = None
        for loan in frame.loans:
            loan.hold()  # the answer may need as much memory as the request, and no more
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
        except BaseException as error:  # noqa: BLE001 - whatever a function raises is its caller's
            try:
                self.answer_failure(source, frame, send, error)
            except BaseException:  # no memory for that, say: its connection ends by it
                if counted:
                    self._ended.add()
                raise
        finally:
            self.thread.depth = 0  # callbacks may run on this thread next
            self.thread.source = outer
            for loan in frame.loans:
                loan.end()
        if rider is not None:  # it has time: whoever waits, waits for the answer
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
        except Exception as error:  # noqa: BLE001 - nobody is there to raise it to
            self._post_failed(source, frame.kind, frame.body, error)
        finally:
            self.thread.conversation = None
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
        if source != self._info.id:
            self._peer_of(source).lose(f"its {kind.name} message could not be handled: {error}")

    def function_in(self, frame: Frame) -> bytes:
        """The name of the function that a message calls; empty if it has none, or calls none."""
        offset = 0 if frame.kind is Kind.CALL else self._call_offsets.get(frame.kind)
        if offset is None:
            return b""
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
            try:
                if frame.flags and runs_without_gradients(frame):
                    _set_grad_enabled(False)
                value = func(*args, **kwargs)
            finally:
                _set_grad_enabled(True)  # a function may have left it off, for all that follow here
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
            attach: gives the arguments their history, in the place of the recorder.
        """
        name, start = name_in(frame.body, offset)
        payload = memoryview(frame.body)[start:]
        allowed = self._codec.allowed
        if allowed is not None:
            func = self._allowed_function(allowed, name, payload)
            args, kwargs = self.decode(source, frame, payload, attach)
        elif name:
            # Also if there is no such function: references in it must be unpacked.
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
        """The autograd context that a message belongs to, for the work it asks for."""
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
        """What a message holds, with its history: in the message's context, or by a plain call."""
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
            is_of_continuation: it may have been computed with gradients on, though they are off at
                the caller.
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
            # The caller gave up, left or died: nobody unpacks this.
            if encoded.references is not None:
                encoded.references.abandon()
            return
        if encoded.references is not None:
            self.sent_references(source, frame, encoded.references)
        if message != -1 and self.recorder is not None:
            self.recorder.foresee(frame.context_id, message)

    def sent_references(self, source: int, frame: Frame, references: References) -> None:
        """They are in the answer to a message, which was sent. Its caller may not unpack it."""
        if source != self._info.id:
            with contextlib.suppress(WorkerLost):  # it has left meanwhile
                self._peer_of(source).sent_references.answered(frame.call_id, references)

    def answer_failure(self, source: int, frame: Frame, send: Send, error: BaseException) -> None:
        """Answers a message with an exception."""
        if isinstance(frame.buffers, Unread):
            error = SerializationError(frame.buffers.reason)  # all else follows from that
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
            pass  # nobody waits for this any more

    def _answer_deferred(self, source: int, frame: Frame, send: Send, future: Future[Any]) -> None:
        is_of_continuation = frame.kind is Kind.CALL
        try:
            value = future.wait()  # it is done: this does not wait
            self.answer(source, frame, send, value, is_of_continuation=is_of_continuation)
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller, who waits for it
            self.answer_failure(source, frame, send, error)
        finally:
            self._ended.add()

    def handle_now(self, source: int, kind: Kind, payload: bytes | memoryview) -> None:
        """Handles a message without an answer that has come inside of another one."""
        try:
            self._handlers[kind](source, self._codec.decode(payload))
        except Exception as error:  # noqa: BLE001 - nobody is there to raise it to
            self._post_failed(source, kind, payload, error)

    def _may_be_late(self, kind: Kind, news: bytes) -> bool:
        """Whether a message that has ridden on a call may be handled after it."""
        can_wait = self._can_wait.get(kind)
        try:
            return can_wait is not None and can_wait(news)
        except Exception:  # noqa: BLE001 - it is damaged, which is dealt with when it is handled
            return False

    def _handle_rider(self, source: int, kind: Kind, news: bytes) -> None:
        try:
            self._handlers[kind](source, news)
        except Exception as error:  # noqa: BLE001 - nobody is there to raise it to
            self._post_failed(source, kind, news, error)

    def work_counts(self) -> tuple[int, int]:
        """How many messages have been begun and ended here, ever."""
        ended = self._ended.look()  # read first: what ends in between must not look unbegun
        return self._begun.look(), ended


def runs_without_gradients(frame: Frame) -> bool:
    """Whether gradients are off for the function that a message calls: as they are for its caller,
    in an autograd context. Outside of one a function may have gradients of its own."""
    return bool(frame.flags & Flags.NO_GRAD) and frame.context_id != NO_CONTEXT


class _Thread(threading.local):
    """What one thread is at."""

    conversation: Conversation | None = None
    depth = 0
    """Of the calls that it makes, as in `Flags.DEPTH`: 0 unless it serves one itself."""
    source = -1
    """The worker whose message it serves; -1 if it serves none."""
    is_own = False
    """It was started by the agent: others may wait for what it does."""


class _Tally:
    """A count that any thread may add to, in one step of the interpreter and without a lock."""

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
