"""The caller's end of a call: what its two nodes do in a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from telegrad.autograd.plain.messages import ask, begin_to_deliver, deliver, report_of
from telegrad.autograd.plain.nodes import EMPTY
from telegrad.autograd.plain.notes import Note
from telegrad.autograd.plain.passes import Modes, Pass, Report
from telegrad.errors import BackwardError
from telegrad.ids import worker_of

if TYPE_CHECKING:
    from telegrad.autograd.plain.engine import PlainEngine

__all__ = ["NO_TIMEOUT", "Record", "Residents"]

NO_TIMEOUT = 0.0


@dataclass
class Residents:
    """Tensors that are at the callee already, and are inputs of a call all the same.

    Attributes:
        tensors: their stand-ins at the caller, all of which require grad.
        revive: makes their gradients of what `export_leaves` has sent back, in the same order.
    """

    tensors: Sequence[Tensor]
    revive: Callable[[Any], Sequence[Tensor | None]]


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
        self.arguments: Sequence[Note] = ()
        """Of futures among the arguments. Their calls' entries must outlive the futures."""
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
        wait: Callable[[], Any] | None = None
        if not modes.create_graph:
            wait = begin_to_deliver(engine.agent, self.to, about, gradients)
        if wait is None:
            args = (*about, *gradients)
            wait = engine.call_async(
                self.to,
                deliver,
                args,
                timeout=NO_TIMEOUT,
                residents=self.residents,
                keep_token=one.tokens,
            )
        got: list[Report] = []

        def wait_once() -> Report:
            if not got:
                got.append(report_of(wait()))
                one.later.update(got[0].later)
            return got[0]

        for call in self.below:
            one.posts.setdefault(call, []).append((self, wait_once))
        run.waits.append(wait_once)

    def collect(self) -> Sequence[Tensor | None]:
        """Waits for the gradients of the arguments."""
        run = self._engine.current_run()
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
            tensors, revive = self.residents.tensors, self.residents.revive
            gradients += [None] * len(tensors) if exported is None else revive(exported)
        return gradients

    def _ask(self, one: Pass, worker: int, modes: Modes) -> Report:
        args = (*one.name, self.call, modes.as_bits())
        residents = self.residents if worker == self.to else None
        answer = self._engine.call(worker, ask, args, timeout=NO_TIMEOUT, residents=residents)
        report = report_of(answer)
        one.later.update(report.later)
        return report
