"""The owner's half of the RRef protocol: the values that a worker owns.

`telegrad.rpc.references.protocol` has the theory.

=============  ===============================================================================
state          meaning
=============  ===============================================================================
(absent)       unknown, or dropped; tombstones tell the two apart while it matters
PLACEHOLDER    wanted before its REMOTE message came; ends with that, with the creator's loss, or
               after `max_message_age`, when it can no longer come
CREATED        the value is here, or being computed; dropped with its last fork and handle
=============  ===============================================================================
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from telegrad.ids import ForkId, RRefId
from telegrad.rpc.references.events import (
    DropValue,
    Effect,
    HoldValue,
    Message,
    Reason,
    Send,
    Timing,
)
from telegrad.wire.frames import Kind

__all__ = ["OwnedState", "OwnerLedger"]


class OwnedState(enum.Enum):
    PLACEHOLDER = enum.auto()
    CREATED = enum.auto()


@dataclass(slots=True)
class _Owned:
    state: OwnedState
    handles: int = 0
    forks: dict[ForkId, int] = field(default_factory=dict)


class OwnerLedger:
    def __init__(self, worker_id: int, timing: Timing) -> None:
        self._worker_id = worker_id
        self._age = timing.max_message_age
        self._owned: dict[RRefId, _Owned] = {}
        self._placeholders: dict[RRefId, float] = {}
        # id → when to forget it. Dicts keep their order and all ids live equally long, so the
        # oldest is first. Ids made by this worker need no tombstone: one that is not in `_owned`
        # is over, since this worker brought it up first.
        self._dead_forks: dict[ForkId, float] = {}
        self._dead_rrefs: dict[RRefId, float] = {}

    # --- What can be asked -----------------------------------------------------------------------

    def state_of(self, rref: RRefId) -> OwnedState | None:
        owned = self._owned.get(rref)
        return owned.state if owned is not None else None

    def forks(self) -> Iterable[tuple[RRefId, ForkId, int]]:
        for rref, owned in self._owned.items():
            for fork, worker in owned.forks.items():
                yield rref, fork, worker

    def count_forked(self) -> int:
        """How many values other workers know; a local value that was never passed on does not
        count."""
        return sum(
            1
            for owned in self._owned.values()
            if owned.forks or owned.state is OwnedState.PLACEHOLDER
        )

    def is_empty(self) -> bool:
        return not (self._owned or self._dead_forks or self._dead_rrefs)

    # --- Events ----------------------------------------------------------------------------------

    def value_made(self, rref: RRefId) -> list[Effect]:
        if rref in self._owned:
            return []
        self._owned[rref] = _Owned(OwnedState.CREATED, handles=1)
        return [HoldValue(rref=rref)]

    def creation_arrived(
        self, rref: RRefId, fork: ForkId, creator: int, now: float
    ) -> list[Effect]:
        owned = self._owned.get(rref)
        if owned is None:
            if self._is_over(rref) or self._is_struck(fork):
                return []  # its creator gave up before the message came
            self._owned[rref] = _Owned(OwnedState.CREATED, forks={fork: creator})
            return [HoldValue(rref=rref)]
        owned.state = OwnedState.CREATED
        self._placeholders.pop(rref, None)
        if not self._is_struck(fork):
            owned.forks[fork] = creator
        return self._drop_if_unused(rref, owned, now)

    def value_wanted(self, rref: RRefId, now: float) -> list[Effect]:
        return self._open(rref, now)

    def passed(self, rref: RRefId, fork: ForkId, to: int) -> list[Effect]:
        owned = self._owned.get(rref)
        if owned is not None:
            owned.forks[fork] = to
        return []

    def received(self, rref: RRefId, fork: ForkId, now: float) -> list[Effect]:
        """A reference came home: it becomes a local handle. If this worker made the fork itself, to
        keep the value while the reference was under way, the fork ends."""
        effects = self._open(rref, now)
        owned = self._owned.get(rref)
        if owned is not None:
            owned.handles += 1
            owned.forks.pop(fork, None)
        return effects

    def handle_died(self, rref: RRefId, now: float) -> list[Effect]:
        owned = self._owned.get(rref)
        if owned is None:
            return []
        owned.handles = max(0, owned.handles - 1)
        return self._drop_if_unused(rref, owned, now)

    def fork_arrived(self, rref: RRefId, fork: ForkId, source: int, now: float) -> list[Effect]:
        effects: list[Effect] = []
        gone = True
        if not self._is_struck(fork, rref):
            effects = self._open(rref, now)
            owned = self._owned.get(rref)
            if owned is not None:
                owned.forks[fork] = source
                gone = False
        answer = Message(kind=Kind.RREF_FORK_ACCEPTED, rref=rref, fork=fork, gone=gone)
        return [*effects, Send(to=source, message=answer)]

    def delete_arrived(self, rref: RRefId, fork: ForkId, source: int, now: float) -> list[Effect]:
        effects = self.strike_fork(rref, fork, now)
        answer = Message(kind=Kind.RREF_DELETED, rref=rref, fork=fork)
        return [*effects, Send(to=source, message=answer)]

    def strike_fork(self, rref: RRefId, fork: ForkId, now: float) -> list[Effect]:
        self._bury(fork, now)
        owned = self._owned.get(rref)
        if owned is None:
            return []
        owned.forks.pop(fork, None)
        return self._drop_if_unused(rref, owned, now)

    def worker_died(self, worker: int, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for rref in [r for r in self._placeholders if r.created_on == worker]:
            effects += self._drop(rref, Reason.CREATOR_LOST, now)
        for rref, fork, holder in list(self.forks()):
            if holder == worker:
                effects += self.strike_fork(rref, fork, now)
        return effects

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for rref in [r for r, expires in self._placeholders.items() if expires <= now]:
            effects += self._drop(rref, Reason.GONE, now)
        _forget_expired(self._dead_forks, now)
        _forget_expired(self._dead_rrefs, now)
        return effects

    def next_deadline(self) -> float | None:
        firsts = (self._placeholders, self._dead_forks, self._dead_rrefs)
        if not any(firsts):
            return None
        return min(next(iter(times.values())) for times in firsts if times)

    # --- Parts -----------------------------------------------------------------------------------

    def _is_over(self, rref: RRefId) -> bool:
        """Whether an unknown rref was dropped, rather than still to come."""
        return rref.created_on == self._worker_id or rref in self._dead_rrefs

    def _is_struck(self, fork: ForkId, rref: RRefId | None = None) -> bool:
        if fork in self._dead_forks:
            return True
        if rref is None or fork.created_on != self._worker_id:
            return False
        owned = self._owned.get(rref)
        return owned is None or fork not in owned.forks

    def _open(self, rref: RRefId, now: float) -> list[Effect]:
        if rref in self._owned or self._is_over(rref):
            return []
        self._owned[rref] = _Owned(OwnedState.PLACEHOLDER)
        self._placeholders[rref] = now + self._age
        return [HoldValue(rref=rref)]

    def _drop_if_unused(self, rref: RRefId, owned: _Owned, now: float) -> list[Effect]:
        if owned.state is OwnedState.PLACEHOLDER or owned.forks or owned.handles:
            return []
        return self._drop(rref, None, now)

    def _drop(self, rref: RRefId, reason: Reason | None, now: float) -> list[Effect]:
        del self._owned[rref]
        self._placeholders.pop(rref, None)
        if rref.created_on != self._worker_id:
            self._dead_rrefs[rref] = now + self._age
        return [DropValue(rref=rref, reason=reason)]

    def _bury(self, fork: ForkId, now: float) -> None:
        if fork.created_on != self._worker_id:
            self._dead_forks.pop(fork, None)  # so that the newest is last
            self._dead_forks[fork] = now + self._age


def _forget_expired(graves: dict[ForkId, float] | dict[RRefId, float], now: float) -> None:
    expired = []
    for id_, expires in graves.items():
        if expires > now:
            break
        expired.append(id_)
    for id_ in expired:
        del graves[id_]  # type: ignore[arg-type]
