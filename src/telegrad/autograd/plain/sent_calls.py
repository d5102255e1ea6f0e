"""Calls on their way: packing them, and unpacking their replies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from telegrad.autograd.plain.nodes import apply_collect, apply_post, apply_stub, refuse_transforms
from telegrad.autograd.plain.record import Record, Residents
from telegrad.autograd.plain.serving import is_serving, reply_parts
from telegrad.errors import SerializationError, TelegradError
from telegrad.rpc.calls.agent import Agent
from telegrad.rpc.calls.async_call import AsyncCall
from telegrad.rpc.calls.outcome import describe_call, is_described_by_arguments
from telegrad.rpc.seams import NO_CONTEXT
from telegrad.wire.frames import Flags, Frame, Kind

if TYPE_CHECKING:
    from telegrad.autograd.plain.engine import PlainEngine

__all__ = ["PlainCall", "SentCall", "is_packing_arguments", "pack", "refuse_context"]


class _Packing(threading.local):
    futures: dict[int, Any] | None = None


_packing = _Packing()
"""Of this thread: the futures in the arguments that are being packed, by the id of their call."""


def is_packing_arguments(call: int, future: Any) -> bool:
    """Whether the arguments of a recorded call are being packed; notes a future among them, which
    lives until the call has been answered."""
    if _packing.futures is None:
        return False
    _packing.futures[call] = future
    return True


@dataclass(eq=False)
class SentCall:
    """A call as it leaves, and what its reply needs."""

    engine: PlainEngine
    record: Record
    token: Tensor | None
    head: bytes
    encoded: Any
    flags: int
    what: Callable[[], str]
    covered: dict[int, Any]
    """Futures among the arguments, by the ids of their calls, whose tokens are arguments, too."""

    def __post_init__(self) -> None:
        self.engine.lifetimes.begin_to_make(self.record.call, self)

    def result(self, frame: Frame) -> Any:
        """What a reply holds: returned with its history, or raised."""
        engine, record = self.engine, self.record
        try:
            if frame.kind is not Kind.REPLY:
                return engine.agent.result(record.to, frame, self.what)
            below, _, payload = reply_parts(frame)
            attach = partial(self._attach, below) if below else None
            return engine.agent.codec.decode(payload, frame.buffers, attach)
        except BaseException as error:
            engine.lifetimes.give_up(record.call, record.to)  # nothing here will lead there
            if not isinstance(error, SerializationError) or frame.kind is not Kind.REPLY:
                raise
            raise SerializationError(
                f"the result of {self.what()} on worker {engine.name_of(record.to)!r}: {error}",
                path=error.path,
            ) from error

    def _attach(self, below: Sequence[int], tensors: list[Tensor]) -> Sequence[Tensor]:
        engine, record = self.engine, self.record
        tokens: list[Tensor] = []
        unknown: list[int] = []
        for call in below:
            token = self.token if call == record.call else engine.lifetimes.tokens.get(call)
            if token is not None:
                tokens.append(token)
            elif call in self.covered:
                continue
            elif is_serving():
                tokens.append(apply_stub(call))
            else:
                unknown.append(call)
        if unknown:
            # Each may lead back here by any call that is not over. With an edge to all of these,
            # a pass that needs what lies behind one runs this node, which raises an error.
            tokens += [t for c, t in list(engine.lifetimes.tokens.items()) if c not in below]
        record.below, record.unknown = below, unknown
        # Not in the record, to which the token leads as well: that lives as long as the entry.
        others = engine.lifetimes.exporting_below(below)
        note = engine.lifetimes.keep_result(
            record.call, record.to, has_exports=record.residents is not None
        )
        return apply_post(record, (note, *others), tensors, tokens)


class PlainCall(AsyncCall):
    """Its future gets the frame of the reply: whoever waits decodes it, in its own grad mode."""

    __slots__ = ("_engine", "_on_news")

    def __init__(
        self,
        engine: PlainEngine,
        to: int,
        what: Callable[[], str],
        on_news: Callable[[Any], None] | None,
    ) -> None:
        super().__init__(engine.agent, to, NO_CONTEXT, what)
        self._engine = engine
        self._on_news = on_news

    def succeed(self, frame: Frame) -> None:
        if frame.kind is Kind.REPLY:
            _, dead, payload = reply_parts(frame)
            self._engine.lifetimes.drop_tokens(dead)
            if self._on_news is not None:
                self._on_news(self._engine.agent.codec.decode(payload, frame.buffers))
            self._settle(self.future.set_result, frame)
        else:
            super().succeed(frame)


def pack(
    engine: PlainEngine,
    to: int,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    residents: Residents | None,
    *,
    stays: bool,
) -> SentCall:
    agent = engine.agent
    refuse_context(agent)
    refuse_transforms()
    engine.lifetimes.tell_of_dead(to)
    engine.lifetimes.watch()
    outer, _packing.futures = _packing.futures, {}
    try:
        head, encoded, _, _ = agent.pack_call(to, func, tuple(args), kwargs)
        covered = _packing.futures
    finally:
        _packing.futures = outer
    try:
        what: Callable[[], str] = partial(describe_call, func, ())
        if is_described_by_arguments(func):  # now: the call must not keep its arguments alive
            what = partial(str, describe_call(func, args))
        return _record_packed(engine, to, what, head, encoded, residents, covered, stays=stays)
    except BaseException:
        if encoded.references is not None:
            encoded.references.abandon()
        raise


def _record_packed(
    engine: PlainEngine,
    to: int,
    what: Callable[[], str],
    head: bytes,
    encoded: Any,
    residents: Residents | None,
    covered: dict[int, Any] | None,
    *,
    stays: bool,
) -> SentCall:
    record = Record(engine, to, engine.new_call(), encoded.tensors, stays=stays)
    token: Tensor | None = None
    flags = engine.agent.service.thread.depth
    if torch.is_grad_enabled():
        inputs = encoded.tensors
        if residents is not None and residents.tensors:
            record.residents = residents
            inputs = [*inputs, *residents.tensors]
        record.arguments = engine.lifetimes.exporting_below(covered or ())
        token = apply_collect(record, inputs)
        if encoded.tensors:
            engine.lifetimes.keep_token(record.call, to, token)
    else:
        flags |= Flags.NO_GRAD
    return SentCall(engine, record, token, head, encoded, flags, what, covered or {})


def refuse_context(agent: Agent) -> None:
    """
    Raises:
        TelegradError: this thread is in an autograd context.
    """
    recorder = agent.service.recorder
    if recorder is not None and recorder.current_context() != NO_CONTEXT:
        raise TelegradError(
            "plain calls and remote modules cannot be used inside of an autograd context: "
            "leave the context and call loss.backward(), or use telegrad.rpc inside of it"
        )
