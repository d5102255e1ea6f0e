"""The passes that live on one worker: how each is found, how it ends well, and how it fails.

A pass ends well as `protocol` says: this module carries out the effects, at the worker that called
`backward` and at those that it asks.

A failed pass is announced to every worker of the context. Each drops the pass when it first learns
of the failure, refuses what still arrives for it, and tells the workers it knows. So the failure
reaches all of them, although no worker knows which others took part.

The loss of a worker concerns every pass of the contexts it knew, since credit may have been lost
with it, and only the initiator of a pass can end it. So a loss travels as an *incident* of the
context, from worker to worker in the same way, and each worker ends its own passes. Passes that
begin later are not concerned: they fail by themselves if they need the lost worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from telegrad.autograd.contexts.context import DistAutogradContext
from telegrad.autograd.contexts.registry import ContextRegistry
from telegrad.autograd.passes.live_pass import Arrival, LivePass, OwnPass
from telegrad.autograd.passes.messages import (
    Failure,
    pack_credit,
    pack_reports,
    unpack_credit,
    unpack_reports,
)
from telegrad.autograd.passes.protocol import (
    AskReachability,
    Complete,
    Credit,
    Effect,
    EndPass,
    Reports,
    StrikeOff,
)
from telegrad.drop_in import torch_phrase
from telegrad.errors import WorkerLost
from telegrad.ids import WorkerCounter, worker_of
from telegrad.rpc.seams import Messenger
from telegrad.wire.frames import Kind

__all__ = ["PassRegistry"]

_ANY_PASS = -1


class PassRegistry(ContextRegistry):
    """All contexts and passes that live on one worker.

    Args:
        messenger: None for a worker without an agent.
        first_id: the first of the ids made here.
    """

    def __init__(self, worker_id: int, messenger: Messenger | None, first_id: int = 0) -> None:
        super().__init__(worker_id, messenger, first_id)
        self.worker_id = worker_id
        self._incident_ids = WorkerCounter(worker_id, first_id)

    def _bring(self, arrival: Arrival) -> None:
        """Runs what has arrived for a pass."""
        raise NotImplementedError

    def _live_pass(
        self, context_id: int, pass_id: int, retain_graph: bool, create_graph: bool
    ) -> LivePass | None:
        """The pass on this worker, which begins here if it has not; None if it, or its context, is
        over."""
        context = self._contexts.get(context_id)
        if context is None:
            text = (
                f"the autograd context {context_id} was released on worker {self.worker_id} during "
                "the backward pass"
            )
            text += torch_phrase(f"Could not find autograd context with id: {context_id}")
            failure = Failure("released", self.worker_id, text)
            self._announce(worker_of(pass_id), context_id, pass_id, failure)
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

    def _own_pass(self, context_id: int, pass_id: int) -> OwnPass | None:
        context = self._contexts.get(context_id)
        live = None if context is None else context.passes.get(pass_id)
        return live if isinstance(live, OwnPass) else None

    # Passes that go well

    def _return_credit(self, live: LivePass, credit: Credit, reports: Reports) -> None:
        if isinstance(live, OwnPass):
            self._take_credit(live, credit, reports)
        else:
            body = (live.context.id, live.id, pack_credit(credit), pack_reports(reports))
            self._tell(live, live.initiator, Kind.PASS_ANSWER, body)

    def _credit_returned(self, source: int, body: Any) -> None:
        context_id, pass_id, credit, reports = body
        live = self._own_pass(context_id, pass_id)
        if live is not None:
            self._take_credit(live, unpack_credit(credit), unpack_reports(reports))

    def _take_credit(self, live: OwnPass, credit: Credit, reports: Reports) -> None:
        with live.context.lock:
            effects = live.control.credit_returned(credit, reports)
        self._carry_out_for(live, effects)

    def _reachability_asked(self, source: int, body: Any) -> None:
        context_id, pass_id, (retain, create) = body
        live = self._live_pass(context_id, pass_id, retain, create)
        if live is not None:
            self._tell(live, source, Kind.PASS_REACHABILITY, _reachability_of(live))

    def _reachability_told(self, source: int, body: Any) -> None:
        context_id, pass_id, waiting, sends = body
        live = self._own_pass(context_id, pass_id)
        if live is not None:
            with live.context.lock:
                effects = live.control.reachability_told(source, waiting, sends)
            self._carry_out_for(live, effects)

    def _struck_off(self, source: int, body: Any) -> None:
        context_id, pass_id, (retain, create), keep, credit = body
        live = self._live_pass(context_id, pass_id, retain, create)
        if live is not None:
            self._bring(Arrival(live, unpack_credit(credit), {}, live=frozenset(keep)))

    def _pass_ended(self, source: int, body: Any) -> None:
        context_id, pass_id = body
        context = self._contexts.get(context_id)
        if context is not None:
            with context.lock:
                context.passes.pop(pass_id, None)

    def _carry_out_for(self, live: OwnPass, effects: Sequence[Effect]) -> None:
        ids = (live.context.id, live.id)
        flags = (live.retain_graph, live.create_graph)
        for effect in effects:
            if isinstance(effect, Complete):
                live.finish(None)
                continue
            is_here = effect.worker == self.worker_id
            is_told = True
            if isinstance(effect, EndPass):
                if not is_here:
                    self._tell(live, effect.worker, Kind.PASS_END, ids)
            elif isinstance(effect, AskReachability):
                if is_here:
                    self._reachability_told(self.worker_id, _reachability_of(live))
                else:
                    is_told = self._tell(live, effect.worker, Kind.PASS_GATHER, (*ids, flags))
            elif isinstance(effect, StrikeOff):
                body = (*ids, flags, tuple(effect.live), pack_credit(effect.credit))
                if is_here:
                    self._struck_off(self.worker_id, body)
                else:
                    is_told = self._tell(live, effect.worker, Kind.PASS_STRIKE, body)
            if not is_told:
                return

    def _tell(self, live: LivePass, worker: int, kind: Kind, body: Any) -> bool:
        """Posts to a worker of the pass; returns whether that worked. If the worker is lost, the
        pass fails."""
        assert self._messenger is not None  # else no other worker takes part
        try:
            self._messenger.post(worker, kind, body)
        except WorkerLost as error:
            if kind is not Kind.PASS_END and live.context.passes.get(live.id) is live:
                self._fail(live, Failure.raised(worker, error))
            return False
        return True

    # Passes that fail

    def _fail(
        self, live: LivePass, failure: Failure, *, original: BaseException | None = None
    ) -> None:
        """The pass failed here.

        Args:
            original: what `backward` raises instead of `failure`, if it was called here.
        """
        if isinstance(live, OwnPass) and original is not None and live.control.failed():
            live.finish(original)
        self._abort(live.context, live.id, failure, told_by=None)
        if live.initiator != self.worker_id and live.initiator not in live.context.contacts:
            self._announce(live.initiator, live.context.id, live.id, failure)

    def _announce(
        self, worker: int, context_id: int, pass_id: int, failure: Failure, incident: int = 0
    ) -> None:
        """Tells a worker of a failure."""
        body = (context_id, pass_id, incident, failure.pack())
        if worker == self.worker_id:
            self._failure_told(worker, body)
        elif self._messenger is not None:
            try:
                self._messenger.post(worker, Kind.PASS_ABORT, body)
            except WorkerLost:
                pass  # its passes are gone with it

    def _failure_told(self, source: int, body: Any) -> None:
        """Another worker announces that a pass failed or that a worker is lost."""
        context_id, pass_id, incident, packed = body
        context = self._contexts.get(context_id)
        if context is None:
            return
        failure = Failure(*packed)
        if pass_id == _ANY_PASS:
            self._loss_told(context, incident, failure, told_by=source)
        else:
            self._abort(context, pass_id, failure, told_by=source)

    def _worker_lost(self, worker: int, reason: str) -> None:
        """Any pass of a context that the worker knew may have lost credit with it."""
        name = str(worker) if self._messenger is None else self._messenger.name_of(worker)
        text = f"worker {name!r} was lost during a backward pass: {reason}"
        failure = Failure("lost", worker, text, lost=name)
        for context in self.contexts:
            with context.lock:
                for pass_id in [id_ for id_ in context.passes if worker_of(id_) == worker]:
                    context.ended.add(pass_id)
                    del context.passes[pass_id]
                is_concerned = worker in context.contacts
            if is_concerned:
                self._loss_told(context, self._incident_ids.next(), failure, told_by=None)
        self._forget_worker(worker)

    def _freed(self, context: DistAutogradContext) -> None:
        """The passes of a context that ends fail if they were called here; all others are
        dropped."""
        with context.lock:
            context.is_released = True
            context.work.clear()
            passes = list(context.passes.values())
            context.passes.clear()
        for live in passes:
            if isinstance(live, OwnPass) and live.control.failed():
                text = (
                    f"the autograd context {context.id} was released, or its worker shut down, "
                    "during the backward pass"
                )
                text += torch_phrase(f"Could not find autograd context with id: {context.id}")
                live.finish(Failure("released", self.worker_id, text).error())

    def _abort(
        self, context: DistAutogradContext, pass_id: int, failure: Failure, *, told_by: int | None
    ) -> None:
        with context.lock:
            if pass_id in context.ended:
                return
            context.ended.add(pass_id)
            live = context.passes.pop(pass_id, None)
            contacts = context.contacts - {told_by, self.worker_id}
            own = live if isinstance(live, OwnPass) and live.control.failed() else None
        if own is not None:
            own.finish(failure.error())
        for worker in contacts:
            self._announce(worker, context.id, pass_id, failure)

    def _loss_told(
        self, context: DistAutogradContext, incident: int, failure: Failure, *, told_by: int | None
    ) -> None:
        with context.lock:
            if incident in context.incidents:
                return
            context.incidents.add(incident)
            own = [live for live in context.passes.values() if isinstance(live, OwnPass)]
            contacts = context.contacts - {told_by, self.worker_id, failure.worker}
        for live in own:
            self._fail(live, failure)
        for worker in contacts:
            self._announce(worker, context.id, _ANY_PASS, failure, incident)


def _reachability_of(live: LivePass) -> tuple[int, int, set[int], dict[int, set[int]]]:
    live.is_kept = True  # no lock: no wave of a quiet pass runs that could look at it
    return (live.context.id, live.id, *live.reachability())
