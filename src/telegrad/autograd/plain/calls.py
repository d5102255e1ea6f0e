"""Calls that plain `loss.backward()` goes through: making them and serving them."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from telegrad.autograd.plain.coroutines import EventLoop
from telegrad.autograd.plain.entries import Entries, Export
from telegrad.autograd.plain.lifetimes import Lifetimes
from telegrad.autograd.plain.nodes import (
    EMPTY,
    apply_collect,
    apply_post,
    apply_received,
    apply_stub,
    refuse_transforms,
    will_run,
)
from telegrad.autograd.plain.notes import Note
from telegrad.autograd.plain.passes import (
    Modes,
    Pass,
    Passes,
    Report,
    Run,
    current_served_run,
    watch_exported,
)
from telegrad.autograd.plain.values import Value
from telegrad.errors import (
    BackwardError,
    NotInitialized,
    ProtocolError,
    SerializationError,
    TelegradError,
)
from telegrad.ids import WorkerCounter, first_of_life, worker_of
from telegrad.rpc.calls.agent import Agent
from telegrad.rpc.calls.async_call import AsyncCall
from telegrad.rpc.calls.outcome import (
    describe_call,
    described_by_arguments,
    is_described_by_arguments,
)
from telegrad.rpc.connections.network import Send
from telegrad.rpc.group import current
from telegrad.rpc.seams import NO_CONTEXT
from telegrad.transport.base import ConnectionClosed, TransportTimeout
from telegrad.wire.codec import Packet
from telegrad.wire.frames import Flags, Frame, Kind

__all__ = [
    "ArgumentFailed",
    "PlainEngine",
    "Residents",
    "Stays",
    "Submitted",
    "as_served",
    "engine_here",
    "export_leaves",
    "is_packing_arguments",
    "record_call",
    "refuse_context",
]

_COUNTS = struct.Struct("<HH")  # calls below, calls whose Received nodes have died
_ABOUT = struct.Struct("<4q")  # the pass: where it began, and its number; the call; the modes
_NO_TIMEOUT = 0.0
_CREATES_GRAPH = Modes(False, True, False).as_bits()
_current_task: Callable[[], int] = torch._C._current_graph_task_id


@dataclass
class Residents:
    """Tensors that are at the callee already, and are inputs of a call all the same.

    Attributes:
        tensors: their stand-ins at the caller, all of which require grad.
        revive: makes their gradients of what `export_leaves` has sent back, in the same order.
    """

    tensors: Sequence[Tensor]
    revive: Callable[[Any], Sequence[Tensor | None]]


@dataclass
class Stays:
    """What a submitted function may return: its result, and what its caller is told at once."""

    result: Any
    news: Any


class Submitted(NamedTuple):
    """A call whose result stays on its worker.

    Attributes:
        token: of its graph; None without gradients.
        done: tells its end.
        note: the result lives as long.
    """

    call: int
    token: Tensor | None
    done: Future[Any]
    note: Note


class _Serving:
    """A recorded call that is being served."""

    def __init__(self) -> None:
        self.exported: tuple[Sequence[Tensor], Export] | None = None


class ArgumentFailed(TelegradError):
    """A future among the arguments of a call has no value: what its function has raised is raised
    by the call. (What unpacking raises otherwise is taken for a fault of the message.)"""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


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


_serving: contextvars.ContextVar[_Serving | None] = contextvars.ContextVar("serving", default=None)


class Record:
    """The caller's end of a call; its two nodes lead here."""

    def __init__(
        self, engine: PlainEngine, to: int, call: int, tensors: Sequence[Tensor], *, stays: bool
    ) -> None:
        self._engine = engine
        self.to = to
        self.call = call
        self.stays = stays
        self.is_token = [t.numel() == 0 and t.dim() == 1 for t in tensors]
        self.residents: Residents | None = None
        self.below: Sequence[int] = ()
        self.unknown: Sequence[int] = ()

    def post(self, gradients: Sequence[Tensor | None]) -> None:
        """Sends the gradients of the results."""
        engine = self._engine
        if self.unknown:
            makers = ", ".join(sorted({repr(engine.name_of(worker_of(c))) for c in self.unknown}))
            raise BackwardError(
                f"what worker {engine.name_of(self.to)!r} has returned depends on a tensor that it "
                f"kept from a call by worker {makers}, to which the gradient has no way from here. "
                "Detach the kept tensor, pass it as an argument, make both calls from one worker, "
                "or use an autograd context"
            )
        run = engine.current_run()
        one, modes = run.one, run.modes()
        about = (*one.name, self.call, modes.as_bits())
        if modes.create_graph:
            args = (*about, *gradients)
            wait = engine.call_async(
                self.to,
                _deliver,
                args,
                timeout=_NO_TIMEOUT,
                residents=self.residents,
                keep_token=one.tokens,
            )
        else:
            wait = engine.begin_to_deliver(self.to, about, gradients)
        got: list[Report] = []

        def wait_once() -> Report:
            if not got:
                got.append(_report(wait()))
                one.later.update(got[0].later)
            return got[0]

        for call in self.below:
            one.posts.setdefault(call, []).append((self, wait_once))
        run.waits.append(wait_once)

    def collect(self) -> Sequence[Tensor | None]:
        """Waits for the gradients of the arguments."""
        engine = self._engine
        run = engine.current_run()
        one, modes = run.one, run.modes()
        must_ask = self.stays
        found: Sequence[Tensor | None] | None = None
        exported: Any = None
        for post, wait in one.posts.pop(self.call, ()):
            report = wait()
            if not report.is_run and post.to != self.to:
                self._ask(one, post.to, modes)  # it must run up to where it delivers to `to`
            if report.is_run and post is self:
                found, exported = report.found, report.exported
            else:
                must_ask = True
        if must_ask:
            report = self._ask(one, self.to, modes)
            found = report.found if report.found is not None else found
            exported = report.exported if report.exported is not None else exported
        if found is None:
            found = [None] * len(self.is_token)
        # A token's gradient is empty, but it has to be there: what it leads to must run.
        gradients = [
            EMPTY if is_token else gradient
            for gradient, is_token in zip(found, self.is_token, strict=True)
        ]
        if self.residents is not None:
            gradients += self._revived(exported, one, modes)
        return gradients

    def _ask(self, one: Pass, worker: int, modes: Modes) -> Report:
        engine = self._engine
        args = (*one.name, self.call, modes.as_bits())
        if modes.create_graph:
            residents = self.residents if worker == self.to else None
            answer = engine.call_async(
                worker,
                _ask,
                args,
                timeout=_NO_TIMEOUT,
                residents=residents,
                keep_token=one.tokens,
            )()
        else:
            answer = engine.agent.call(worker, _ask, args, timeout=_NO_TIMEOUT)
        report = _report(answer)
        one.later.update(report.later)
        return report

    def _revived(self, exported: Any, one: Pass, modes: Modes) -> list[Tensor | None]:
        residents = self.residents
        assert residents is not None
        if exported is None:
            return [None] * len(residents.tensors)
        gradients = list(residents.revive(exported))
        if modes.create_graph:
            # The error hangs on whatever they depend on: torch.autograd.grad runs no node that
            # does not lead to its inputs, and would leave out what it cannot reach.
            own = self._engine.lifetimes.tokens.get(self.call)
            tokens = one.tokens if own is None else [*one.tokens, own]
            refuse = torch._C._functions.DelayedError(_NO_SECOND_ORDER, 1 + len(tokens))
            gradients = [
                None if g is None else refuse(g.requires_grad_(), *tokens)[0] for g in gradients
            ]
        return gradients


