"""The RRef protocol at work on one agent: `RRefTable`.

It feeds the machine of `protocol` with what happens, and carries out what the machine asks for.
Each event is a step of `telegrad.locks.Turns`, so a destructor may make, pass on and use references
wherever it comes; messages are sent, callbacks run and values die after a step. What
a caller needs at once is in one of two dicts, which hold a new entry or user before the machine
knows of it.

Ctrl-C may end a step half-way on the main thread, and no other. So what programs do all the time,
making references and passing them on, that thread leaves to the housekeeper's. The order of the
steps stays, and nothing waits for them: what answers a message takes its own step behind.

The death of a handle, and the passing of time, reach the table through
`telegrad.rpc.references.housekeeper`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn, Protocol

from telegrad.errors import NotInitialized, RRefError, SerializationError, TelegradError, WorkerLost
from telegrad.ids import ForkId, RRefId
from telegrad.locks import Turns
from telegrad.rpc.references import events as ev
from telegrad.rpc.references import texts
from telegrad.rpc.references.housekeeper import Handle, Housekeeper
from telegrad.rpc.references.in_messages import Made, PackedReferences
from telegrad.rpc.references.protocol import RRefProtocol
from telegrad.rpc.references.records import Creation, OwnerEntry, UserRecord
from telegrad.rpc.references.rref import RRef, rebuild_rref
from telegrad.rpc.seams import Messenger, Timer
from telegrad.wire.frames import Kind

__all__ = ["Call", "Fetch", "RRefTable", "WorkerInfo"]

_log = logging.getLogger(__name__)

_MOST_NOTED = 64

_CONTROL_KINDS = (
    Kind.RREF_FORK,
    Kind.RREF_FORK_ACCEPTED,
    Kind.RREF_CHILD_ACCEPTED,
    Kind.RREF_CHILD_ACKNOWLEDGED,
    Kind.RREF_DELETE,
    Kind.RREF_DELETED,
)

_OF_NEW_REFERENCES = (Kind.RREF_FORK, Kind.RREF_CHILD_ACCEPTED)
"""What a new reference asks for. It may name a worker that counts as lost here: whoever passed the
reference on has reached that worker since, and so may this one. Of what was open at the loss
nothing is sent any more, so what follows is always about new references."""

Fetch = Callable[[int, RRefId, ForkId, float], Any]
"""`fetch(owner, rref_id, fork_id, timeout)` gives a copy of the value."""

Call = Callable[[str, int, Callable[..., Any], tuple[Any, ...], dict[str, Any], float], Any]
"""`call(mode, owner, function, args, kwargs, timeout)`; mode is "sync", "async" or "remote"."""


class WorkerInfo(Protocol):
    @property
    def id(self) -> int: ...
    @property
    def name(self) -> str: ...


class _Unpacking(threading.local):
    """What this thread is unpacking."""

    def __init__(self) -> None:
        # Weak: what is unpacked other than for a call is taken by nobody.
        self.unconfirmed: list[weakref.ref[RRef[Any]]] = []


class RRefTable:
    """All that one agent knows of remote references. Safe to use from any thread.

    Args:
        messenger: carries the control messages; the table registers its handlers with it.
        fetch: how a user gets the value.
        call: how a method of the value is called at its owner.
        bound_here: a function as it would run on this thread now, wherever it is run.
        worker_info: a worker's id and name, by its id.
        first_id: where local ids begin; a worker that comes back under its id after a crash
            must begin above those that it used before.
    """

    def __init__(
        self,
        messenger: Messenger,
        *,
        fetch: Fetch,
        call: Call,
        bound_here: Callable[[Callable[[Any], None]], Callable[[Any], None]],
        worker_info: Callable[[int], WorkerInfo],
        timing: ev.Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
        first_id: int = 0,
    ) -> None:
        self.worker_id = messenger.worker_id
        self.fetch = fetch
        self.call = call
        self.bound_here = bound_here
        self.worker_info = worker_info
        self._messenger = messenger
        self._clock = clock
        self._ids = itertools.count(first_id)
        self._main_thread = threading.main_thread().ident
        self._unpacking = _Unpacking()
        self._housekeeper = Housekeeper(f"telegrad-rrefs-{self.worker_id}", self._heed)

        self._turns = Turns("the table of references")  # guards all below
        self._changed = threading.Event()  # since `flush` has looked last
        self._machine = RRefProtocol(messenger.worker_id, timing)
        self._entries: dict[RRefId, OwnerEntry] = {}
        self._users: dict[ForkId, UserRecord] = {}
        self._creations: dict[ForkId, Creation] = {}  # a call may outlive its reference
        self._armed_for: float | None = None
        self._timer: Timer | None = None
        self._is_flushing = False
        self._others_stay = False
        self._is_closed = False
        self._refusal: Callable[[], NotInitialized] | None = None  # see `leave_to_parent`

        for kind in _CONTROL_KINDS:
            messenger.handle(kind, partial(self._message_arrived, kind))
        messenger.watch_losses(self.worker_lost)

    # --- Its life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the table's own thread. Without it, `drain` must be called."""
        self._housekeeper.start()

    def flush(
        self,
        timeout: float | None = None,
        patience: float | None = None,
        *,
        others_stay: bool = False,
    ) -> list[str]:
        """Ends all of this worker's references to others' values, and waits until no reference
        crosses its border any more, either way. For a graceful shutdown, on all workers at once,
        followed by a barrier and `close`.

        The wait ends when the owners have acknowledged, when the other workers have ended their
        references to values here (or are lost), after `timeout` seconds, or when nothing has
        changed for `patience` seconds.

        Args:
            others_stay: this worker leaves alone. The others do not end their references to values
                here, and are not waited for.

        Returns:
            what is still open, in words; empty if all went well.
        """
        self.drain()
        # Whoever keeps the KeyboardInterrupt of a call keeps what it was about to send.
        self.abandon(self._housekeeper.take_unsent())
        self._apply([ev.FlushStarted()])
        self._is_flushing, self._others_stay = True, others_stay
        end = None if timeout is None else time.monotonic() + timeout
        open_before: list[str] = []
        while True:
            self._changed.clear()
            is_done, open_now = self._turns.exclusively(
                lambda: (self._is_done(), self._describe_open())
            )
            if is_done or (end is not None and time.monotonic() >= end):
                return open_now
            if not self._changed.wait(_least(end, patience)) and open_now == open_before:
                return open_now
            open_before = open_now

    def _is_done(self) -> bool:
        machine = self._machine
        is_done = machine.has_let_go() if self._others_stay else machine.is_settled()
        return self._is_closed or is_done

    def close(self) -> None:
        """Lets go of everything; whoever still waits is told. Values stay with local RRefs."""
        if self._is_closed:
            return
        self._is_closed = True
        callbacks: list[Callable[[], None]] = []

        def let_go() -> tuple[dict[RRefId, OwnerEntry], Timer | None]:
            entries, self._entries = self._entries, {}
            users, self._users = self._users, {}
            timer, self._timer = self._timer, None
            for record in users.values():
                error = partial(texts.deleted, record.rref_id, record.fork_id)
                callbacks.extend(self._fail(record, error))
            return entries, timer

        entries, timer = self._turns.exclusively(let_go)
        self._changed.set()
        if timer is not None:
            timer.cancel()
        for creation in list(self._creations.values()):
            creation.settle(NotInitialized("the RPC agent was shut down"))
        for entry in entries.values():
            entry.set_error(NotInitialized("the RPC agent was shut down"))  # if nothing else came
        for callback in callbacks:
            callback()
        self._housekeeper.stop()

    def leave_to_parent(self, refusal: Callable[[], NotInitialized]) -> None:
        """In a forked process: its references are good for nothing there, and their ends are not
        noted. A value that this worker owned, and that was there at the fork, can still be read."""

        def refuse(*args: Any) -> NoReturn:
            raise refusal()

        self._is_closed = True
        self._refusal = refusal
        self.fetch = self.call = self.worker_info = refuse

    def refuse_if_forked(self) -> None:
        """For uses that would take a lock, or wait for what comes to the parent.

        Raises:
            NotInitialized: the worker of this table is that of the parent process.
        """
        if self._refusal is not None:
            raise self._refusal()

    # --- Creation, at the creator ----------------------------------------------------------------

    def new_entry(self, value: Any, type_hint: Any = None) -> OwnerEntry:
        return OwnerEntry(RRefId(*self._new_id()), value, type_hint)

    def adopt(self, rref: RRef[Any]) -> None:
        """A value of this worker's own; `rref` is its one handle."""
        entry = rref._record
        if isinstance(entry, OwnerEntry) and not self._is_closed:
            self._entries[entry.rref_id] = entry
            self._apply_soon([ev.ValueMade(rref=entry.rref_id)], entry=entry)

    def new_owned(self) -> tuple[OwnerEntry, RRef[Any]]:
        """For `remote()` to oneself: the entry is to be filled by the caller."""
        entry = OwnerEntry(RRefId(*self._new_id()))
        rref = RRef._of(self, entry)
        self.adopt(rref)
        return entry, rref

    def new_user(self, owner: int) -> tuple[RRefId, ForkId, RRef[Any]]:
        """For `remote()` to another worker: the ids for its REMOTE message, and the reference.

        One of `creation_finished` and `creation_failed` must follow, sooner or later.
        """
        rref_id, fork_id = RRefId(*self._new_id()), ForkId(*self._new_id())
        record = UserRecord(rref_id, fork_id, owner)
        event = ev.CreationStarted(rref=rref_id, fork=fork_id, owner=owner)
        try:
            record.creation = self._creations[fork_id] = Creation()
            rref = RRef._of(self, record)
            self._users[fork_id] = record
            self._apply_soon([event], record=record)
            return rref_id, fork_id, rref
        except BaseException as error:  # Ctrl-C: nobody knows of it yet
            self.creation_failed(fork_id, RRefError(f"it was not sent: {type(error).__name__}"))
            raise

    def creation_confirmed(self, fork_id: ForkId) -> None:
        """The owner has registered the fork; the function may still be running."""
        self._apply_soon([ev.CreationConfirmed(fork=fork_id)])

    def creation_finished(self, fork_id: ForkId) -> None:
        """The owner has answered the REMOTE request; a raised exception is an answer, too."""
        self._apply([ev.CreationConfirmed(fork=fork_id)])
        creation = self._creations.pop(fork_id, None)
        if creation is not None:
            creation.settle(None)

    def creation_failed(self, fork_id: ForkId, error: Exception) -> None:
        """The REMOTE request ended in `error`, not in an answer."""

        def fail() -> list[Callable[[], None]]:
            record = self._users.get(fork_id)
            # Also if it was confirmed before: the call as a whole has failed.
            return (
                [] if record is None else self._fail(record, lambda _: texts.creation_error(error))
            )

        # At once: whoever asks for the value next hears of it.
        self._apply([ev.CreationFailed(fork=fork_id)], first=fail)
        creation = self._creations.pop(fork_id, None)
        if creation is not None:
            creation.settle(error)

    # --- At the owner ----------------------------------------------------------------------------

    def owner_created(self, rref_id: RRefId, fork_id: ForkId, creator: int) -> OwnerEntry:
        """A REMOTE message has arrived. The caller runs the function and fills the entry, which
        is kept by nobody else if the creator has given up in the meantime."""
        event = ev.CreationArrived(rref=rref_id, fork=fork_id, creator=creator)
        entry = self._entry_after(event, rref_id)
        return entry if entry is not None else OwnerEntry(rref_id)

    def entry(self, rref_id: RRefId) -> OwnerEntry:
        """The value by its id, also if its REMOTE message is still under way.

        Raises:
            RRefError: it is gone.
        """
        entry = self._entries.get(rref_id)
        if entry is None:
            entry = self._entry_after(ev.ValueWanted(rref=rref_id), rref_id)
        if entry is None:
            raise texts.value_gone(rref_id, self.worker_id)
        return entry

    def _entry_after(self, event: ev.Event, rref_id: RRefId) -> OwnerEntry | None:
        self._apply([event])
        return self._turns.exclusively(lambda: self._entries.get(rref_id))

    # --- Packing and unpacking -------------------------------------------------------------------

    def new_references(self) -> PackedReferences:
        """For a message that is to be packed. If it goes without that it was sent, the references
        in it are abandoned."""
        housekeeper = self._housekeeper
        return PackedReferences(self.abandon, housekeeper.unsent, housekeeper.note)

    def reduce(
        self, rref: RRef[Any], destination: int | None, packed: PackedReferences | None = None
    ) -> tuple[Any, tuple[Any]]:
        """What the codec packs in the place of `rref`, in a message to worker `destination`."""
        return rebuild_rref, (self.fork(rref, destination, packed),)

    def fork(
        self, rref: RRef[Any], destination: int | None, packed: PackedReferences | None = None
    ) -> tuple[Any, ...]:
        """A child of `rref` as plain data; it must be unpacked once, or abandoned.

        Args:
            packed: is told of the child before anything else is, so that Ctrl-C cannot lose it.

        Raises:
            RRefError, WorkerLost: the reference is not good any more.
        """
        record = rref._record
        if rref._table is not self:
            rref._table.refuse_if_forked()
            raise RRefError(f"{rref} belongs to another agent than the one that packs it")
        parent = self.worker_id
        fork_id = ForkId(*self._new_id())
        if isinstance(record, OwnerEntry):
            rref._check_creation()
            if self._entries.get(record.rref_id) is not record:
                raise texts.value_gone(record.rref_id, self.worker_id)
            owner, parent_fork = self.worker_id, None
            if destination is None:
                parent = ev.UNKNOWN_WORKER
        else:
            record.check("fork an UserRRef")
            if self._users.get(record.fork_id) is not record:
                raise texts.deleted(record.rref_id, record.fork_id, "fork an UserRRef")
            owner, parent_fork = record.owner, record.fork_id
        if packed is not None:
            packed.made.append((record.rref_id, fork_id))
        event = ev.ReferencePassed(
            rref=record.rref_id,
            fork=fork_id,
            parent=parent_fork,
            to=destination if destination is not None else ev.UNKNOWN_WORKER,
        )
        self._apply_soon([event])
        return (owner, *record.rref_id, *fork_id, parent, "")

    def abandon(self, made: Iterable[Made]) -> None:
        """These forks were packed into a message that was never sent, or were about to be."""
        self._apply_soon([ev.PassingAbandoned(rref=rref, fork=fork) for rref, fork in made])

    def rebuild(self, fields: tuple[Any, ...]) -> RRef[Any]:
        """Unpacks what `fork` made."""
        if not isinstance(fields, tuple) or len(fields) != 7:
            raise SerializationError("Pickled RRefForkData must contain 7 numbers.")
        owner, parent = fields[0], fields[5]
        rref_id, fork_id = RRefId(*fields[1:3]), ForkId(*fields[3:5])
        event = ev.ReferenceReceived(rref=rref_id, fork=fork_id, owner=owner, parent=parent)
        if owner == self.worker_id:
            entry = self._entries.get(rref_id)
            if entry is None:
                entry = self._entry_after(event, rref_id)
                if entry is None:
                    entry = OwnerEntry(rref_id)
                    entry.set_error(texts.value_gone(rref_id, self.worker_id))
                return RRef._of(self, entry)
            rref = RRef._of(self, entry)
            self._apply_soon([event])  # until then the fork keeps the value
            return rref
        if self._is_closed:
            record = UserRecord(rref_id, fork_id, owner)
            record.error = partial(texts.deleted, rref_id, fork_id)
            return RRef._of(self, record)
        record = self._users.setdefault(fork_id, UserRecord(rref_id, fork_id, owner))
        rref = RRef._of(self, record)
        if parent == owner:
            record.is_confirmed = True  # it counted this fork when it made it
        self._apply_soon([event], record=record)
        if not record.is_settled:
            noted = self._unpacking.unconfirmed
            if len(noted) >= _MOST_NOTED:
                noted[:] = [note for note in noted if note() is not None]
            noted.append(weakref.ref(rref))
        return rref

    def take_unconfirmed(self) -> list[RRef[Any]]:
        """The references unpacked on this thread, and not taken yet, whose owner does not know of
        them. A function that gets such arguments is not to be run before `when_confirmed`."""
        noted = self._unpacking.unconfirmed
        if not noted:
            return []
        self._unpacking.unconfirmed = []
        return [rref for note in noted if (rref := note()) is not None]

    def when_confirmed(self, rrefs: list[RRef[Any]], callback: Callable[[], None]) -> None:
        """Runs `callback` once each is confirmed or has failed; at once, if so. Their owners'
        answers end the wait, or their loss, or `close`."""
        waiting = itertools.count(1)
        total = len(rrefs) + 1

        def one_done() -> None:
            if next(waiting) == total:
                callback()

        def wait_for(record: OwnerEntry | UserRecord) -> list[Callable[[], None]]:
            if isinstance(record, OwnerEntry) or record.is_settled or self._is_closed:
                return [one_done]
            record.callbacks.append(one_done)
            return []

        for rref in rrefs:
            self._apply([], first=partial(wait_for, rref._record))
        one_done()

    # --- What happens elsewhere ------------------------------------------------------------------

    def worker_lost(self, worker: int, reason: str = "") -> None:
        """Also to be called when an answer to a REMOTE message finds its creator gone."""
        self._apply([ev.WorkerDied(worker=worker)], reason=reason)

    def _message_arrived(self, kind: Kind, source: int, bodies: list[Any]) -> None:
        self._apply(
            [
                ev.MessageArrived(source=source, message=ev.Message.from_body(kind, body))
                for body in bodies
            ]
        )

    def watch(self, rref: RRef[Any], record: OwnerEntry | UserRecord) -> Handle:
        """Called before the machine counts the handle, so that none is lost on the way."""
        fork_id = record.fork_id if isinstance(record, UserRecord) else None
        return self._housekeeper.watch(rref, record.rref_id, fork_id)

    def note_death(self, handle: Handle) -> None:
        if not self._is_closed:
            self._housekeeper.note((handle,))

    def drain(self) -> None:
        """Does what died handles and timers ask for, now. For tests, and tables not started."""
        self._housekeeper.drain()

    def _heed(self, deaths: list[Handle], unsent: list[Made], deadlines: list[float]) -> None:
        events: list[ev.Event] = [
            ev.HandleDied(rref=handle.rref_id, fork=handle.fork_id) for handle in deaths
        ]
        events += [ev.PassingAbandoned(rref=rref, fork=fork) for rref, fork in unsent]
        self._apply(events, tick=self._armed_for in deadlines)  # others' timers were replaced

    # --- Carrying out ----------------------------------------------------------------------------

    def _apply(
        self,
        events: list[ev.Event],
        *,
        tick: bool = False,
        entry: OwnerEntry | None = None,
        record: UserRecord | None = None,
        reason: str = "",
        first: Callable[[], list[Callable[[], None]]] | None = None,
    ) -> None:
        """Feeds the machine, and carries out what it asks for. On return that has been done, unless
        another step is just under way: then it follows that one.

        Args:
            tick: whether the armed timer has fired.
            entry: takes the place that the events open.
            record: the user that the events speak of.
            first: runs before the events, also if the table is closed; returns what is to be called
                afterwards.
        """
        self._turns.take(partial(self._step, events, tick, entry, record, reason, first))

    def _apply_soon(
        self,
        events: list[ev.Event],
        *,
        entry: OwnerEntry | None = None,
        record: UserRecord | None = None,
        first: Callable[[], list[Callable[[], None]]] | None = None,
    ) -> None:
        """The same, but the main thread leaves it to the housekeeper's."""
        if threading.get_ident() != self._main_thread or not self._housekeeper.is_running:
            self._apply(events, entry=entry, record=record, first=first)
            return
        self._turns.leave(partial(self._step, events, False, entry, record, "", first))
        self._housekeeper.note(())

    def _step(
        self,
        events: list[ev.Event],
        tick: bool,
        entry: OwnerEntry | None,
        record: UserRecord | None,
        reason: str,
        first: Callable[[], list[Callable[[], None]]] | None,
    ) -> Callable[[], None] | None:
        sends: list[ev.Send] = []
        later: list[Callable[[], None]] = first() if first is not None else []
        trash: list[Any] = []  # dies after the step: values run user code
        deadline: float | None = None
        now = self._clock()
        if not self._is_closed:
            if record is not None:
                self._users.setdefault(record.fork_id, record)
            effects: list[ev.Effect] = []
            if tick:
                self._armed_for = None
                effects += self._machine.tick(now)
            for event in events:
                effects += self._machine.handle(event, now)
            for effect in effects:
                match effect:
                    case ev.Send():
                        sends.append(effect)
                    case ev.HoldValue(rref=rref):
                        self._entries.setdefault(rref, entry or OwnerEntry(rref))
                    case ev.DropValue(rref=rref, reason=why):
                        dropped = self._entries.pop(rref)
                        trash.append(dropped)
                        if why is not None:
                            later.append(partial(self._fail_value, dropped, why, reason))
                    case ev.ConfirmUser(fork=fork):
                        user = self._users[fork]
                        user.is_confirmed = True
                        later += user.callbacks
                        user.callbacks = []
                    case ev.FailUser(fork=fork, reason=why):
                        user = self._users[fork]
                        later += self._fail(user, partial(self._bad_user, user, why, reason))
                    case ev.ForgetUser(fork=fork):
                        trash.append(self._users.pop(fork))
            deadline = self._machine.next_deadline()
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
        later: list[Callable[[], None]],
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
        """Messages of one kind to one worker travel together: references often die in swarms."""
        together: dict[tuple[int, Kind], list[Any]] = {}
        for send in sends:
            together.setdefault((send.to, send.message.kind), []).append(send.message.body())
        for (to, kind), bodies in together.items():
            try:
                self._messenger.post(to, kind, bodies, reach=kind in _OF_NEW_REFERENCES)
            except WorkerLost as loss:
                self._apply([ev.WorkerDied(worker=to)], reason=loss.reason)
            except TelegradError as error:
                # The machine sends it again if it matters; the agent may be shutting down.
                _log.debug("%s to worker %d not sent: %s", kind.name, to, error)

    def _arm(self, deadline: float, seconds: float) -> None:
        note = partial(self._housekeeper.note, deadline)
        timer = self._messenger.call_later(max(0.0, seconds), note)

        def keep() -> list[Callable[[], None]]:
            # Another thread may have armed an earlier one in the meantime: that one stays.
            unused: Timer | None = timer
            if deadline == self._armed_for and not self._is_closed:
                unused, self._timer = self._timer, timer
            return [] if unused is None else [unused.cancel]

        self._apply([], first=keep)

    def _fail_value(self, entry: OwnerEntry, why: ev.Reason, reason: str) -> None:
        entry.set_error(self._lost_value(entry.rref_id, why, reason))

    def _fail(
        self, record: UserRecord, error: Callable[[str], Exception]
    ) -> list[Callable[[], None]]:
        """The first error stands. Returns the callbacks to run after the lock is released."""
        if record.error is None:
            record.error = error
        callbacks, record.callbacks = record.callbacks, []
        return callbacks

    def _new_id(self) -> tuple[int, int]:
        return self.worker_id, next(self._ids)

    # --- In words --------------------------------------------------------------------------------

    def debug_info(self) -> dict[str, str]:
        """The counts of upstream's `_rref_context_get_debug_info`, under its names."""
        counts = self._turns.exclusively(self._machine.counts)
        return {
            "num_owner_rrefs": str(counts.owner_rrefs),
            "num_forks": str(counts.forks),
            "num_pending_users": str(counts.pending_users),
            "num_pending_futures": str(counts.pending_futures),
        }

    def leak_report(self) -> list[str]:
        """One line for each reference that another worker still holds to a value here."""
        forks = self._turns.exclusively(lambda: list(self._machine.forks()))
        return [
            f"Leaking RRef {texts.text_of_id(rref)} with fork Id {texts.text_of_id(fork)}"
            for rref, fork, _ in forks
        ]

    def check_leaks(self) -> None:
        """Raises: RRefError: other workers still hold references to values here."""
        leaks = self.leak_report()
        if leaks:
            raise texts.leak_error(leaks)

    def _describe_open(self) -> list[str]:
        forks = [
            f"worker {worker} still holds {texts.text_of_id(rref)}, which worker "
            f"{self.worker_id} owns"
            for rref, _, worker in self._machine.forks()
        ]
        users = [
            f"worker {owner} has not acknowledged the end of {texts.text_of_id(rref)} "
            f"({state.name})"
            for rref, _, owner, state in self._machine.references()
        ]
        return users if self._others_stay else forks + users

    def _lost_value(self, rref_id: RRefId, why: ev.Reason, reason: str) -> Exception:
        if why is ev.Reason.CREATOR_LOST:
            return texts.creator_lost(rref_id, self.worker_info(rref_id.created_on).name, reason)
        return texts.value_gone(rref_id, self.worker_id)

    def _bad_user(self, record: UserRecord, why: ev.Reason, reason: str, attempt: str) -> Exception:
        if why is ev.Reason.DELETED:
            return texts.deleted(record.rref_id, record.fork_id, attempt)
        owner = self.worker_info(record.owner).name
        if why is ev.Reason.OWNER_LOST:
            return texts.owner_lost(record.rref_id, owner, reason, attempt)
        return texts.value_never_found(record.rref_id, owner, attempt)


def _least(end: float | None, patience: float | None) -> float | None:
    """How long to wait now."""
    left = None if end is None else max(0.0, end - time.monotonic())
    if left is None or patience is None:
        return patience if left is None else left
    return min(left, patience)
