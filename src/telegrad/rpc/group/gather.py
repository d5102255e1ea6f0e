"""All-gather among workers, which barriers and shutdown are made of.

The participant with the lowest id leads. Each sends its object to the leader and waits for the
reply, which the leader sends to all once it has heard from all: one request per worker. The
participants' calls must be in step: the n-th gathering of a set of workers is the same one on each
of them.

The wait ends when all have sent their objects; when a participant is lost (`WorkerLost`, or it is
left out if losses are forgiven); or at the timeout.

If losses are forgiven and the leader is lost, the next id leads. The lost leader may have answered
some participants, which have moved on to the next gathering and do not return to this one. So each
request carries the result of the gathering before, for participants that still wait for it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from telegrad.errors import WorkerLost
from telegrad.rpc.calls.agent import Agent
from telegrad.rpc.connections.network import Send
from telegrad.wire.frames import Frame, Kind

__all__ = ["Gatherings"]

_Key = tuple[tuple[int, ...], int]


class _Question(NamedTuple):
    """A participant's request, which its leader answers."""

    frame: Frame
    send: Send


@dataclass
class _Gathering:
    """A gathering, at its leader."""

    awaited: set[int]
    forgives_losses: bool
    values: dict[int, Any] = field(default_factory=dict)
    questions: dict[int, _Question] = field(default_factory=dict)


class Gatherings:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.RLock()  # guards the tables below
        self._open: dict[_Key, _Gathering] = {}
        self._counts: collections.Counter[tuple[int, ...]] = collections.Counter()
        self._lost: set[int] = set()
        # The result of the latest one that forgives losses, as far as it is known here.
        self._found: dict[tuple[int, ...], tuple[int, dict[int, Any]]] = {}
        agent.service.handle_frame(Kind.GATHER, self._on_request)
        agent.watch_losses(self._on_lost)

    def gather(
        self,
        workers: Sequence[int],
        value: Any,
        *,
        timeout: float = 0,
        forgive_losses: bool = False,
    ) -> dict[int, Any]:
        """What each of `workers` (ids, including this worker's) has sent, by id.

        Args:
            timeout: seconds; 0 waits for as long as all participants live.
            forgive_losses: leave lost workers out instead of failing.

        Raises:
            RpcTimeout, WorkerLost
        """
        participants = tuple(sorted(workers))
        with self._lock:
            number = self._counts[participants]
            self._counts[participants] += 1
            before = self._found.get(participants)
        key = (participants, number)
        for leader in participants:
            message = (key, forgive_losses, value, before)
            try:
                answer = self._agent.request(leader, Kind.GATHER, message, timeout=timeout)
                found: dict[int, Any] = answer.wait()
            except WorkerLost as error:
                name = self._agent.network.members.name_of(leader)
                if not forgive_losses or error.worker != name:
                    raise
                continue  # the leader itself is lost: the next one leads
            if forgive_losses:
                self._learn(participants, number, found)
            return found
        raise WorkerLost("no worker is left to gather with")

    def _learn(self, participants: tuple[int, ...], number: int, found: dict[int, Any]) -> None:
        """A gathering is over. Workers that ask for it here had no reply from its leader, which may
        have died after it had answered others: they get the same result."""
        with self._lock:
            if number <= self._found.get(participants, (-1,))[0]:
                return
            self._found[participants] = number, found
            gathering = self._open.pop((participants, number), None)
        if gathering is not None:
            gathering.values = found
            self._finish(gathering, None)

    def _on_request(self, source: int, frame: Frame, send: Send) -> None:
        service = self._agent.service
        key, forgives_losses, value, before = service.decode(source, frame, frame.body)
        participants, number = key
        frame.buffers = []
        if before is not None:
            self._learn(participants, *before)
        with self._lock:
            latest, found = self._found.get(participants, (-1, {}))
            is_new = latest < number and key not in self._open
            if is_new:
                self._open[key] = _Gathering(set(participants), forgives_losses)
            if latest < number:
                gathering = self._open[key]
                gathering.awaited.discard(source)
                gathering.values[source] = value
                gathering.questions[source] = _Question(frame, send)
        if latest == number:
            service.answer(source, frame, send, found)
        elif latest > number:
            raise WorkerLost("the others have met without this worker, which they counted as lost")
        if is_new:
            # Connect to participants that have not talked to this worker, to notice their deaths.
            # A lost one is known already; connecting to it again might take long.
            network = self._agent.network
            for worker in participants:
                if not network.members.is_lost(worker):
                    network.work.submit(partial(network.members.watch, worker))
        self._proceed()

    def _on_lost(self, worker: int, reason: str) -> None:
        with self._lock:
            self._lost.add(worker)
        self._proceed()

    def _proceed(self) -> None:
        """Answers the gatherings that are complete or cannot complete."""
        finished: list[tuple[_Gathering, int | None]] = []
        with self._lock:
            lost = {w for w in self._lost if self._agent.network.members.is_lost(w)}
            self._lost = lost  # a worker that has come back is awaited again
            for key, gathering in list(self._open.items()):
                missing = gathering.awaited & lost
                if missing and gathering.forgives_losses:
                    gathering.awaited -= missing
                    missing = set()
                if missing or not gathering.awaited:
                    del self._open[key]
                    finished.append((gathering, min(missing, default=None)))
        for gathering, missing_worker in finished:
            self._finish(gathering, missing_worker)

    def _finish(self, gathering: _Gathering, missing: int | None) -> None:
        # Answer the leader itself last, and all on this thread: it may exit as soon as it has its
        # answer, and by then all others must have theirs.
        own, service = self._agent.worker_id, self._agent.service
        for source in sorted(gathering.questions, key=lambda source: source == own):
            frame, send = gathering.questions[source]
            if missing is None:
                service.answer(source, frame, send, gathering.values)
            else:
                name = self._agent.network.members.name_of(missing) or str(missing)
                text = f"worker {name!r} was lost before all workers had met"
                service.answer_failure(source, frame, send, WorkerLost(text, worker=name))