_NO_SECOND_ORDER = (
    "second derivatives with respect to parameters of a remote module are not supported here: "
    "compute the gradient, and what depends on it, in a method of the module's class"
)


class PlainEngine:
    """Plain autograd on one worker."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.worker_id = agent.worker_id
        self._calls = WorkerCounter(agent.worker_id, first_of_life(agent.directory.life))
        self.entries = Entries()
        self._own_runs: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
        self.passes = Passes(self.worker_id, self.entries, self._own_pass)
        self.lifetimes = Lifetimes(agent, self.entries, self.passes, self._own_runs.__contains__)
        self.flush = self.lifetimes.flush
        self._loop = EventLoop()
        agent.service.handle_frame(Kind.PLAIN_CALL, self._serve, call_offset=0)
        agent.reply_head = _reply_head
        agent.handle(Kind.PLAIN_GRADIENTS, self._delivered)
        agent.watch_losses(self._worker_lost)

    def name_of(self, worker: int) -> str:
        return self.agent.name_of(worker)

    def new_call(self) -> int:
        """An id for what other workers keep for this one."""
        return self._calls.next()

    # -- passes

    def _own_pass(self, task: int) -> Pass | None:
        run = self._own_runs.get(task)
        return None if run is None else run.one

    def current_run(self) -> Run:
        """The run that the engine is in on this thread. One that nobody asked this worker for is
        its own: torch calls back at its end, and drops the callback, and with it the pass, if it
        fails.

        Raises:
            NotInitialized: the group is closed.
            BackwardError: the pass goes through a call that this worker serves.
        """
        if self.is_closed:
            raise NotInitialized(
                "backward() goes through calls of a group that has been closed, and what its "
                "workers had kept for the backward pass is gone: call backward() before the group "
                "is closed, inside of `with telegrad.workers(...)`"
            )
        served = current_served_run()
        if served is not None:
            return served
        task = _current_task()
        run = self._own_runs.get(task)
        if run is None:
            if len(self.entries) and self.entries.runs_through(will_run):
                raise BackwardError(
                    "a function that another worker called here has used a tensor of the graph "
                    "that backward() goes through: pass the tensor as an argument, or detach it"
                )
            run = self._own_runs[task] = Run(Pass((self.worker_id, task)))
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._finish_own, run))
        return run

    def begin_to_deliver(
        self, to: int, about: tuple[int, int, int, int], gradients: Sequence[Tensor | None]
    ) -> Callable[[], Report | Packet]:
        """Sends gradients of what a call has returned; what it returns waits for the answer."""
        head = _ABOUT.pack(*about) + bytes(gradient is not None for gradient in gradients)
        present = [gradient for gradient in gradients if gradient is not None]
        wait = self.agent.begin_request(to, Kind.PLAIN_GRADIENTS, Packet(head, present))
        return wait or self.agent.begin_call(to, _deliver, (*about, *gradients))

    @staticmethod
    def _delivered(_source: int, packet: Packet) -> Report | Packet:
        head = bytes(packet.head)
        present = iter(packet.tensors)
        is_there = head[_ABOUT.size :]
        if sum(is_there) != len(packet.tensors):
            raise ProtocolError("damaged gradients: their number is not what the message says")
        gradients = [next(present) if each else None for each in is_there]
        return _deliver(*_ABOUT.unpack_from(head), *gradients)

    def _finish_own(self, run: Run) -> None:
        own = run.one
        run.wait_all()
        while own.later:
            worker = own.later.pop()
            if worker == self.worker_id:
                more = self.passes.finish(own.name)
            else:
                more = self.agent.call(worker, _finish, own.name, timeout=_NO_TIMEOUT)
            own.later.update(more)

    # -- the caller

    def refuse_in_event_loop(self, caller: str) -> None:
        """
        Raises:
            TelegradError: this is the thread of the event loop. Waiting here would stop every
                coroutine of this worker, and forever if what is waited for needs one of them.
        """
        if self._loop.is_here():
            raise TelegradError(
                f"{caller} would block the event loop of worker {self.agent.info.name!r}, on which "
                "its async functions run: use `await telegrad.submit(...)` there"
            )

    @property
    def is_closed(self) -> bool:
        return self.lifetimes.is_closed

    def call(
        self,
        to: int,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        residents: Residents | None = None,
    ) -> Any:
        if to == self.worker_id:
            return self.call_async(to, func, args, kwargs, timeout=timeout, residents=residents)()
        sent = self._pack(to, func, args, kwargs, residents, stays=False)
        agent = self.agent
        agent.service.thread.has_called = True
        try:
            frame = agent.network.members.peer(to).exchange(
                Kind.PLAIN_CALL,
                0,
                sent.record.call,
                (sent.head, sent.encoded.payload),
                sent.encoded.buffers,
                (agent.rpc_timeout if timeout is None else timeout) or None,
                sent.what,
                sent.flags,
                sent.encoded.references,
            )
        except BaseException as error:
            self.lifetimes.drop_tokens([sent.record.call])
            if isinstance(error, TelegradError):
                agent.take_back_after(sent.encoded, error)
            else:  # Ctrl-C: the function may run there all the same
                self.lifetimes.give_up(sent.record.call, to)
            raise
        try:
            if frame.kind is Kind.REPLY:
                self.lifetimes.drop_tokens(_parts(frame)[1])
            return sent.result(frame)
        except KeyboardInterrupt:  # it may not have been unpacked
            agent.network.members.peer(to).leave_unread(frame.call_id)
            raise

    def call_async(
        self,
        to: int,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        residents: Residents | None = None,
        keep_token: list[Tensor] | None = None,
    ) -> Callable[[], Any]:
        """The same, without waiting: what it returns waits. Call that once."""
        sent = self._pack(to, func, args, kwargs, residents, stays=False)
        if keep_token is not None and sent.token is not None:
            keep_token.append(sent.token)
        future = self._dispatch(sent, timeout)
        return lambda: sent.result(future.wait())

    def submit(
        self,
        to: int,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        residents: Residents | None = None,
        on_news: Callable[[Any], None] | None = None,
    ) -> Submitted:
        """A call whose result stays there.

        Args:
            on_news: takes the `news` if the function returns `Stays`, before the future's own
                callbacks run.
        """
        sent = self._pack(to, func, args, kwargs, residents, stays=True)
        # A release may travel faster than the call, and what it does not find it cannot release:
        # the call itself needs its result until it is over.
        note = self.lifetimes.keep_result(sent.record.call, to)
        needed = [note]
        future = self._dispatch(sent, None, on_news, is_of_program=True)

        def finish(_: Any) -> None:
            sent.covered.clear()
            needed.clear()

        future.add_done_callback(finish)
        return Submitted(sent.record.call, sent.token, future, note)

    def value(self, call: int) -> Value:
        """What a call that was submitted to this worker returns; it may come later."""
        if type(call) is not int:
            raise ProtocolError(f"damaged message: the number of a call is {call!r}")
        self.lifetimes.watch()
        return self.lifetimes.values.setdefault(call, Value())

    def _dispatch(
        self,
        sent: _Sent,
        timeout: float | None,
        on_news: Callable[[Any], None] | None = None,
        *,
        is_of_program: bool = False,
    ) -> Future[Any]:
        call = _PlainCall(self, sent.record.to, sent.what, on_news)
        call.is_of_program = is_of_program  # which should hear of a failure
        self.agent.take_back_if_unread(call, sent.encoded)
        self.agent.dispatch(
            call,
            Kind.PLAIN_CALL,
            int(sent.record.stays),
            sent.record.call,
            (sent.head, sent.encoded.payload),
            sent.encoded.buffers,
            timeout,
        )
        return call.future

    def _pack(
        self,
        to: int,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        residents: Residents | None,
        *,
        stays: bool,
    ) -> _Sent:
        agent = self.agent
        refuse_context(agent)
        refuse_transforms()
        self.lifetimes.tell_of_dead(to)
        self.lifetimes.watch()
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
            return self._record_packed(to, what, head, encoded, residents, covered, stays=stays)
        except BaseException:
            if encoded.references is not None:
                encoded.references.abandon()
            raise

    def _record_packed(
        self,
        to: int,
        what: Callable[[], str],
        head: bytes,
        encoded: Any,
        residents: Residents | None,
        covered: dict[int, Any] | None,
        *,
        stays: bool,
    ) -> _Sent:
        record = Record(self, to, self._calls.next(), encoded.tensors, stays=stays)
        token: Tensor | None = None
        flags = self.agent.service.thread.depth
        if torch.is_grad_enabled():
            inputs = encoded.tensors
            if residents is not None and residents.tensors:
                record.residents = residents
                inputs = [*inputs, *residents.tensors]
            token = apply_collect(record, inputs)
            if encoded.tensors:
                self.lifetimes.keep_token(record.call, to, token)
        else:
            flags |= Flags.NO_GRAD
        return _Sent(self, record, token, head, encoded, flags, what, covered or {})

    # -- the callee

    def _serve(self, source: int, frame: Frame, send: Send) -> None:
        lifetimes = self.lifetimes
        lifetimes.begin_to_serve(frame.message_id)
        try:
            self._serve_call(source, frame, send)
        finally:
            lifetimes.end_to_serve(frame.message_id)

    def _serve_call(self, source: int, frame: Frame, send: Send) -> None:
        call, stays = frame.message_id, bool(frame.context_id)
        self.lifetimes.watch()
        has_gradients_on = not frame.flags & Flags.NO_GRAD
        service, serving = self.agent.service, _Serving()
        value = self.lifetimes.values.setdefault(call, Value()) if stays else None

        def attach(tensors: list[Tensor]) -> Sequence[Tensor]:
            note = self.lifetimes.keep_arguments(call, source)
            return apply_received(call, note, tensors)

        outer = _serving.set(serving)
        try:
            with torch.set_grad_enabled(has_gradients_on):
                func, args, kwargs = service.unpack_call(source, frame, 0, attach)
                frame.buffers = []
                result = func(*args, **kwargs)
                if inspect.iscoroutine(result):
                    result = self._loop.run(result, has_gradients_on=has_gradients_on)
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
            torch._C._set_grad_enabled(True)
        if value is not None:
            news: Any = None
            if isinstance(result, Stays):
                result, news = result.result, result.news
            tensors = _tensors_in(result) if has_gradients_on else []
            if tensors:
                self.entries.add(call, tensors, serving.exported)
            value.set(result)  # last: whoever gets it may send gradients for it at once
            encoded = self.agent.codec.encode(news, source)
            self._answer(frame, source, send, encoded, [call] if has_gradients_on else [])
            return
        with torch.set_grad_enabled(has_gradients_on):
            encoded = self.agent.codec.encode(result, source, root="result")
        below: list[int] = []
        if encoded.tensors:
            below = self.entries.add(call, encoded.tensors, serving.exported).below
        self._answer(frame, source, send, encoded, below)

    def _answer(
        self, frame: Frame, source: int, send: Send, encoded: Any, below: Sequence[int]
    ) -> None:
        dead = self.lifetimes.dead_arguments(source)
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
            self.entries.drop([frame.message_id])
            if encoded.references is not None:
                encoded.references.abandon()
        else:
            if encoded.references is not None:
                self.agent.service.sent_references(source, frame, encoded.references)

    # -- letting go

    def _worker_lost(self, worker: int, reason: str) -> None:
        self.lifetimes.worker_lost(worker, self.name_of(worker), reason)

    def counts(self) -> dict[str, int]:
        """What is left here of calls and passes, for tests and for whoever looks for a leak."""
        return {
            "entries": len(self.entries),
            "passes": len(self.passes),
            "values": len(self.lifetimes.values),
            "tokens": len(self.lifetimes.tokens),
        }

    def close(self) -> None:
        self.lifetimes.close(self.agent.info.name)
        self._loop.close()

    def needs_close(self) -> bool:
        return False


@dataclass(eq=False)
class _Sent:
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
            below, _, payload = _parts(frame)
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
            elif _serving.get() is not None:
                tokens.append(apply_stub(call))
            else:
                unknown.append(call)
        record.below, record.unknown = below, unknown
        # Not in the record, to which the token leads as well: that lives as long as the entry.
        note = engine.lifetimes.keep_result(record.call, record.to)
        return apply_post(record, note, tensors, tokens)


def _parts(frame: Frame) -> tuple[Sequence[int], Sequence[int], memoryview]:
    """Of a reply: the calls below, those whose sinks have died, and the payload."""
    below, dead = _COUNTS.unpack_from(frame.body)
    numbers = struct.unpack_from(f"<{below + dead}q", frame.body, _COUNTS.size)
    return (
        numbers[:below],
        numbers[below:],
        memoryview(frame.body)[_COUNTS.size + 8 * len(numbers) :],
    )


def _reply_head(frame: Frame) -> int:
    """Of any reply: those of plain calls carry the call's number, and no context."""
    is_plain = frame.context_id == NO_CONTEXT and frame.message_id >= 0
    if frame.kind is not Kind.REPLY or not is_plain:
        return 0
    below, dead = _COUNTS.unpack_from(frame.body)
    return _COUNTS.size + 8 * int(below + dead)


