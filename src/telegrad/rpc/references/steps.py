"""Runs the RRef protocol on one agent: feeds the machine of `protocol` with events, and carries out
its effects.

Each event is a step of `telegrad.locks.Turns`, so destructors may make, pass on and use references
at any moment. Messages are sent, callbacks run and values die after a step. What a caller needs at
once is in one of two dicts, which hold a new entry or user before the machine knows it.

Ctrl-C may end a step half-way, on the main thread only. So that thread leaves the frequent steps,
of making references and passing them on, to the housekeeper's thread. The order of the steps stays
the same. No thread waits for them: the step that answers a message comes after them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from telegrad.errors import TelegradError, WorkerLost
from telegrad.ids import ForkId, RRefId
from telegrad.locks import Turns
from telegrad.rpc.references import events as ev
from telegrad.rpc.references import texts
from telegrad.rpc.references.housekeeper import Handle, Housekeeper
from telegrad.rpc.references.in_messages import Made
from telegrad.rpc.references.protocol import RRefProtocol
from telegrad.rpc.references.records import OwnerEntry, UserRecord
from telegrad.rpc.seams import Messenger, Timer
from telegrad.wire.frames import Kind

__all__ = ["Steps", "fail_user"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_CONTROL_KINDS = (
    Kind.RREF_FORK,
    Kind.RREF_FORK_ACCEPTED,
    Kind.RREF_CHILD_ACCEPTED,
    Kind.RREF_CHILD_ACKNOWLEDGED,
    Kind.RREF_DELETE,
    Kind.RREF_DELETED,
)

_OF_NEW_REFERENCES = (Kind.RREF_FORK, Kind.RREF_CHILD_ACCEPTED)
"""Messages about a new reference. It may name a worker that counts as lost here: the worker that
passed it on has reached that one since the loss, so this worker tries, too. Nothing else is sent to
a lost worker, since the loss has ended all older references."""

Callbacks = list[Callable[[], None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """
    Args:
        tick: whether the armed timer has fired.
        entry: fills the place that the events open.
        record: the user that the events are about.
        reason: of a loss, for error texts.
        first: runs before the events, even if the table is closed; returns callbacks to run after
            the step.
    """

    events: Sequence[ev.Event] = ()
    tick: bool = False
    entry: OwnerEntry | None = None
    record: UserRecord | None = None
    reason: str = ""
    first: Callable[[], Callbacks] | None = None


class Steps:
    """The protocol's machine with its entries and users. Safe to use from any thread.

    Args:
        messenger: carries the control messages; their handlers are registered here.
        clock: gives the time to the machine.
    """

    def __init__(
        self,
        messenger: Messenger,
        timing: ev.Timing | None,
        clock: Callable[[], float],
    ) -> None:
        self._messenger = messenger
        self._clock = clock
        self._main_thread = threading.main_thread().ident
        self.housekeeper = Housekeeper(f"telegrad-rrefs-{messenger.worker_id}", self._heed)
        self._turns = Turns("the table of references")  # guards all below
        self._changed = threading.Event()  # set by each step of a flush
        self.machine = RRefProtocol(messenger.worker_id, timing)
        self.entries: dict[RRefId, OwnerEntry] = {}
        self.users: dict[ForkId, UserRecord] = {}
        self.is_closed = False
        self._armed_for: float | None = None
        self._timer: Timer | None = None
        self._is_flushing = False
        for kind in _CONTROL_KINDS:
            messenger.handle(kind, partial(self._message_arrived, kind))
        messenger.watch_losses(self.worker_lost)

    # -- steps

    def apply(
        self,
        *events: ev.Event,
        tick: bool = False,
        reason: str = "",
        record: UserRecord | None = None,
        first: Callable[[], Callbacks] | None = None,
    ) -> None:
        """Feeds the machine, and carries out its effects; see `_Step`. They are done on return,
        unless another step is under way: then they follow it."""
        step = _Step(events=events, tick=tick, reason=reason, record=record, first=first)
        self._turns.take(partial(self._run, step))

    def apply_soon(
        self,
        *events: ev.Event,
        entry: OwnerEntry | None = None,
        record: UserRecord | None = None,
    ) -> None:
        """The same, but the main thread leaves it to the housekeeper's thread."""
        step = _Step(events=events, entry=entry, record=record)
        if threading.get_ident() != self._main_thread or not self.housekeeper.is_running:
            self._turns.take(partial(self._run, step))
            return
        self._turns.leave(partial(self._run, step))
        self.housekeeper.note(())

    def exclusively(self, look: Callable[[], _T]) -> _T:
        """Runs `look` between two steps, after all that were taken before."""
        return self._turns.exclusively(look)

    def abandon(self, made: Iterable[Made]) -> None:
        """These references were packed into a message that is not sent."""
        self.apply_soon(*(ev.PassingAbandoned(rref=rref, fork=fork) for rref, fork in made))

    # -- what happens elsewhere

    def worker_lost(self, worker: int, reason: str = "") -> None:
        self.apply(ev.WorkerDied(worker=worker), reason=reason)

    def _message_arrived(self, kind: Kind, source: int, bodies: list[Any]) -> None:
        self.apply(
            *(
                ev.MessageArrived(source=source, message=ev.Message.from_body(kind, body))
                for body in bodies
            )
        )

    def _heed(self, deaths: list[Handle], unsent: list[Made], deadlines: list[float]) -> None:
        events: list[ev.Event] = [
            ev.HandleDied(rref=handle.rref_id, fork=handle.fork_id) for handle in deaths
        ]
        events += [ev.PassingAbandoned(rref=rref, fork=fork) for rref, fork in unsent]
        self.apply(*events, tick=self._armed_for in deadlines)  # other timers were replaced

    # -- the end

    def flush(
        self,
        timeout: float | None,
        patience: float | None,
        is_done: Callable[[], bool],
        open_now: Callable[[], list[str]],
    ) -> list[str]:
        """Ends all users, and waits until `is_done` between two steps, for `timeout` seconds, or
        until nothing has changed for `patience` seconds. Returns what `open_now` says then."""
        self.housekeeper.drain()
        # A program that keeps the KeyboardInterrupt of a call keeps the message that was not sent.
        self.abandon(self.housekeeper.take_unsent())
        self.apply(ev.FlushStarted())
        self._is_flushing = True
        end = None if timeout is None else time.monotonic() + timeout
        before: list[str] = []
        while True:
            self._changed.clear()
            is_over, now = self.exclusively(lambda: (self.is_closed or is_done(), open_now()))
            if is_over or (end is not None and time.monotonic() >= end):
                return now
            if not self._changed.wait(_least(end, patience)) and now == before:
                return now
            before = now

    def close(self) -> list[OwnerEntry]:
        """Fails all users. Returns the entries, for the caller to fail what waits for them."""
        self.is_closed = True
        callbacks: Callbacks = []

        def let_go() -> tuple[list[OwnerEntry], Timer | None]:
            entries, users = list(self.entries.values()), list(self.users.values())
            self.entries.clear()
            self.users.clear()
            timer, self._timer = self._timer, None
            for record in users:
                error = partial(texts.deleted, record.rref_id, record.fork_id)
                callbacks.extend(fail_user(record, error))
            return entries, timer

        entries, timer = self.exclusively(let_go)
        self._changed.set()
        if timer is not None:
            timer.cancel()
        for callback in callbacks:
            callback()
        return entries

    # -- one step

    def _run(self, step: _Step) -> Callable[[], None] | None:
        sends: list[ev.Send] = []
        later: Callbacks = step.first() if step.first is not None else []
        trash: list[Any] = []  # dies after the step: values run user code
        deadline: float | None = None
        now = self._clock()
        if not self.is_closed:
            if step.record is not None:
                self.users.setdefault(step.record.fork_id, step.record)
            effects: list[ev.Effect] = []
            if step.tick:
                self._armed_for = None
                effects += self.machine.tick(now)
            for event in step.events:
                effects += self.machine.handle(event, now)
            for effect in effects:
                match effect:
                    case ev.Send():
                        sends.append(effect)
                    case ev.HoldValue(rref=rref):
                        self.entries.setdefault(rref, step.entry or OwnerEntry(rref))
                    case ev.DropValue(rref=rref, reason=why):
                        dropped = self.entries.pop(rref)
                        trash.append(dropped)
                        if why is not None:
                            later.append(partial(self._fail_value, dropped, why, step.reason))
                    case ev.ConfirmUser(fork=fork):
                        user = self.users[fork]
                        user.is_confirmed = True
                        later += user.callbacks
                        user.callbacks = []
                    case ev.FailUser(fork=fork, reason=why):
                        user = self.users[fork]
                        later += fail_user(user, partial(self._bad_user, user, why, step.reason))
                    case ev.ForgetUser(fork=fork):
                        trash.append(self.users.pop(fork))
            deadline = self.machine.next_deadline()
            if deadline is not None and self._armed_for is not None:
                deadline = deadline if deadline < self._armed_for else None
            if deadline is not None:
                self._armed_for = deadline
            if self._is_flushing:
                self._changed.set()
        if deadline is None and not sends and not later and not trash:
            return None
        return partial(self._carry_out, deadline, now, sends, later, trash)

    def _carry_out(
        self,
        deadline: float | None,
        now: float,
        sends: list[ev.Send],
        later: Callbacks,
        trash: list[Any],
    ) -> None:
        trash.clear()
        if deadline is not None:
            self._arm(deadline, deadline - now)
        if sends:  # before the callbacks, which may run for long
            self._send(sends)
        for callback in later:
            callback()

    def _send(self, sends: list[ev.Send]) -> None:
        """Sends messages of one kind to one worker together: many references often die at once."""
        together: dict[tuple[int, Kind], list[Any]] = {}
        for send in sends:
            together.setdefault((send.to, send.message.kind), []).append(send.message.body())
        for (to, kind), bodies in together.items():
            try:
                self._messenger.post(to, kind, bodies, reach=kind in _OF_NEW_REFERENCES)
            except WorkerLost as loss:
                self.worker_lost(to, loss.reason)
            except TelegradError as error:
                # The agent may be shutting down. The machine repeats the message if it matters.
                _log.debug("%s to worker %d not sent: %s", kind.name, to, error)

    def _arm(self, deadline: float, seconds: float) -> None:
        note = partial(self.housekeeper.note, deadline)
        timer = self._messenger.call_later(max(0.0, seconds), note)

        def keep() -> Callbacks:
            # If another thread has armed an earlier timer meanwhile, that one stays.
            unused: Timer | None = timer
            if deadline == self._armed_for and not self.is_closed:
                unused, self._timer = self._timer, timer
            return [] if unused is None else [unused.cancel]

        self.apply(first=keep)

    # -- errors

    def _fail_value(self, entry: OwnerEntry, why: ev.Reason, reason: str) -> None:
        rref_id = entry.rref_id
        if why is ev.Reason.CREATOR_LOST:
            creator = self._messenger.name_of(rref_id.created_on)
            entry.set_error(texts.creator_lost(rref_id, creator, reason))
        else:
            entry.set_error(texts.value_gone(rref_id, self._messenger.worker_id))

    def _bad_user(self, record: UserRecord, why: ev.Reason, reason: str, attempt: str) -> Exception:
        if why is ev.Reason.DELETED:
            return texts.deleted(record.rref_id, record.fork_id, attempt)
        owner = self._messenger.name_of(record.owner)
        if why is ev.Reason.OWNER_LOST:
            return texts.owner_lost(record.rref_id, owner, reason, attempt)
        return texts.value_never_found(record.rref_id, owner, attempt)


def fail_user(record: UserRecord, error: Callable[[str], Exception]) -> Callbacks:
    """Sets the error of a user, inside a step; the first one stands. Returns the callbacks to run
    after the step."""
    if record.error is None:
        record.error = error
    callbacks, record.callbacks = record.callbacks, []
    return callbacks


def _least(end: float | None, patience: float | None) -> float | None:
    """How long to wait now."""
    left = None if end is None else max(0.0, end - time.monotonic())
    if left is None or patience is None:
        return patience if left is None else left
    return min(left, patience)
