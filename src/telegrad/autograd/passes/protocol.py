"""How the workers of a backward pass know that it is over, and what to do if it gets stuck.

**Credit.** A pass begins with a credit of 1 at its initiator. Whoever works on the pass holds some
credit, and every message of it that makes somebody work carries some. A worker that has become
idle keeps none: it has split what it held among the gradients it sent or, if it sent none,
returned it to the initiator. So all the credit is back at an idle initiator exactly when nobody
works and nothing is under way: the pass is *quiet*. Nothing is polled and nothing times out.

This is Huang's and Mattern's credit recovery. It was preferred to Dijkstra and Scholten's tree of
answers, because an answer there retraces the way of each gradient message, while here credit
rides on gradients that go back anyway: a chain A→B→A→B→A needs its gradient messages and *nothing
else*; only a worker whose wave sends no gradient on has to say so, once, straight to the initiator.
Credit is an exact fraction; splitting it never runs out.

**Standing.** At quiet, a worker may still be *waiting*: it holds gradients that cannot go on until
some send function of its gets gradients, which will never come (a remote result that the loss does
not use). To know that without asking, each worker reports its standing whenever it becomes idle;
reports travel with the credit, so at quiet the initiator has the latest of all. Its own it has at
hand. A worker that is *closed* (nothing can arrive there any more) forgets the pass at once by
itself, and has nothing to report if it never was anything else; those that are *open* are told of
the end. So a pass through one call, as most are, has no reports at all.

**Resolution.** If somebody waits at quiet, the initiator asks the workers for their local
reachability: which received messages waiting gradients lead to, and which each awaited send leads
to. A message that can be reached from a waiting gradient can still arrive, all others cannot. It
follows the answers from worker to worker, also to those that had no part in the pass yet, then
tells each which of its sends are *live*, with a share of the credit; the rest is struck off there.
A worker that was asked keeps the pass until it is told of the end, even if it closes: a strike may
be on its way to it, overtaken by the gradients that closed it. The distributed graph has no cycles,
so some waiting gradient is behind no live send and goes on: each resolution makes progress, and the
pass ends.

**Failure** ends a pass from any state, once. Credit of a failed pass is worth nothing.

Everything here is pure: no torch, no threads, no clock; calls are events, returned values effects.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from telegrad.ids import worker_of

__all__ = [
    "AskReachability",
    "Complete",
    "Credit",
    "EndPass",
    "PassControl",
    "PassShare",
    "PassState",
    "Reports",
    "Standing",
    "StrikeOff",
    "merge_reports",
]


class Standing(enum.IntEnum):
    """What a worker is in when it is idle."""

    CLOSED = 0
    """Nothing can arrive any more; the pass is forgotten there."""
    OPEN = 1
    """Some sends may still get gradients."""
    WAITING = 2
    """Gradients are held that cannot go on before something arrives."""


Credit: TypeAlias = Fraction | int
"""A part of 1. An int where it is whole, which it is in a plain chain of calls."""

Reports = dict[int, tuple[int, Standing]]
"""Worker → (how many reports it has made, its latest standing)."""


def merge_reports(into: Reports, other: Mapping[int, tuple[int, Standing]]) -> None:
    """Keeps the later of two reports of a worker."""
    for worker, report in other.items():
        if worker not in into or into[worker][0] < report[0]:
            into[worker] = report


class PassShare:
    """One worker's credit in one pass, the initiator's included.

    Args:
        control: at the initiator, where reports of its own are made.
    """

    __slots__ = ("_control", "_credit", "_reports", "_reports_made", "_worker")

    def __init__(self, worker: int, control: PassControl | None = None) -> None:
        self._worker = worker
        self._control = control
        self._credit: Credit = 0
        self._reports: Reports = {}
        self._reports_made = 0

    @property
    def credit(self) -> Credit:
        return self._credit

    def take(self, credit: Credit, reports: Mapping[int, tuple[int, Standing]]) -> None:
        """A message of the pass has come."""
        self._credit = self._credit + credit if self._credit else credit
        if reports:
            merge_reports(self._reports, reports)

    def split(self, parcels: int, standing: Standing) -> list[tuple[Credit, Reports]]:
        """A wave has ended and sends several gradient messages: what each of them carries.

        Messages that came meanwhile count as under way until they are taken. The first parcel
        carries the reports: all credit comes home, so one is enough.
        """
        credit, reports = self.give_up(standing)
        share: Credit = credit / Fraction(parcels)
        return [(share, reports)] + [(share, {}) for _ in range(parcels - 1)]

    def give_up(self, standing: Standing) -> tuple[Credit, Reports]:
        """A wave has ended: all that it carries on to one worker, or, if nothing is sent on, home
        to the initiator."""
        reports, self._reports = self._reports, {}
        if self._control is not None:
            self._control.initiator_stands(self._worker, standing)
        elif self._reports_made or standing is not Standing.CLOSED:
            self._reports_made += 1
            reports[self._worker] = (self._reports_made, standing)
        credit, self._credit = self._credit, 0
        return credit, reports


class PassState(enum.Enum):
    """Where a pass is, as its initiator sees it."""

    RUNNING = enum.auto()
    RESOLVING = enum.auto()
    COMPLETE = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True)
class AskReachability:
    """Ask a worker for its local reachability; it keeps the pass until the end from here on."""

    worker: int


@dataclass(frozen=True)
class StrikeOff:
    """Tell a worker that of its awaited sends only `live` can still arrive."""

    worker: int
    live: frozenset[int]
    credit: Credit


@dataclass(frozen=True)
class EndPass:
    """Tell a worker that still keeps the pass that it is over."""

    worker: int


@dataclass(frozen=True)
class Complete:
    """The pass is over; `backward` may return."""


Effect: TypeAlias = AskReachability | StrikeOff | EndPass | Complete

_COMPLETE = Complete()


class PassControl:
    """The initiator's view of the whole pass."""

    # Of a resolution; made when one begins.
    _asked: set[int]
    _told: dict[int, dict[int, frozenset[int]]]
    _waiting_messages: set[int]

    def __init__(self) -> None:
        self.state = PassState.RUNNING
        self.resolutions = 0
        self._home: Credit = 0
        self._reports: Reports = {}
        self._ever_asked: set[int] = set()

    def initiator_stands(self, worker: int, standing: Standing) -> None:
        """The initiator has become idle. For the first time that is before anybody else has credit:
        then nobody looks at the reports."""
        self._reports[worker] = (0, standing)

    def credit_returned(
        self, credit: Credit, reports: Mapping[int, tuple[int, Standing]]
    ) -> list[Effect]:
        """Credit came home from a worker, or from the initiator's own share."""
        if self.state is not PassState.RUNNING:
            return []
        self._home += credit
        if reports:
            merge_reports(self._reports, reports)
        if self._home < 1:
            return []
        highest = Standing.CLOSED
        for _, standing in self._reports.values():
            highest = max(highest, standing)
        if highest is not Standing.WAITING:
            self.state = PassState.COMPLETE
            if highest is Standing.CLOSED and not self._ever_asked:
                return [_COMPLETE]
            return [*self._ends(), _COMPLETE]
        self.state = PassState.RESOLVING
        self.resolutions += 1
        self._asked = {
            worker
            for worker, (_, standing) in self._reports.items()
            if standing is not Standing.CLOSED
        }
        self._told = {}
        self._waiting_messages = set()
        return self._ask(self._asked)

    def reachability_told(
        self,
        worker: int,
        waiting: Iterable[int],
        sends: Mapping[int, Iterable[int]],
    ) -> list[Effect]:
        """A worker answers: messages behind its waiting gradients, and behind each awaited send."""
        if self.state is not PassState.RESOLVING or worker not in self._asked:
            return []
        if worker in self._told:
            return []
        self._told[worker] = {message: frozenset(behind) for message, behind in sends.items()}
        self._waiting_messages.update(waiting)
        if len(self._told) < len(self._asked):
            return []
        live = self._closure()
        strangers = {worker_of(message) for message in live} - self._asked
        if strangers:
            self._asked |= strangers
            return self._ask(strangers)
        concerned = [
            worker
            for worker, sends_ in sorted(self._told.items())
            if self._is_waiting(worker) or not live.issuperset(sends_)
        ]
        self.state = PassState.RUNNING
        share = self._home / Fraction(len(concerned))
        self._home = 0
        return [
            StrikeOff(worker, frozenset(live.intersection(self._told[worker])), share)
            for worker in concerned
        ]

    def failed(self) -> bool:
        """Something ended the pass; True if it was still going on."""
        if self.state in (PassState.COMPLETE, PassState.FAILED):
            return False
        self.state = PassState.FAILED
        return True

    def _is_waiting(self, worker: int) -> bool:
        return worker in self._reports and self._reports[worker][1] is Standing.WAITING

    def _ask(self, workers: set[int]) -> list[Effect]:
        self._ever_asked |= workers
        return [AskReachability(worker) for worker in sorted(workers)]

    def _ends(self) -> list[Effect]:
        keeping = {
            worker
            for worker, (_, standing) in self._reports.items()
            if standing is not Standing.CLOSED
        }
        return [EndPass(worker) for worker in sorted(keeping | self._ever_asked)]

    def _closure(self) -> set[int]:
        live: set[int] = set()
        todo = list(self._waiting_messages)
        while todo:
            message = todo.pop()
            if message not in live:
                live.add(message)
                todo += self._told.get(worker_of(message), {}).get(message, ())
        return live