class _PlainCall(AsyncCall):
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
            _, dead, payload = _parts(frame)
            self._engine.lifetimes.drop_tokens(dead)
            if self._on_news is not None:
                self._on_news(self._engine.agent.codec.decode(payload, frame.buffers))
            self._settle(self.future.set_result, frame)
        else:
            super().succeed(frame)


def _tensors_in(value: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


@contextlib.contextmanager
def as_served() -> Iterator[None]:
    """Inside, this thread serves a call, though no message has asked for it."""
    outer = _serving.set(_Serving())
    try:
        yield
    finally:
        _serving.reset(outer)


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


# -- what workers run for each other


def _deliver(
    origin: int, task: int, call: int, modes: int, *gradients: Tensor | None
) -> Report | Packet:
    _export_again(call)
    report = engine_here().passes.deliver((origin, task), call, Modes.from_bits(modes), gradients)
    found, later, is_run, exported = report
    if found is None or not is_run or later or exported is not None or modes & _CREATES_GRAPH:
        return report
    present = [gradient for gradient in found if gradient is not None]
    return Packet(bytes(gradient is not None for gradient in found), present)  # needs no pickle


def _ask(origin: int, task: int, call: int, modes: int) -> Report:
    _export_again(call)
    return engine_here().passes.ask((origin, task), call, Modes.from_bits(modes))


def _export_again(call: int) -> None:
    """If gradients are recorded themselves, those of a second pass go the way of the first."""
    entry = engine_here().entries.get(call)
    if entry is not None and entry.exported is not None:
        export_leaves(*entry.exported)


def _report(answer: Report | Packet) -> Report:
    if not isinstance(answer, Packet):
        return answer
    present = iter(answer.tensors)
    return Report([next(present) if is_there else None for is_there in answer.head], [], True)


def _finish(origin: int, task: int) -> list[int]:
    return engine_here().passes.finish((origin, task))


_PASS = "a backward pass"
for _function in (_deliver, _ask, _finish):
    described_by_arguments(_function, lambda _: _PASS)


# -- doors

_EXTENSION = "plain"


def engine_here() -> PlainEngine:
    """The engine of the worker that this thread acts for.

    Raises:
        NotInitialized
    """
    engine: PlainEngine = current.current().extensions[_EXTENSION]  # type: ignore[assignment]
    return engine


def record_call(
    to: int,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    timeout: float | None = None,
    residents: Residents | None = None,
) -> Any:
    """Runs `func` on worker `to`, so that `loss.backward()` goes through it.

    Args:
        timeout: in seconds; None for that of the group, and 0 for none: the loss of the worker
            ends the wait in any case.
        residents: tensors that are there and get gradients by this call.
    """
    return engine_here().call(to, func, args, kwargs, timeout=timeout, residents=residents)


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
