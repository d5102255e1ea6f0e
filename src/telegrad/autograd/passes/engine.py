"""The runtime of backward passes on one worker: it carries out what the pass protocol says.

Whoever brings something for a pass leaves it in the context's queue; if no wave of that context
runs, the same thread runs it and sends what comes out, and goes on until the queue is empty. So
there is no thread hop between a message and its wave, no thread is parked while others work, and a
deep chain of calls uses one thread at a time. Waves of different contexts run side by side.

`backward` runs the first wave itself and then waits. The last message of a wave that runs on its
thread is a conversation: what the other worker sends back comes right there, and no other thread
has to be woken for it. Its wait ends when the pass is complete, when
a wave failed anywhere, when a worker of the context is lost, or when the context is released. While
a profiler watches its thread it also runs the later waves of this worker there, where the profiler
sees them.

How a pass ends well is told in `completion`, how it fails in `failures`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch._C._autograd import _profiler_enabled

from telegrad.autograd.contexts.context import DistAutogradContext, Gradients
from telegrad.autograd.contexts.registry import ContextRegistry
from telegrad.autograd.local.waves import Outgoing
from telegrad.autograd.passes.completion import Completion
from telegrad.autograd.passes.failures import Failure, PassFailures
from telegrad.autograd.passes.live_pass import (
    Arrival,
    LivePass,
    check_roots,
)
from telegrad.autograd.passes.messages import GradientMessage
from telegrad.autograd.passes.protocol import (
    Credit,
    PassControl,
    Standing,
)
from telegrad.drop_in import torch_phrase
from telegrad.errors import BackwardError, TelegradError, WorkerLost
from telegrad.ids import WorkerCounter, worker_of
from telegrad.rpc.connections.conversation import Interruption
from telegrad.rpc.seams import Messenger
from telegrad.threads import heed_num_threads
from telegrad.wire.codec import Packet
from telegrad.wire.frames import Kind

__all__ = ["AutogradEngine"]


_Parcel: TypeAlias = tuple[int, Packet]
"""A gradient message, ready to be sent, and to whom."""


class AutogradEngine(ContextRegistry):
    """Distributed autograd on one worker; also the `Recorder` of its agent.

    Args:
        messenger: the agent, before it starts: handlers are registered here. None for a worker
            without one, on which contexts and passes are local.
        worker_id: this worker's id, if there is no agent to ask.
        first_id: where the ids that are made here begin. A worker that may have had a predecessor
            under its id must not use those of its predecessor again.
    """

    def __init__(
        self, messenger: Messenger | None, worker_id: int | None = None, *, first_id: int = 0
    ) -> None:
        if messenger is not None:
            worker_id = messenger.worker_id
        if worker_id is None:
            raise ValueError("an engine without an agent needs a worker id")
        self._failures = PassFailures(worker_id, messenger, self, first_id)
        super().__init__(worker_id, messenger, self._failures.context_freed, first_id)
        self.worker_id = worker_id
        self._pass_ids = WorkerCounter(worker_id, first_id)
        self._completion = Completion(
            worker_id, messenger, self, self._failures, self._live_pass, self._bring
        )
        self._handlers: dict[Kind, Callable[[int, Any], Any]] = {
            Kind.GRADIENTS: self._gradients_arrived,
            Kind.PASS_ANSWER: self._completion.credit_returned,
            Kind.PASS_GATHER: self._completion.reachability_asked,
            Kind.PASS_REACHABILITY: self._completion.reachability_told,
            Kind.PASS_STRIKE: self._completion.struck_off,
            Kind.PASS_END: self._completion.pass_ended,
            Kind.PASS_ABORT: self._failures.told,
        }
        if messenger is not None:
            for kind, handler in self._handlers.items():
                rescue = self._gradients_unreadable if kind is Kind.GRADIENTS else None
                messenger.handle(kind, handler, rescue)
            messenger.watch_losses(self._failures.worker_lost)

    # What users ask

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
                f"backward of context {context_id} was called inside of a backward pass of the "
                "same context, by a hook: call it when that one is over, or in a context of its own"
            )
        context.note_roots(roots)
        live = LivePass(
            self._pass_ids.next(),
            context,
            self.worker_id,
            retain_graph=retain_graph or create_graph,
            create_graph=create_graph,
            control=PassControl(),
        )
        if _profiler_enabled():
            live.is_driven_by_caller = True
            with torch.profiler.record_function("torch::distributed::autograd::backward"):
                self._run_to_the_end(live, roots)
        else:
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

    def _run_to_the_end(self, live: LivePass, roots: Sequence[torch.Tensor]) -> None:
        context = live.context
        with context.lock:
            if context.is_released:
                self.retrieve(context.id)
            context.passes[live.id] = live
        live.caller_thread = threading.get_ident()
        if self._messenger is not None:
            live.interruption = Interruption()
        try:
            self._bring(context, Arrival(live, 1, {}, roots))
            while not live.is_over:
                context.wait_until(
                    lambda: live.is_over or (live.is_driven_by_caller and context.work)
                )
                if not live.is_over:
                    self._run_what_is_left(context)
        finally:
            if not live.is_over:  # interrupted
                self._failures.fail(
                    live, Failure("raised", self.worker_id, "backward was interrupted")
                )
            self._stop_running(context)
            if live.interruption is not None:
                live.interruption.close()
        if live.error is not None:
            # The traceback of what is raised leads to this frame. If that led back to the error,
            # all variables of the caller would stay until a garbage collection.
            error, live.error = live.error, None
            try:
                raise error
            finally:
                del error

    # Waves

    def _bring(self, context: DistAutogradContext, arrival: Arrival) -> None:
        """Hands something to its pass: runs it, or leaves it to the thread that runs already."""
        with context.lock:
            is_for_caller = arrival.into.is_driven_by_caller and not arrival.roots
            if context.runner is not None or is_for_caller:
                context.work.append(arrival)
                context.notify()
                return
            context.batch = [arrival]
            context.runner = threading.get_ident()
        self._run(context)

    def _run_what_is_left(self, context: DistAutogradContext) -> None:
        heed_num_threads()
        with context.lock:
            if context.runner is not None or not context.work:
                return
            _take_batch(context)
            context.runner = threading.get_ident()
        self._run(context)

    def _run(self, context: DistAutogradContext) -> None:
        """Runs the context's batch, and then what others have left meanwhile. This thread is the
        context's runner."""
        while True:
            batch = context.batch
            into = batch[0].into
            try:
                last = self._advance(into, batch)
            except BaseException as error:  # Ctrl-C, say: it may be another thread's pass
                self._failures.fail(into, Failure.raised(self.worker_id, error))
                self._stop_running(context)
                raise
            if last is not None:
                with context.lock:  # others may go on while this thread waits
                    context.runner = None
                    context.batch = ()
                came = self._converse(into, last)
                with context.lock:
                    if len(came) == 1 and not context.work and context.runner is None:
                        context.batch = came  # as it mostly is
                    else:
                        if came:
                            context.work.extend(came)
                            context.notify()
                        if context.runner is not None or not context.work:
                            return
                        _take_batch(context)
                    context.runner = threading.get_ident()
            else:
                if self._messenger is not None:
                    # What comes next is not for the worker that may be waiting for this one.
                    self._messenger.end_conversation()
                with context.lock:
                    if not context.work:
                        context.runner = None
                        context.batch = ()
                        return
                    _take_batch(context)

    def _stop_running(self, context: DistAutogradContext) -> None:
        """After Ctrl-C: this thread, if it is the context's runner, leaves the rest to another. A
        batch that it has not run fails its pass."""
        if context.runner != threading.get_ident():
            return
        with context.lock:
            batch, context.batch = context.batch, ()
            context.runner = None
            is_left = bool(context.work)
        self._failures.fail(
            batch[0].into,
            Failure("raised", self.worker_id, "the thread that ran it was interrupted"),
        )
        if is_left:
            threading.Thread(target=self._run_what_is_left, args=(context,), daemon=True).start()

    def _advance(self, live: LivePass, batch: Sequence[Arrival]) -> _Parcel | None:
        """One wave over what has come, and what it sends; all but a message that is returned, for
        a conversation."""
        context = live.context
        if live.id in context.ended or context.is_released:
            return None
        try:
            if live.create_graph:
                with torch.enable_grad():
                    outgoing = self._wave(live, batch)
            elif live.is_driven_by_caller and not batch[0].roots:
                with torch.profiler.record_function(
                    "torch::distributed::autograd::SendRpcBackward"
                ):
                    outgoing = self._wave(live, batch)
            else:
                outgoing = self._wave(live, batch)
        except Exception as error:  # noqa: BLE001  whatever user code raised ends the pass
            is_first = live.control is not None and bool(batch[0].roots)
            self._failures.fail(
                live, Failure.raised(self.worker_id, error), original=error if is_first else None
            )
            return None
        standing = live.local.standing
        if live.control is None and standing is Standing.CLOSED:
            with context.lock:
                context.passes.pop(live.id, None)
        packed: list[_Parcel] = []
        if len(outgoing) < 2:
            credit, reports = live.share.give_up(standing)
            if not outgoing:
                self._completion.return_credit(live, credit, reports)
                return None
            last = self._pack(live, outgoing[0], credit, reports)
        else:
            parcels = live.share.split(len(outgoing), standing)
            for (credit, reports), message in zip(parcels, outgoing, strict=True):
                packed.append(self._pack(live, message, credit, reports))
            last = packed.pop()
        for parcel in packed:
            if not self._send(live, parcel):
                return None
        if live.caller_thread == threading.get_ident() and last[0] != self.worker_id:
            return last
        self._send(live, last)
        return None

    def _wave(self, live: LivePass, batch: Sequence[Arrival]) -> list[Outgoing]:
        """Takes in what has come and runs all that can run now; returns what is to be sent."""
        local, share = live.local, live.share
        for arrival in batch:
            share.take(arrival.credit, arrival.reports)
            if arrival.gradients is not None:
                local.arrive(arrival.message_id, arrival.gradients)
            elif arrival.roots:
                local.enter_roots(arrival.roots)
            elif arrival.live is not None:
                local.strike_off_all_but(arrival.live)
        outgoing, found = local.run()
        for received, _ in outgoing:
            if received.message_id not in live.context.recvs:
                raise BackwardError(
                    f"the pass of context {live.context.id} came to a tensor that was received in "
                    "another context: gradients go back only in the context that it came in"
                )
        if found:
            live.context.add_gradients(found, create_graph=live.create_graph)
        return outgoing

    def _pack(self, live: LivePass, outgoing: Outgoing, credit: Credit, reports: Any) -> _Parcel:
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
        """False if it could not be sent, which ends the pass."""
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
        """Sends a message and returns what it brings back for this context.

        The wait ends when the other worker's wave has, when that worker is lost, or when the pass
        is over for another reason: `LivePass.finish` interrupts it then.
        """
        assert self._messenger is not None
        assert live.interruption is not None
        to, packet = parcel
        try:
            came = self._messenger.converse(
                to, Kind.GRADIENTS, packet, live.interruption, live.local.foresee
            )
        except TelegradError as error:
            self._fail_to_send(live, to, error)
            return []
        arrivals: list[Arrival] = []
        for kind, body in came:
            if kind is Kind.GRADIENTS:
                arrival = self._arrival(to, body)
                if arrival is None:
                    continue
                if arrival.into.context is live.context:
                    arrivals.append(arrival)
                else:
                    self._bring(arrival.into.context, arrival)
            else:
                self._handlers[kind](to, body)
        return arrivals

    def _fail_to_send(self, live: LivePass, to: int, error: TelegradError) -> None:
        worker = to if isinstance(error, WorkerLost) else self.worker_id
        self._failures.fail(live, Failure.raised(worker, error))

    def _gradients_arrived(self, source: int, packet: Packet) -> None:
        arrival = self._arrival(source, packet)
        if arrival is not None:
            self._bring(arrival.into.context, arrival)

    def _gradients_unreadable(
        self, source: int, payload: bytes | memoryview, error: Exception
    ) -> None:
        context_id, pass_id = GradientMessage.pass_of(payload)
        failure = Failure.raised(self.worker_id, error)
        live = self._live_pass(context_id, pass_id, False, False)
        if live is not None:
            self._failures.fail(live, failure)

    def _arrival(self, source: int, packet: Packet) -> Arrival | None:
        """What gradients bring to a pass; None if it is over here."""
        message = GradientMessage.unpack(packet)
        live = self._live_pass(
            message.context_id, message.pass_id, message.retain_graph, message.create_graph
        )
        if live is None:
            return None
        message_id, gradients = message.message_id, message.gradients
        if message_id not in live.local.sends:
            self._failures.fail(
                live,
                Failure("raised", self.worker_id, f"no message {message_id} was sent from here"),
            )
            return None
        if message.create_graph:
            gradient_message_id, recorded = message.history
            present = [_present(gradients[i]) for i in recorded]
            with_history = self.record_receive(
                message.context_id, gradient_message_id, source, present
            )
            for i, gradient in zip(recorded, with_history, strict=True):
                gradients[i] = gradient
        return Arrival(live, message.credit, message.reports, (), message_id, gradients)

    def _live_pass(
        self, context_id: int, pass_id: int, retain_graph: bool, create_graph: bool
    ) -> LivePass | None:
        """The pass as it lives here, made now if need be; None if it, or its context, is over."""
        context = self._contexts.get(context_id)
        if context is None:
            self._failures.tell(
                worker_of(pass_id),
                context_id,
                pass_id,
                Failure(
                    "released",
                    self.worker_id,
                    f"the autograd context {context_id} was released on worker {self.worker_id} "
                    "during the backward pass"
                    + torch_phrase(f"Could not find autograd context with id: {context_id}"),
                ),
            )
            return None
        with context.lock:
            if pass_id in context.ended or context.is_released:
                return None
            live = context.passes.get(pass_id)
            if live is None:
                live = context.passes[pass_id] = LivePass(
                    pass_id,
                    context,
                    self.worker_id,
                    retain_graph=retain_graph,
                    create_graph=create_graph,
                )
            return live


def _take_batch(context: DistAutogradContext) -> None:
    """Takes all that is left for the first pass in the queue. Call it with the lock held."""
    work = context.work
    into = work[0].into
    context.batch = [arrival for arrival in work if arrival.into is into]
    others = [arrival for arrival in work if arrival.into is not into]
    work.clear()
    work.extend(others)


def _present(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None  # chosen by the caller for being there
    return gradient
