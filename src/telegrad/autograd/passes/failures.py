"""How a pass that cannot go on ends everywhere, and how its caller hears why.

A failed pass is told to every worker of the context: each that hears of it for the first time drops
the pass, refuses what still arrives for it, and tells those it knows. So it reaches all of them
though nobody knows who took part, and nobody is left holding the pass.

The loss of a worker concerns every pass of the contexts it knew, since credit may have been lost
with it, and only the worker that called `backward` can say which passes those are. So a loss is
told as an *incident* of the context, from worker to worker in the same way, and each ends the
passes that it began itself. A pass that begins afterwards is not concerned: it fails by itself if
it needs the lost worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from telegrad.autograd.contexts.context import DistAutogradContext
from telegrad.autograd.passes.live_pass import LivePass
from telegrad.drop_in import torch_phrase
from telegrad.errors import BackwardError, ContextError, TelegradError, WorkerLost
from telegrad.ids import WorkerCounter, worker_of
from telegrad.rpc.calls.outcome import text_of, traceback_of
from telegrad.rpc.seams import Messenger
from telegrad.wire.frames import Kind

if TYPE_CHECKING:
    from telegrad.autograd.contexts.registry import ContextRegistry

__all__ = ["Failure", "PassFailures"]

_ANY_PASS = -1


@dataclass(frozen=True)
class Failure:
    """Why a pass ended: made where it happened, carried to whoever called `backward`."""

    kind: str  # "raised", "lost" or "released"
    worker: int
    text: str
    traceback: str = ""
    lost: str = ""  # who was

    @classmethod
    def raised(cls, worker: int, error: BaseException) -> Failure:
        if issubclass(type(error), WorkerLost):  # its own class may not be looked at
            return cls("lost", worker, str(error), lost=error.worker)  # type: ignore[attr-defined]
        return cls("raised", worker, text_of(error) or type(error).__name__, traceback_of(error))

    def pack(self) -> tuple[str, int, str, str, str]:
        return (self.kind, self.worker, self.text, self.traceback, self.lost)

    def error(self) -> TelegradError:
        if self.kind == "lost":
            return WorkerLost(
                f"Error on Node {self.worker}: {self.text}",
                worker=self.lost,
                reason=self.text,
            )
        if self.kind == "released":
            return ContextError(self.text)
        return BackwardError(
            f"Error on Node {self.worker}: {self.text}\n\nThere:\n{self.traceback}",
            worker=self.worker,
            traceback=self.traceback,
        )


class PassFailures:
    """The failures of passes, as one worker tells and hears of them.

    Args:
        messenger: None for a worker without an agent.
        contexts: those that live here.
        first_id: where the ids that are made here begin.
    """

    def __init__(
        self,
        worker_id: int,
        messenger: Messenger | None,
        contexts: ContextRegistry,
        first_id: int = 0,
    ) -> None:
        self._worker_id = worker_id
        self._messenger = messenger
        self._registry = contexts
        self._incident_ids = WorkerCounter(worker_id, first_id)

    def fail(
        self, live: LivePass, failure: Failure, *, original: BaseException | None = None
    ) -> None:
        """The pass failed here.

        Args:
            original: what `backward` raises, if it was called here; else what `failure` says.
        """
        if live.control is not None and original is not None and live.control.failed():
            live.finish(original)
        self._abort(live.context, live.id, failure, told_by=None)
        if live.initiator != self._worker_id and live.initiator not in live.context.contacts:
            self.tell(live.initiator, live.context.id, live.id, failure)

    def tell(
        self, worker: int, context_id: int, pass_id: int, failure: Failure, incident: int = 0
    ) -> None:
        """Tells a worker that the pass failed."""
        body = (context_id, pass_id, incident, failure.pack())
        if worker == self._worker_id:
            self.told(worker, body)
        elif self._messenger is not None:
            try:
                self._messenger.post(worker, Kind.PASS_ABORT, body)
            except WorkerLost:
                pass  # nothing lives there any more

    def told(self, source: int, body: Any) -> None:
        """Another worker says that a pass failed, or that a worker is lost."""
        context_id, pass_id, incident, failure = body
        context = self._registry.find(context_id)
        if context is None:
            return
        if pass_id == _ANY_PASS:
            self._loss_told(context, incident, Failure(*failure), told_by=source)
        else:
            self._abort(context, pass_id, Failure(*failure), told_by=source)

    def worker_lost(self, worker: int, reason: str) -> None:
        """Any pass of a context that the worker knew may have lost credit with it."""
        name = str(worker) if self._messenger is None else self._messenger.name_of(worker)
        text = f"worker {name!r} was lost during a backward pass: {reason}"
        failure = Failure("lost", worker, text, lost=name)
        for context in self._registry.contexts:
            with context.lock:
                for pass_id in [id_ for id_ in context.passes if worker_of(id_) == worker]:
                    context.ended.add(pass_id)
                    del context.passes[pass_id]
                is_concerned = worker in context.contacts
            if is_concerned:
                self._loss_told(context, self._incident_ids.next(), failure, told_by=None)
        self._registry.worker_lost(worker)

    def context_freed(self, context: DistAutogradContext) -> None:
        """Passes that were called here and are under way in it fail; all others are dropped."""
        with context.lock:
            context.is_released = True
            context.work.clear()
            passes = list(context.passes.values())
            context.passes.clear()
        for live in passes:
            if live.control is not None and live.control.failed():
                failure = Failure(
                    "released",
                    self._worker_id,
                    f"the autograd context {context.id} was released, or its worker shut down, "
                    "during the backward pass"
                    + torch_phrase(f"Could not find autograd context with id: {context.id}"),
                )
                live.finish(failure.error())

    def _abort(
        self, context: DistAutogradContext, pass_id: int, failure: Failure, *, told_by: int | None
    ) -> None:
        with context.lock:
            if pass_id in context.ended:
                return
            context.ended.add(pass_id)
            live = context.passes.pop(pass_id, None)
            contacts = context.contacts - {told_by, self._worker_id}
            is_mine = live is not None and live.control is not None and live.control.failed()
        if live is not None and is_mine:
            live.finish(failure.error())
        for worker in contacts:
            self.tell(worker, context.id, pass_id, failure)

    def _loss_told(
        self, context: DistAutogradContext, incident: int, failure: Failure, *, told_by: int | None
    ) -> None:
        with context.lock:
            if incident in context.incidents:
                return
            context.incidents.add(incident)
            mine = [live for live in context.passes.values() if live.control is not None]
            contacts = context.contacts - {told_by, self._worker_id, failure.worker}
        for live in mine:
            self.fail(live, failure)
        for worker in contacts:
            self.tell(worker, context.id, _ANY_PASS, failure, incident)
