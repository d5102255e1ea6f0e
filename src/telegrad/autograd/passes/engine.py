"""The runtime of backward passes on one worker: it runs the waves, and sends what leaves them.

What arrives for a pass goes into its context's queue. If no wave of that context runs, the same
thread runs it, sends what leaves it, and goes on until the queue is empty. So no other thread has
to be woken between a message and its wave, no thread waits while others work, and a deep chain of
calls uses one thread at a time. Waves of different contexts run side by side.

`backward` runs the first wave itself and then waits. The last message of a wave on its thread is a
conversation: the other worker's answer comes back on the same lane, to this thread. The wait ends
when the pass is complete, when a wave failed anywhere, when a worker of the context is lost, or
when the context is released. While a profiler watches its thread, the later waves of this worker
run there too, so that the profiler sees them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from telegrad.autograd.contexts.context import DistAutogradContext, Gradients
from telegrad.autograd.local.waves import Outgoing
from telegrad.autograd.passes.live_pass import Arrival, LivePass, OwnPass
from telegrad.autograd.passes.messages import Failure, GradientMessage
from telegrad.autograd.passes.protocol import Credit, Reports, Standing
from telegrad.autograd.passes.registry import PassRegistry
from telegrad.autograd.passes.roots import check_roots
from telegrad.errors import BackwardError, TelegradError, WorkerLost
from telegrad.ids import WorkerCounter
from telegrad.rpc.seams import Messenger
from telegrad.threads import heed_num_threads
from telegrad.wire.codec import Packet
from telegrad.wire.frames import Kind

__all__ = ["AutogradEngine"]

_NOTHING = contextlib.nullcontext()

_Parcel: TypeAlias = tuple[int, Packet]
"""A worker, and a gradient message for it."""


class AutogradEngine(PassRegistry):
    """Distributed autograd on one worker; also the `Recorder` of its agent.

    Args:
        messenger: the agent, before it starts: its handlers are registered here. None for a worker
            without one, on which contexts and passes are local.
        worker_id: this worker's id, if there is no agent to ask.
        first_id: the first of the ids made here. A worker must not reuse the ids of a predecessor
            with the same worker id.
    """

    def __init__(
        self, messenger: Messenger | None, worker_id: int | None = None, *, first_id: int = 0
    ) -> None:
        if messenger is not None:
            worker_id = messenger.worker_id
        if worker_id is None:
            raise ValueError("an engine without an agent needs a worker id")
        super().__init__(worker_id, messenger, first_id)
        self._pass_ids = WorkerCounter(worker_id, first_id)
        self._handlers: dict[Kind, Callable[[int, Any], Any]] = {
            Kind.GRADIENTS: self._gradients_arrived,
            Kind.PASS_ANSWER: self._credit_returned,
            Kind.PASS_GATHER: self._reachability_asked,
            Kind.PASS_REACHABILITY: self._reachability_told,
            Kind.PASS_STRIKE: self._struck_off,
            Kind.PASS_END: self._pass_ended,
            Kind.PASS_ABORT: self._failure_told,
        }
        if messenger is not None:
            for kind, handler in self._handlers.items():
                rescue = self._gradients_unreadable if kind is Kind.GRADIENTS else None
                messenger.handle(kind, handler, rescue)
            messenger.watch_losses(self._worker_lost)

    # For the public functions

    def backward(
        self,
        context_id: int,
        roots: Sequence[torch.Tensor],
        retain_graph: bool = False,
        *,
        create_graph: bool = False,
    ) -> None:
        """See `telegrad.autograd.backward`."""
        check_roots(context_id, roots)
        context = self.retrieve(context_id)
        if context.runner == threading.get_ident():
            raise BackwardError(
                f"backward of context {context_id} was called inside a backward pass of the "
                "same context, by a hook: call it when that pass is over, or in its own context"
            )
        context.note_roots(roots)
        live = OwnPass(
            self._pass_ids.next(),
            context,
            self.worker_id,
            retain_graph=retain_graph or create_graph,
            create_graph=create_graph,
        )
        with _profiled(live.is_driven_by_caller, "torch::distributed::autograd::backward"):
            self._run_to_the_end(live, roots)

    def get_gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """See `telegrad.autograd.get_gradients`."""
        return Gradients(self.retrieve(context_id).gradients)

    def debug_info(self) -> dict[str, int]:
        contexts = self.contexts
        return {
            "num_current_backward_passes": sum(len(context.passes) for context in contexts),
            "num_autograd_contexts": len(contexts),
        }

    def _run_to_the_end(self, live: OwnPass, roots: Sequence[torch.Tensor]) -> None:
        context = live.context
        with context.lock:
            if context.is_released:
                self.retrieve(context.id)
            context.passes[live.id] = live
        try:
            self._bring(Arrival(live, 1, {}, roots))
            while not live.is_over:
                context.wait_until(
                    lambda: live.is_over or (live.is_driven_by_caller and _next_pass(context))
                )
                self._run(context)
        except BaseException:  # such as Ctrl-C
            if not live.is_over:
                text = "backward was interrupted"
                self._fail(live, Failure("raised", self.worker_id, text))
            self._stop_running(context)
            raise
        finally:
            live.interruption.close()
        if live.error is not None:
            # The error's traceback refers to this frame. If the frame referred to the error, all
            # variables of the caller would stay alive until a garbage collection.
            error, live.error = live.error, None
            try:
                raise error
            finally:
                del error

    # Waves

    def _bring(self, arrival: Arrival) -> None:
        """Queues what has arrived, and runs it unless another thread will."""
        context = arrival.into.context
        with context.lock:
            context.work.append(arrival)
            if not _may_run_here(arrival.into):
                context.notify()
        self._run(context)

    def _run(self, context: DistAutogradContext) -> None:
        """Runs what is queued, unless another thread does or has to."""
        while context.work and self._take_batch(context):
            live = context.batch[0].into
            try:
                last = self._run_batch(live, context.batch)
            except BaseException as error:  # such as Ctrl-C, maybe during a pass of another thread
                self._fail(live, Failure.raised(self.worker_id, error))
                self._stop_running(context)
                raise
            self._release_batch(context)
            if last is not None:
                came = self._converse(live, last)  # meanwhile another thread may run
                with context.lock:
                    context.work.extend(came)
            elif self._messenger is not None:
                # What comes next is not for the worker that may be waiting for this one.
                self._messenger.end_conversation()

    def _take_batch(self, context: DistAutogradContext) -> bool:
        """Makes this thread the runner of what is queued for one pass; False if it may not be."""
        with context.lock:
            into = _next_pass(context)
            if into is None:
                return False
            work = context.work
            context.batch = [arrival for arrival in work if arrival.into is into]
            is_all = len(context.batch) == len(work)
            context.runner = threading.get_ident()
            context.work = deque(() if is_all else [a for a in work if a.into is not into])
        return True

    def _release_batch(self, context: DistAutogradContext) -> None:
        with context.lock:
            context.runner = None
            context.batch = ()
            if context.work:
                context.notify()

    def _stop_running(self, context: DistAutogradContext) -> None:
        """This thread was interrupted. If it was the runner, the pass of its batch fails. Another
        thread runs what is left."""
        if context.runner == threading.get_ident():
            text = "the thread that ran it was interrupted"
            self._fail(context.batch[0].into, Failure("raised", self.worker_id, text))
            self._release_batch(context)
        if context.work and context.runner is None:
            threading.Thread(target=self._run_rest, args=(context,), daemon=True).start()

    def _run_rest(self, context: DistAutogradContext) -> None:
        heed_num_threads()
        self._run(context)

    def _run_batch(self, live: LivePass, batch: Sequence[Arrival]) -> _Parcel | None:
        """Runs one wave over what has arrived, and sends what leaves it. Returns the last message
        instead, if it is for a conversation."""
        context = live.context
        if live.id in context.ended or context.is_released:
            return None
        is_first = isinstance(live, OwnPass) and bool(batch[0].roots)
        is_profiled = isinstance(live, OwnPass) and live.is_driven_by_caller and not is_first
        name = "torch::distributed::autograd::SendRpcBackward"
        try:
            if is_profiled or live.create_graph:
                with _profiled(is_profiled, name), torch.set_grad_enabled(live.create_graph):
                    outgoing = self._wave(live, batch)
            else:
                outgoing = self._wave(live, batch)
        except Exception as error:  # noqa: BLE001  an error of the program ends the pass
            failure = Failure.raised(self.worker_id, error)
            self._fail(live, failure, original=error if is_first else None)
            return None
        standing = live.standing
        if standing is Standing.CLOSED and not isinstance(live, OwnPass):
            with context.lock:
                context.passes.pop(live.id, None)
        if not outgoing:
            self._return_credit(live, *live.share.give_up(standing))
            return None
        if len(outgoing) == 1:
            loads = [live.share.give_up(standing)]
        else:
            loads = live.share.split(len(outgoing), standing)
        parcels = [
            self._pack(live, message, credit, reports)
            for message, (credit, reports) in zip(outgoing, loads, strict=True)
        ]
        last = None
        if (
            isinstance(live, OwnPass)
            and live.caller_thread == threading.get_ident()
            and parcels[-1][0] != self.worker_id
        ):
            last = parcels.pop()
        for parcel in parcels:
            if not self._send(live, parcel):
                return None
        return last

    def _wave(self, live: LivePass, batch: Sequence[Arrival]) -> list[Outgoing]:
        """Takes in what has arrived and runs all that can run; returns what leaves the worker."""
        for arrival in batch:
            live.share.take(arrival.credit, arrival.reports)
            if arrival.gradients is not None:
                live.arrive(arrival.message_id, arrival.gradients)
            elif arrival.roots:
                live.enter_roots(arrival.roots)
            elif arrival.live is not None:
                live.strike_off_all_but(arrival.live)
        outgoing, found = live.run()
        for received, _ in outgoing:
            if received.message_id not in live.context.recvs:
                raise BackwardError(
                    f"the pass of context {live.context.id} came to a tensor that was received in "
                    "another context: gradients go back only in the context that it came in"
                )
        if found:
            live.context.add_gradients(found, create_graph=live.create_graph)
        return outgoing

    # Messages

    def _pack(
        self, live: LivePass, outgoing: Outgoing, credit: Credit, reports: Reports
    ) -> _Parcel:
        received, gradients = outgoing
        to = received.source
        history: tuple[int, tuple[int, ...]] = (-1, ())
        if live.create_graph:
            recorded = {i: g for i, g in enumerate(gradients) if g is not None and g.requires_grad}
            history = (
                self.record_send(live.context.id, to, list(recorded.values())),
                tuple(recorded),
            )
        return to, GradientMessage(
            live.context.id,
            live.id,
            received.message_id,
            live.retain_graph,
            live.create_graph,
            credit,
            reports,
            gradients,
            history,
        ).pack()

    def _send(self, live: LivePass, parcel: _Parcel) -> bool:
        """Returns whether it could be sent; if not, the pass fails."""
        to, packet = parcel
        try:
            if to == self.worker_id:
                self._gradients_arrived(to, packet)
            else:
                assert self._messenger is not None  # else nothing came from others
                self._messenger.post(to, Kind.GRADIENTS, packet)
        except TelegradError as error:
            self._fail_to_send(live, to, error)
            return False
        return True

    def _converse(self, live: LivePass, parcel: _Parcel) -> list[Arrival]:
        """Sends a message and returns what comes back for this context.

        The wait ends with the other worker's wave, with the loss of that worker, or with the pass:
        `OwnPass.finish` interrupts it.
        """
        assert self._messenger is not None
        assert isinstance(live, OwnPass)
        to, packet = parcel
        try:
            came = self._messenger.converse(
                to, Kind.GRADIENTS, packet, live.interruption, live.foresee
            )
        except TelegradError as error:
            self._fail_to_send(live, to, error)
            return []
        arrivals: list[Arrival] = []
        for kind, body in came:
            if kind is not Kind.GRADIENTS:
                self._handlers[kind](to, body)
                continue
            arrival = self._arrival(to, body)
            if arrival is None:
                continue
            if arrival.into.context is live.context:
                arrivals.append(arrival)
            else:
                self._bring(arrival)
        return arrivals

    def _fail_to_send(self, live: LivePass, to: int, error: TelegradError) -> None:
        worker = to if isinstance(error, WorkerLost) else self.worker_id
        self._fail(live, Failure.raised(worker, error))

    def _gradients_arrived(self, source: int, packet: Packet) -> None:
        arrival = self._arrival(source, packet)
        if arrival is not None:
            self._bring(arrival)

    def _gradients_unreadable(
        self, source: int, payload: bytes | memoryview, error: Exception
    ) -> None:
        context_id, pass_id = GradientMessage.pass_of(payload)
        live = self._live_pass(context_id, pass_id, False, False)
        if live is not None:
            self._fail(live, Failure.raised(self.worker_id, error))

    def _arrival(self, source: int, packet: Packet) -> Arrival | None:
        """What gradients bring to a pass; None if it is over here."""
        message = GradientMessage.unpack(packet)
        live = self._live_pass(
            message.context_id, message.pass_id, message.retain_graph, message.create_graph
        )
        if live is None:
            return None
        message_id, gradients = message.message_id, message.gradients
        if message_id not in live.sends:
            text = f"no message {message_id} was sent from here"
            self._fail(live, Failure("raised", self.worker_id, text))
            return None
        if message.create_graph:
            recorded_id, recorded = message.history
            present = [gradient for i in recorded if (gradient := gradients[i]) is not None]
            with_history = self.record_receive(message.context_id, recorded_id, source, present)
            for i, gradient in zip(recorded, with_history, strict=True):
                gradients[i] = gradient
        return Arrival(live, message.credit, message.reports, (), message_id, gradients)


def _may_run_here(live: LivePass) -> bool:
    """Whether this thread may run the waves of a pass."""
    if isinstance(live, OwnPass) and live.is_driven_by_caller:
        return live.caller_thread == threading.get_ident()
    return True


def _next_pass(context: DistAutogradContext) -> LivePass | None:
    """The pass that this thread may run next, if any. Call it with the lock held."""
    if context.runner is None:
        for arrival in context.work:
            if _may_run_here(arrival.into):
                return arrival.into
    return None


def _profiled(is_on: bool, name: str) -> contextlib.AbstractContextManager[Any]:
    """Gives the block a name in the profile of this thread, if there is one."""
    return torch.profiler.record_function(name) if is_on else _NOTHING
