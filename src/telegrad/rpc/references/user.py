"""The user's half of the RRef protocol: a worker's references to values that others own.

`telegrad.rpc.references.protocol` has the theory.

=========  ====================================================================================
state      meaning, and what it waits for
=========  ====================================================================================
(absent)   never made, or over
CREATING   the REMOTE message is under way; its request confirms the reference or fails
FORKING    RREF_FORK is repeated until the owner answers or is lost
CONFIRMED  the owner counts this fork
FAILED     the creation failed; the owner may count this fork, now or later
DELETING   RREF_DELETE is repeated until the owner answers or is lost
LOST       the owner is lost or has no value, so it counts nothing; ends with the last handle
=========  ====================================================================================
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from telegrad.ids import ForkId, RRefId
from telegrad.rpc.references.events import (
    UNKNOWN_WORKER,
    ConfirmUser,
    Effect,
    FailUser,
    ForgetUser,
    Message,
    Reason,
    Send,
    Timing,
)
from telegrad.wire.frames import Kind

__all__ = ["Outbox", "UserLedger", "UserState"]


class UserState(enum.Enum):
    CREATING = enum.auto()
    FORKING = enum.auto()
    CONFIRMED = enum.auto()
    FAILED = enum.auto()
    DELETING = enum.auto()
    LOST = enum.auto()


_PASSABLE = frozenset({UserState.CREATING, UserState.FORKING, UserState.CONFIRMED})
_DELETABLE = frozenset({UserState.CONFIRMED, UserState.FAILED})


@dataclass(slots=True)
class _User:
    rref: RRefId
    fork: ForkId
    owner: int
    state: UserState
    parent: int = UNKNOWN_WORKER
    handles: int = 1
    children: set[ForkId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Child:
    parent: ForkId
    to: int


class UserLedger:
    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._users: dict[ForkId, _User] = {}
        self._children: dict[ForkId, _Child] = {}
        self._is_flushing = False

    # --- What can be asked -----------------------------------------------------------------------

    def state_of(self, fork: ForkId) -> UserState | None:
        user = self._users.get(fork)
        return user.state if user is not None else None

    def can_pass(self, fork: ForkId) -> bool:
        return self.state_of(fork) in _PASSABLE and not self._is_flushing

    def count_pending(self) -> int:
        waiting = (UserState.CREATING, UserState.FORKING)
        return sum(1 for user in self._users.values() if user.state in waiting)

    def references(self) -> Iterable[tuple[RRefId, ForkId, int, UserState]]:
        for user in self._users.values():
            yield user.rref, user.fork, user.owner, user.state

    def is_empty(self) -> bool:
        return not (self._users or self._children)

    # --- Events ----------------------------------------------------------------------------------

    def creation_started(self, rref: RRefId, fork: ForkId, owner: int) -> list[Effect]:
        if fork in self._users:
            return []
        user = self._users[fork] = _User(rref, fork, owner, UserState.CREATING)
        return self._refuse_if_flushing(user)

    def creation_confirmed(self, fork: ForkId, now: float) -> list[Effect]:
        user = self._users.get(fork)
        if user is None or user.state is not UserState.CREATING:
            return []  # it failed before, or the owner is lost: the first outcome stands
        user.state = UserState.CONFIRMED
        return [ConfirmUser(fork=fork), *self._settle(user, now)]

    def creation_failed(self, fork: ForkId, now: float) -> list[Effect]:
        user = self._users.get(fork)
        if user is None or user.state is not UserState.CREATING:
            return []
        user.state = UserState.FAILED
        return self._settle(user, now)

    def passed(self, fork: ForkId, parent: ForkId, to: int) -> list[Effect]:
        user = self._users.get(parent)
        if user is not None and user.state in _PASSABLE:
            self._children[fork] = _Child(parent, to)  # first, in case Ctrl-C comes between the two
            user.children.add(fork)
        return []

    def received(
        self, rref: RRefId, fork: ForkId, owner: int, parent: int, now: float
    ) -> list[Effect]:
        user = self._users.get(fork)
        if user is not None:  # the same bytes were unpacked twice
            user.handles += 0 if self._is_flushing else 1
            return []
        if parent == owner:  # it counted this fork when it made it
            user = self._users[fork] = _User(rref, fork, owner, UserState.CONFIRMED)
            effects: list[Effect] = [ConfirmUser(fork=fork)]
        else:
            user = self._users[fork] = _User(rref, fork, owner, UserState.FORKING, parent)
            effects = [self._send(owner, Kind.RREF_FORK, user, now)]
        effects += self._refuse_if_flushing(user)
        return effects + self._settle(user, now)

    def handle_died(self, fork: ForkId, now: float) -> list[Effect]:
        user = self._users.get(fork)
        if user is None:
            return []
        user.handles = max(0, user.handles - 1)
        return self._settle(user, now)

    def fork_answered(self, fork: ForkId, gone: bool, now: float) -> list[Effect]:
        self._outbox.acknowledge(Kind.RREF_FORK, fork)
        user = self._users.get(fork)
        if user is None or user.state is not UserState.FORKING:
            return []
        if gone:
            return self._lose(user, Reason.GONE, now)
        effects = self._release_parent(user, now)
        user.state = UserState.CONFIRMED
        return [*effects, ConfirmUser(fork=fork), *self._settle(user, now)]

    def child_accepted(self, rref: RRefId, fork: ForkId, source: int, now: float) -> list[Effect]:
        effects = self.release_child(fork, now)
        answer = Message(kind=Kind.RREF_CHILD_ACKNOWLEDGED, rref=rref, fork=fork)
        return [*effects, Send(to=source, message=answer)]

    def child_acknowledged(self, fork: ForkId) -> list[Effect]:
        self._outbox.acknowledge(Kind.RREF_CHILD_ACCEPTED, fork)
        return []

    def deleted(self, fork: ForkId) -> list[Effect]:
        self._outbox.acknowledge(Kind.RREF_DELETE, fork)
        if self.state_of(fork) is not UserState.DELETING:
            return []
        return self._forget(self._users[fork])

    def release_child(self, fork: ForkId, now: float) -> list[Effect]:
        """The child no longer needs its parent."""
        child = self._children.pop(fork, None)
        if child is None:
            return []
        user = self._users[child.parent]
        user.children.discard(fork)
        return self._settle(user, now)

    def worker_died(self, worker: int, now: float) -> list[Effect]:
        self._outbox.strike_off(worker)
        effects: list[Effect] = []
        for user in [u for u in self._users.values() if u.owner == worker]:
            effects += self._lose(user, Reason.OWNER_LOST, now)
        for fork in [f for f, child in self._children.items() if child.to == worker]:
            effects += self.release_child(fork, now)
        return effects

    def flush_started(self, now: float) -> list[Effect]:
        self._is_flushing = True
        effects: list[Effect] = []
        for user in list(self._users.values()):
            effects += self._refuse_if_flushing(user)
            effects += self._settle(user, now)
        return effects

    # --- Parts -----------------------------------------------------------------------------------

    def _send(self, to: int, kind: Kind, user: _User, now: float) -> Send:
        return self._outbox.send(to, Message(kind=kind, rref=user.rref, fork=user.fork), now)

    def _refuse_if_flushing(self, user: _User) -> list[Effect]:
        if not self._is_flushing:
            return []
        user.handles = 0
        return [FailUser(fork=user.fork, reason=Reason.DELETED)]

    def _settle(self, user: _User, now: float) -> list[Effect]:
        """Ends the reference if nothing here needs it."""
        if user.handles or user.children:
            return []
        if user.state is UserState.LOST:
            return self._forget(user)
        if user.state in _DELETABLE:
            user.state = UserState.DELETING
            return [self._send(user.owner, Kind.RREF_DELETE, user, now)]
        return []

    def _lose(self, user: _User, reason: Reason, now: float) -> list[Effect]:
        if user.state is UserState.LOST:
            return []
        if user.state is UserState.DELETING:
            return self._forget(user)
        effects: list[Effect] = []
        if user.state is UserState.FORKING:  # its parent may still have the owner, and wait
            effects += self._release_parent(user, now)
        user.state = UserState.LOST
        for fork in user.children:  # it no longer protects them
            del self._children[fork]
        user.children.clear()
        return [*effects, FailUser(fork=user.fork, reason=reason), *self._settle(user, now)]

    def _release_parent(self, user: _User, now: float) -> list[Effect]:
        if user.parent == UNKNOWN_WORKER:
            return []
        return [self._send(user.parent, Kind.RREF_CHILD_ACCEPTED, user, now)]

    def _forget(self, user: _User) -> list[Effect]:
        del self._users[user.fork]
        return [ForgetUser(fork=user.fork)]


@dataclass(slots=True)
class _Unacknowledged:
    send: Send
    wait: float
    due: float


class Outbox:
    """Control messages that are sent again until they are acknowledged.

    A message is identified by its kind and fork: its acknowledgement finds it, and a repetition
    changes nothing. Waits double from `retry_first` to `retry_last`. Only an acknowledgement or the
    loss of the receiver ends them. An acknowledged message leaves the heap when it comes up.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._waiting: dict[tuple[Kind, ForkId], _Unacknowledged] = {}
        self._heap: list[tuple[float, Kind, ForkId]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, to: int, message: Message, now: float) -> Send:
        send = Send(to=to, message=message)
        key = (message.kind, message.fork)
        wait = self._timing.retry_first
        self._waiting[key] = _Unacknowledged(send, wait, now + wait)
        heapq.heappush(self._heap, (now + wait, *key))
        return send

    def acknowledge(self, kind: Kind, fork: ForkId) -> None:
        self._waiting.pop((kind, fork), None)

    def strike_off(self, worker: int) -> None:
        """Nothing more is sent to this worker."""
        for key in [key for key, item in self._waiting.items() if item.send.to == worker]:
            del self._waiting[key]

    def due(self, now: float) -> list[Send]:
        """The messages to send again, now."""
        sends = []
        while (next_due := self.next_deadline()) is not None and next_due <= now:
            _, kind, fork = heapq.heappop(self._heap)
            item = self._waiting[kind, fork]
            item.wait = min(2 * item.wait, self._timing.retry_last)
            item.due = now + item.wait
            heapq.heappush(self._heap, (item.due, kind, fork))
            sends.append(item.send)
        return sends

    def next_deadline(self) -> float | None:
        while self._heap:
            due, kind, fork = self._heap[0]
            item = self._waiting.get((kind, fork))
            if item is not None and item.due == due:
                return due
            heapq.heappop(self._heap)
        return None
