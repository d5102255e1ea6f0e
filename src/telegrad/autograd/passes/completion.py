"""How a pass ends well: credit that comes home, and what nobody will send is struck off.

This carries out what the pass protocol says (`pass_protocol`), at the worker that called `backward`
and at those that it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from telegrad.autograd.contexts.context import DistAutogradContext
from telegrad.autograd.passes.failures import Failure, PassFailures
from telegrad.autograd.passes.live_pass import Arrival, LivePass, pack_credit, unpack_credit
from telegrad.autograd.passes.messages import CreditMessage
from telegrad.autograd.passes.protocol import (
    AskReachability,
    Complete,
    Credit,
    Effect,
    EndPass,
    Reports,
    StrikeOff,
)
from telegrad.errors import WorkerLost
from telegrad.rpc.seams import Messenger
from telegrad.wire.frames import Kind

if TYPE_CHECKING:
    from telegrad.autograd.contexts.registry import ContextRegistry

__all__ = ["Completion"]


class Completion:
    """
    Args:
        messenger: None for a worker without an agent: its passes have nobody to tell.
        contexts: those that live here.
        live_pass: finds or makes a pass by the ids of its context and its own, and by what it
            retains and creates; None if it is over.
        bring: hands something to its pass.
    """

    def __init__(
        self,
        worker_id: int,
        messenger: Messenger | None,
        contexts: ContextRegistry,
        failures: PassFailures,
        live_pass: Callable[[int, int, bool, bool], LivePass | None],
        bring: Callable[[DistAutogradContext, Arrival], None],
    ) -> None:
        self._worker_id = worker_id
        self._messenger = messenger
        self._contexts = contexts
        self._failures = failures
        self._live_pass = live_pass
        self._bring = bring

    def return_credit(self, live: LivePass, credit: Credit, reports: Reports) -> None:
        if live.control is not None:
            with live.context.lock:
                effects = live.control.credit_returned(credit, reports)
            self._carry_out(live, effects)
            return
        message = CreditMessage(live.context.id, live.id, credit, reports)
        self._tell(live, live.initiator, Kind.PASS_ANSWER, message.pack())

    def credit_returned(self, source: int, body: bytes) -> None:
        message = CreditMessage.unpack(body)
        live = self._own_pass(message.context_id, message.pass_id)
        if live is not None and live.control is not None:
            with live.context.lock:
                effects = live.control.credit_returned(message.credit, message.reports)
            self._carry_out(live, effects)

    def reachability_asked(self, source: int, body: Any) -> None:
        context_id, pass_id, (retain, create) = body
        live = self._live_pass(context_id, pass_id, retain, create)
        if live is not None:
            waiting, sends = self._reachability(live)
            self._tell(live, source, Kind.PASS_REACHABILITY, (context_id, pass_id, waiting, sends))

    def _reachability(self, live: LivePass) -> tuple[set[int], dict[int, set[int]]]:
        live.local.is_kept = True  # nothing of a quiet pass runs, so nothing else looks at it now
        return live.local.reachability()

    def reachability_told(self, source: int, body: Any) -> None:
        context_id, pass_id, waiting, sends = body
        live = self._own_pass(context_id, pass_id)
        if live is not None and live.control is not None:
            with live.context.lock:
                effects = live.control.reachability_told(source, waiting, sends)
            self._carry_out(live, effects)

    def struck_off(self, source: int, body: Any) -> None:
        context_id, pass_id, (retain, create), keep, credit = body
        live = self._live_pass(context_id, pass_id, retain, create)
        if live is not None:
            self._bring(
                live.context, Arrival(live, unpack_credit(credit), {}, live=frozenset(keep))
            )

    def pass_ended(self, source: int, body: Any) -> None:
        context_id, pass_id = body
        context = self._contexts.find(context_id)
        if context is not None:
            with context.lock:
                context.passes.pop(pass_id, None)

    def _own_pass(self, context_id: int, pass_id: int) -> LivePass | None:
        context = self._contexts.find(context_id)
        return None if context is None else context.passes.get(pass_id)

    def _carry_out(self, live: LivePass, effects: Sequence[Effect]) -> None:
        context = live.context
        for effect in effects:
            if isinstance(effect, Complete):
                live.finish(None)
            elif isinstance(effect, EndPass):
                if effect.worker != self._worker_id:
                    self._tell(live, effect.worker, Kind.PASS_END, (context.id, live.id))
            elif isinstance(effect, AskReachability):
                if effect.worker == self._worker_id:
                    self.reachability_told(
                        self._worker_id,
                        (context.id, live.id, *self._reachability(live)),
                    )
                else:
                    flags = (live.retain_graph, live.create_graph)
                    if not self._tell(
                        live, effect.worker, Kind.PASS_GATHER, (context.id, live.id, flags)
                    ):
                        return
            elif isinstance(effect, StrikeOff):
                body = (
                    context.id,
                    live.id,
                    (live.retain_graph, live.create_graph),
                    tuple(effect.live),
                    pack_credit(effect.credit),
                )
                if effect.worker == self._worker_id:
                    self.struck_off(self._worker_id, body)
                elif not self._tell(live, effect.worker, Kind.PASS_STRIKE, body):
                    return

    def _tell(self, live: LivePass, worker: int, kind: Kind, body: Any) -> bool:
        """Posts to a worker of the pass, and returns whether it went out: the pass fails with a
        worker that is lost."""
        assert self._messenger is not None  # else there is nobody to tell
        try:
            self._messenger.post(worker, kind, body)
        except WorkerLost as error:
            if kind is not Kind.PASS_END and live.context.passes.get(live.id) is live:
                self._failures.fail(live, Failure.raised(worker, error))
            return False
        return True
