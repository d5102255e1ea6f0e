"""Plain autograd on one worker: its calls, and the passes that begin here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.futures import Future

from telegrad.autograd.plain.coroutines import EventLoop
from telegrad.autograd.plain.entries import Entries
from telegrad.autograd.plain.lifetimes import Lifetimes
from telegrad.autograd.plain.messages import delivered, engine_here, finish
from telegrad.autograd.plain.nodes import will_run
from telegrad.autograd.plain.notes import Note
from telegrad.autograd.plain.passes import Pass, Passes, Run, current_served_run
from telegrad.autograd.plain.record import NO_TIMEOUT, Residents
from telegrad.autograd.plain.sent_calls import PlainCall, SentCall, pack
from telegrad.autograd.plain.serving import reply_head, reply_parts, serve
from telegrad.autograd.plain.values import Value
from telegrad.autograd.torch_internals import current_task, queue_callback
from telegrad.errors import BackwardError, NotInitialized, ProtocolError, TelegradError
from telegrad.ids import WorkerCounter, first_of_life
from telegrad.rpc.calls.agent import Agent
from telegrad.wire.frames import Kind

__all__ = ["PlainEngine", "Submitted", "record_call"]


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
        self.loop = EventLoop()
        agent.service.handle_frame(Kind.PLAIN_CALL, partial(serve, self), call_offset=0)
        agent.reply_head = reply_head
        agent.handle(Kind.PLAIN_GRADIENTS, delivered)
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
        task = current_task()
        run = self._own_runs.get(task)
        if run is None:
            if len(self.entries) and self.entries.runs_through(will_run):
                raise BackwardError(
                    "a function that another worker called here has used a tensor of the graph "
                    "that backward() goes through: pass the tensor as an argument, or detach it"
                )
            run = self._own_runs[task] = Run(Pass((self.worker_id, task), self.entries.lock))
            queue_callback(partial(self._finish_own, run))
        return run

    def _finish_own(self, run: Run) -> None:
        own = run.one
        run.wait_all()
        while own.later:
            worker = own.later.pop()
            if worker == self.worker_id:
                more = self.passes.finish(own.name)
            else:
                more = self.agent.call(worker, finish, own.name, timeout=NO_TIMEOUT)
            own.later.update(more)

    # -- the caller

    def refuse_in_event_loop(self, caller: str) -> None:
        """
        Raises:
            TelegradError: this is the thread of the event loop. Waiting here would stop every
                coroutine of this worker, and forever if what is waited for needs one of them.
        """
        if self.loop.is_here():
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
        sent = pack(self, to, func, args, kwargs, residents, stays=False)
        agent = self.agent
        agent.service.thread.has_called = True
        try:
            frame = agent.network.members.peer(to).requests.exchange(
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
                self.lifetimes.drop_tokens(reply_parts(frame)[1])
            return sent.result(frame)
        except KeyboardInterrupt:  # it may not have been unpacked
            agent.network.members.peer(to).requests.leave_unread(frame.call_id)
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
        sent = pack(self, to, func, args, kwargs, residents, stays=False)
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
        sent = pack(self, to, func, args, kwargs, residents, stays=True)
        # A release may travel faster than the call, and what it does not find it cannot release:
        # the call itself needs its result until it is over.
        note = self.lifetimes.keep_result(
            sent.record.call, to, has_exports=sent.record.residents is not None
        )
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
        sent: SentCall,
        timeout: float | None,
        on_news: Callable[[Any], None] | None = None,
        *,
        is_of_program: bool = False,
    ) -> Future[Any]:
        call = PlainCall(self, sent.record.to, sent.what, on_news)
        call.is_of_program = is_of_program  # which should hear of a failure
        self.agent.take_back_if_unread(call, sent.encoded)
        self.agent.async_calls.send(
            call,
            Kind.PLAIN_CALL,
            int(sent.record.stays),
            sent.record.call,
            (sent.head, sent.encoded.payload),
            sent.encoded.buffers,
            timeout,
        )
        return call.future

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
        self.loop.close()

    def needs_close(self) -> bool:
        return False


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
