"""How the workers of a backward pass know that it is over, and what to do if it gets stuck.

**Credit.** A pass begins with a credit of 1 at its initiator. Each worker that works on the pass
holds some credit, and each message that causes work carries some. A worker that becomes idle keeps
none: it splits what it held among the gradients it sends or, if it sends none, returns it to the
initiator. So all the credit is back at an idle initiator exactly when no worker works on the pass
and no message is under way: the pass is *quiet*. Nothing is polled and nothing times out.

This is the credit recovery of Huang and of Mattern. The alternative is Dijkstra and Scholten's tree
of answers, in which an answer retraces the path of each gradient message. Here credit travels with
gradients that go back anyway: a chain A→B→A→B→A needs its gradient messages and *nothing else*.
Only a worker whose wave sends no gradients on reports so, once, directly to the initiator. Credit
is an exact fraction, so it can be split without limit.

**Standing.** At quiet, a worker may still be *waiting*: it holds gradients that cannot go on until
one of its send functions gets gradients, which will never come (the loss does not use that remote
result). So that the initiator knows, each worker reports its standing when it becomes idle; reports
travel with the credit, so at quiet the initiator has the latest of all. A worker that is *closed*
(nothing can arrive there any more) forgets the pass at once, and reports nothing if it has never
been anything else; workers that are *open* are told of the end. So a pass through one call, the
common case, has no reports.

**Resolution.** If a worker waits at quiet, the initiator asks the workers for their local
reachability: which received messages their waiting gradients lead to, and which messages each
awaited send leads to. A message that can be reached from a waiting gradient can still arrive; all
others cannot. The initiator follows the answers from worker to worker, including workers that had
no part in the pass yet. Then it tells each which of its sends are *live*, with a share of the
credit, and the worker stops waiting for the rest. A worker that was asked keeps the pass until the
initiator ends it, even if it closes: the gradients that close it may arrive before a strike. The
distributed graph has no cycles, so some waiting gradient is behind no live send and goes on: each
resolution makes progress, and the pass ends.

**Failure** ends a pass from any state, once. The credit of a failed pass is void.

Pure: no torch, no threads, no clock. Calls are events, returned values are effects.
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
    """The state of an idle worker."""

    CLOSED = 0
    """Nothing can arrive any more; the worker forgets the pass."""
    OPEN = 1
    """Some sends may still get gradients."""
    WAITING = 2
    """It holds gradients that cannot go on before something arrives."""


Credit: TypeAlias = Fraction | int
"""A part of 1. An int while it is whole, as in a plain chain of calls."""

Reports = dict[int, tuple[int, Standing]]
"""Worker → (number of its latest report, its standing)."""


def merge_reports(into: Reports, other: Mapping[int, tuple[int, Standing]]) -> None:
    """Keeps the later of two reports of each worker."""
    for worker, report in other.items():
        if worker not in into or into[worker][0] < report[0]:
            into[worker] = report


class PassShare:
    """One worker's credit in one pass.

    Args:
        control: at the initiator, which reports to itself directly.
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
        """A message of the pass has arrived."""
        self._credit = self._credit + credit if self._credit else credit
        if reports:
            merge_reports(self._reports, reports)

    def split(self, parcels: int, standing: Standing) -> list[tuple[Credit, Reports]]:
        """A wave has ended and sends several gradient messages: the load of each.

        Messages that arrived meanwhile count as under way until they are taken. Only the first
        carries the reports: all credit comes back, so one is enough.
        """
        credit, reports = self.give_up(standing)
        share: Credit = credit / Fraction(parcels)
        return [(share, reports)] + [(share, {}) for _ in range(parcels - 1)]

    def give_up(self, standing: Standing) -> tuple[Credit, Reports]:
        """A wave has ended: the load of its only gradient message or, if it sends none, of the
        credit's return to the initiator."""
        reports, self._reports = self._reports, {}
        if self._control is not None:
            self._control.initiator_stands(self._worker, standing)
        elif self._reports_made or standing is not Standing.CLOSED:
            self._reports_made += 1
            reports[self._worker] = (self._reports_made, standing)
        credit, self._credit = self._credit, 0
        return credit, reports


class PassState(enum.Enum):
    """The state of a pass, as its initiator knows it."""

    RUNNING = enum.auto()
    RESOLVING = enum.auto()
    COMPLETE = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True)
class AskReachability:
    """Ask a worker for its local reachability; from then on it keeps the pass until the end."""

    worker: int


@dataclass(frozen=True)
class StrikeOff:
    """Tell a worker that of its awaited sends only `live` can still arrive."""

    worker: int
    live: frozenset[int]
    credit: Credit


@dataclass(frozen=True)
class EndPass:
    """Tell a worker that keeps the pass that it is over."""

    worker: int


@dataclass(frozen=True)
class Complete:
    """The pass is over; `backward` may return."""


Effect: TypeAlias = AskReachability | StrikeOff | EndPass | Complete

_COMPLETE = Complete()


class PassControl:
    """The initiator's view of the whole pass."""

    # Set when a resolution begins.
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
        """The initiator has become idle."""
        self._reports[worker] = (0, standing)

    def credit_returned(
        self, credit: Credit, reports: Mapping[int, tuple[int, Standing]]
    ) -> list[Effect]:
        """Credit has come back from a worker, or from the initiator's own share."""
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
        """A worker has answered: messages behind its waiting gradients, and behind each awaited
        send."""
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
        """An error ends the pass; returns whether it was still running."""
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
