"""The callee's end of recorded calls: serving them."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from telegrad.autograd.plain.entries import Export
from telegrad.autograd.plain.nodes import apply_received
from telegrad.autograd.plain.passes import PassName, watch_exported
from telegrad.autograd.plain.values import Value
from telegrad.autograd.torch_internals import set_grad_enabled
from telegrad.errors import TelegradError
from telegrad.rpc.connections.network import Send
from telegrad.rpc.seams import NO_CONTEXT
from telegrad.transport.base import ConnectionClosed, TransportTimeout
from telegrad.wire.frames import Flags, Frame, Kind

if TYPE_CHECKING:
    from telegrad.autograd.plain.engine import PlainEngine

__all__ = [
    "ArgumentFailed",
    "Stays",
    "as_served",
    "export_leaves",
    "is_serving",
    "reply_head",
    "reply_parts",
    "serve",
    "serve_pass",
]

_COUNTS = struct.Struct("<HH")  # calls below, calls whose Received nodes have died


@dataclass
class Stays:
    """What a submitted function may return: its result, and what its caller is told at once."""

    result: Any
    news: Any


class _Serving:
    """A recorded call that is being served."""

    def __init__(self) -> None:
        self.exported: tuple[Sequence[Tensor], Export] | None = None
        self.of_pass: PassName | None = None


_serving: contextvars.ContextVar[_Serving | None] = contextvars.ContextVar("serving", default=None)


class ArgumentFailed(TelegradError):
    """A future among the arguments of a call has no value: what its function has raised is raised
    by the call. (What unpacking raises otherwise is taken for a fault of the message.)"""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def serve_pass(name: PassName) -> None:
    """What this thread serves is a message of this pass."""
    serving = _serving.get()
    if serving is not None:
        serving.of_pass = name


def is_serving() -> bool:
    """Whether this thread runs a function that another worker has called."""
    return _serving.get() is not None


@contextlib.contextmanager
def as_served() -> Iterator[None]:
    """Inside, this thread serves a call, though no message has asked for it."""
    outer = _serving.set(_Serving())
    try:
        yield
    finally:
        _serving.reset(outer)


def export_leaves(leaves: Sequence[Tensor], export: Export) -> None:
    """Inside of a function that another worker calls: gradients of these leaves go to the caller
    and not into `.grad`.

    Args:
        export: takes the gradients that a pass has found, in the order of `leaves`; what it returns
            goes to the caller's `Residents.revive`.
    """
    serving = _serving.get()
    if serving is None or not torch.is_grad_enabled():
        return
    for leaf in leaves:
        watch_exported(leaf)
    serving.exported = (leaves, export)


def serve(engine: PlainEngine, source: int, frame: Frame, send: Send) -> None:
    lifetimes = engine.lifetimes
    lifetimes.begin_to_serve(frame.message_id)
    try:
        _serve_call(engine, source, frame, send)
    finally:
        lifetimes.end_to_serve(frame.message_id)


def _serve_call(engine: PlainEngine, source: int, frame: Frame, send: Send) -> None:
    call, stays = frame.message_id, bool(frame.context_id)
    engine.lifetimes.watch()
    has_gradients_on = not frame.flags & Flags.NO_GRAD
    service, serving = engine.agent.service, _Serving()
    value = engine.lifetimes.values.setdefault(call, Value()) if stays else None

    def attach(tensors: list[Tensor]) -> Sequence[Tensor]:
        note = engine.lifetimes.keep_arguments(call, source)
        return apply_received(call, note, tensors)

    outer = _serving.set(serving)
    try:
        with torch.set_grad_enabled(has_gradients_on):
            func, args, kwargs = service.unpack_call(source, frame, 0, attach)
            frame.buffers = []
            result = func(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = engine.loop.run(result, has_gradients_on=has_gradients_on)
            del args, kwargs
    except BaseException as error:
        failure = error.error if isinstance(error, ArgumentFailed) else error
        if value is not None:
            value.fail(failure)
        if failure is not error:
            raise failure from None
        raise
    finally:
        _serving.reset(outer)
        set_grad_enabled(True)
    if value is not None:
        news: Any = None
        if isinstance(result, Stays):
            result, news = result.result, result.news
        tensors = _tensors_in(result) if has_gradients_on else []
        if tensors:
            engine.entries.add(call, tensors, serving.exported)
        value.set(result)  # last: whoever gets it may send gradients for it at once
        encoded = engine.agent.codec.encode(news, source)
        _answer(engine, frame, source, send, encoded, [call] if has_gradients_on else [])
        return
    with torch.set_grad_enabled(has_gradients_on):
        encoded = engine.agent.codec.encode(result, source, root="result")
    below: list[int] = []
    if encoded.tensors:
        below = engine.entries.add(
            call, encoded.tensors, serving.exported, of_pass=serving.of_pass
        ).below
    _answer(engine, frame, source, send, encoded, below)


def _answer(
    engine: PlainEngine,
    frame: Frame,
    source: int,
    send: Send,
    encoded: Any,
    below: Sequence[int],
) -> None:
    dead = engine.lifetimes.dead_arguments(source)
    numbers = (*below, *dead)
    head = struct.pack(f"<HH{len(numbers)}q", len(below), len(dead), *numbers)
    try:
        send(
            Kind.REPLY,
            0,
            frame.call_id,
            NO_CONTEXT,
            frame.message_id,
            (head, encoded.payload),
            encoded.buffers,
        )
    except (ConnectionClosed, TransportTimeout):  # the caller gave up, left or died
        engine.entries.drop([frame.message_id])
        if encoded.references is not None:
            encoded.references.abandon()
    else:
        if encoded.references is not None:
            engine.agent.service.sent_references(source, frame, encoded.references)


def _tensors_in(value: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def reply_parts(frame: Frame) -> tuple[Sequence[int], Sequence[int], memoryview]:
    """Of a reply: the calls below, those whose sinks have died, and the payload."""
    below, dead = _COUNTS.unpack_from(frame.body)
    numbers = struct.unpack_from(f"<{below + dead}q", frame.body, _COUNTS.size)
    return (
        numbers[:below],
        numbers[below:],
        memoryview(frame.body)[_COUNTS.size + 8 * len(numbers) :],
    )


def reply_head(frame: Frame) -> int:
    """Of any reply: those of plain calls carry the call's number, and no context."""
    is_plain = frame.context_id == NO_CONTEXT and frame.message_id >= 0
    if frame.kind is not Kind.REPLY or not is_plain:
        return 0
    below, dead = _COUNTS.unpack_from(frame.body)
    return _COUNTS.size + 8 * int(below + dead)
