"""Everybody tells, everybody hears: the meeting that barriers and shutdown are made of.

The lowest id among the participants leads. Each sends its object to the leader and waits for the
answer, which the leader gives to all once it has heard from all: one request a worker, and no
second round. The participants' calls must be in step: the n-th gathering of a set of workers is the
same one on each of them.

The wait ends when all have told; when a participant is lost (`WorkerLost`, or it is left out, if
losses are to be forgiven); or when the time is over.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from telegrad.errors import WorkerLost
from telegrad.rpc.agent import Agent
from telegrad.rpc.network import Send
from telegrad.wire.frames import Frame, Kind

__all__ = ["Gatherings"]

_Key = tuple[tuple[int, ...], int]


class _Question(NamedTuple):
    """A participant's request, as its leader will answer it."""

    frame: Frame
    send: Send


@dataclass
class _Gathering:
    """One meeting, at its leader."""

    awaited: set[int]
    forgives_losses: bool
    told: dict[int, Any] = field(default_factory=dict)
    questions: dict[int, _Question] = field(default_factory=dict)


class Gatherings:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards the tables below
        self._open: dict[_Key, _Gathering] = {}
        self._counts: collections.Counter[tuple[int, ...]] = collections.Counter()
        self._lost: set[int] = set()
        agent.service.handle_frame(Kind.GATHER, self._on_told)
        agent.watch_losses(self._on_lost)

    def gather(
        self,
        workers: Sequence[int],
        value: Any,
        *,
        timeout: float = 0,
        forgive_losses: bool = False,
    ) -> dict[int, Any]:
        """What each of `workers` (ids, this one among them) has told, by id.

        Args:
            timeout: seconds; 0 waits for as long as all participants live.
            forgive_losses: leaves lost workers out instead of failing.

        Raises:
            RpcTimeout, WorkerLost
        """
        participants = tuple(sorted(workers))
        with self._lock:
            number = self._counts[participants]
            self._counts[participants] += 1
        key = (participants, number)
        for leader in participants:
            message = (key, forgive_losses, value)
            try:
                answer = self._agent.request(leader, Kind.GATHER, message, timeout=timeout)
                found: dict[int, Any] = answer.wait()
                return found
            except WorkerLost as error:
                name = self._agent.network.members.name_of(leader)
                if not forgive_losses or error.worker != name:
                    raise
                # The leader itself is lost: the next one leads.
        raise WorkerLost("nobody is left to gather with")

    def _on_told(self, source: int, frame: Frame, send: Send) -> None:
        key, forgives_losses, value = self._agent.service.decode(source, frame, frame.body)
        frame.buffers = []
        with self._lock:
            gathering = self._open.get(key)
            is_new = gathering is None
            if gathering is None:
                gathering = self._open[key] = _Gathering(set(key[0]), forgives_losses)
            gathering.awaited.discard(source)
            gathering.told[source] = value
            gathering.questions[source] = _Question(frame, send)
        if is_new:
            # One that dies without ever having spoken to this worker must be noticed as well. One
            # that is lost has been: to knock there again may take as long as any connection.
            network = self._agent.network
            for worker in key[0]:
                if not network.members.is_lost(worker):
                    network.work.submit(partial(network.members.watch, worker))
        self._proceed()

    def _on_lost(self, worker: int, reason: str) -> None:
        with self._lock:
            self._lost.add(worker)
        self._proceed()

    def _proceed(self) -> None:
        """Answers the gatherings that are complete or have become impossible."""
        finished: list[tuple[_Gathering, int | None]] = []
        with self._lock:
            lost = {w for w in self._lost if self._agent.network.members.is_lost(w)}
            self._lost = lost  # one that has come back is awaited again
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
        # The leader's own last, and none on another thread: it may end its process as soon as it
        # goes on, and then all others must have been answered.
        own, service = self._agent.worker_id, self._agent.service
        for source in sorted(gathering.questions, key=lambda source: source == own):
            frame, send = gathering.questions[source]
            if missing is None:
                service.answer(source, frame, send, gathering.told)
            else:
                name = self._agent.network.members.name_of(missing) or str(missing)
                text = f"worker {name!r} was lost before all workers had met"
                service.answer_failure(source, frame, send, WorkerLost(text, worker=name))
