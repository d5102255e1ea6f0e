"""`RRefTable`: the remote references of one agent.

It turns what happens to references into events of the protocol; `steps` carries out what the
protocol demands. `housekeeper` notices the deaths of handles, and the passing of time.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from telegrad.errors import NotInitialized, RRefError, SerializationError
from telegrad.ids import ForkId, RRefId
from telegrad.rpc.group.current import InParent
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.references import events as ev
from telegrad.rpc.references import texts
from telegrad.rpc.references.housekeeper import Handle
from telegrad.rpc.references.in_messages import Made, PackedReferences
from telegrad.rpc.references.records import Creation, OwnerEntry, UserRecord
from telegrad.rpc.references.rref import RRef, rebuild_rref
from telegrad.rpc.references.steps import Callbacks, Steps, fail_user
from telegrad.rpc.seams import Messenger

__all__ = ["Call", "RRefTable", "Remote"]

_MOST_NOTED = 64

Call = Callable[[str, int, Callable[..., Any], tuple[Any, ...], dict[str, Any], float], Any]
"""`call(mode, owner, function, args, kwargs, timeout)`; mode is "sync", "async" or "remote"."""


class Remote(Protocol):
    """How references reach their values."""

    call: Call
    """Calls a function at a value's owner."""

    def fetch(self, owner: int, rref_id: RRefId, timeout: float) -> Any:
        """A copy of the value."""

    def bound_here(self, work: Callable[[Any], None]) -> Callable[[Any], None]:
        """`work`, bound to the autograd context of this thread."""


class _Unpacking(threading.local):
    """The references that this thread has unpacked."""

    def __init__(self) -> None:
        # Weak, because only calls take them; other messages leave them here.
        self.unconfirmed: list[weakref.ref[RRef[Any]]] = []


class RRefTable:
    """The remote references of one agent. Safe to use from any thread.

    Args:
        messenger: carries the control messages; the table registers its handlers with it.
        remote: how references reach their values.
        first_id: the first local id. A worker that is restarted under its id after a crash must
            begin above the ids that it used before.
    """

    def __init__(
        self,
        messenger: Messenger,
        remote: Remote,
        *,
        timing: ev.Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
        first_id: int = 0,
    ) -> None:
        self.worker_id = messenger.worker_id
        self.remote = remote
        self._ids = itertools.count(first_id)
        self._unpacking = _Unpacking()
        self._messenger = messenger
        self._steps = Steps(messenger, timing, clock)
        self.housekeeper = self._steps.housekeeper
        self._entries, self._users = self._steps.entries, self._steps.users
        self._creations: dict[ForkId, Creation] = {}  # a call may outlive its reference
        self._others_stay = False
        self._refusal: Callable[[], NotInitialized] | None = None  # see `leave_to_parent`

    # --- Its life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the table's own thread. Without it, `drain` must be called."""
        self.housekeeper.start()

    def drain(self) -> None:
        """Handles dead handles and timers now. For tests, and for tables that are not started."""
        self.housekeeper.drain()

    def flush(
        self,
        timeout: float | None = None,
        patience: float | None = None,
        *,
        others_stay: bool = False,
    ) -> list[str]:
        """Ends all of this worker's references to others' values, and waits until no reference
        connects it with others. For a graceful shutdown, on all workers at once, followed by a
        barrier and `close`.

        The wait ends when the owners have acknowledged and the other workers have ended their
        references to values here (or are lost), after `timeout` seconds, or when nothing has
        changed for `patience` seconds.

        Args:
            others_stay: only this worker leaves. The others keep their references to values here,
                and the wait ignores them.

        Returns:
            descriptions of what is still open; empty on success.
        """
        self._others_stay = others_stay
        return self._steps.flush(timeout, patience, self._is_done, self._describe_open)

    def _is_done(self) -> bool:
        machine = self._steps.machine
        return machine.has_let_go() if self._others_stay else machine.is_settled()

    def close(self) -> None:
        """Drops all entries and users, and fails what waits for them. Local RRefs keep their
        values."""
        if self._steps.is_closed:
            return
        entries = self._steps.close()
        for creation in list(self._creations.values()):
            creation.settle(NotInitialized("the RPC agent was shut down"))
        for entry in entries:
            entry.set_error(NotInitialized("the RPC agent was shut down"))  # unless it is done
        self.housekeeper.stop()

    def leave_to_parent(self, refusal: Callable[[], NotInitialized]) -> None:
        """In a forked process: references are unusable, and their ends are ignored. A value that
        this worker owned at the fork can still be read."""
        self._steps.is_closed = True
        self._refusal = refusal
        in_parent: Any = InParent(refusal)
        self.remote = in_parent

    def refuse_if_forked(self) -> None:
        """For uses that would take a lock, or wait for a message that only the parent gets.

        Raises:
            NotInitialized: the worker of this table is that of the parent process.
        """
        if self._refusal is not None:
            raise self._refusal()

    def worker_info(self, worker_id: int) -> WorkerInfo:
        self.refuse_if_forked()
        return WorkerInfo(self._messenger.name_of(worker_id), worker_id)

    # --- Creation, at the creator ----------------------------------------------------------------

    def new_entry(self, value: Any, type_hint: Any = None) -> OwnerEntry:
        return OwnerEntry(RRefId(*self._new_id()), value, type_hint)

    def adopt(self, rref: RRef[Any]) -> None:
        """Adds a value of this worker's own; `rref` is its only handle."""
        entry = rref._record
        if isinstance(entry, OwnerEntry) and not self._steps.is_closed:
            self._entries[entry.rref_id] = entry
            self._steps.apply_soon(ev.ValueMade(rref=entry.rref_id), entry=entry)

    def new_owned(self) -> tuple[OwnerEntry, RRef[Any]]:
        """For `remote()` to this worker itself: the caller fills the entry."""
        entry = OwnerEntry(RRefId(*self._new_id()))
        rref = RRef._of(self, entry)
        self.adopt(rref)
        return entry, rref

    def new_user(self, owner: int) -> tuple[RRefId, ForkId, RRef[Any]]:
        """For `remote()` to another worker: the ids for its REMOTE message, and the reference.

        `creation_finished` or `creation_failed` must follow, sooner or later.
        """
        rref_id, fork_id = RRefId(*self._new_id()), ForkId(*self._new_id())
        record = UserRecord(rref_id, fork_id, owner)
        event = ev.CreationStarted(rref=rref_id, fork=fork_id, owner=owner)
        try:
            record.creation = self._creations[fork_id] = Creation()
            rref = RRef._of(self, record)
            self._users[fork_id] = record
            self._steps.apply_soon(event, record=record)
            return rref_id, fork_id, rref
        except BaseException as error:  # Ctrl-C: the caller does not have the reference yet
            self.creation_failed(fork_id, RRefError(f"it was not sent: {type(error).__name__}"))
            raise

    def creation_confirmed(self, fork_id: ForkId) -> None:
        """The owner has registered the fork; the function may still be running."""
        self._steps.apply_soon(ev.CreationConfirmed(fork=fork_id))

    def creation_finished(self, fork_id: ForkId) -> None:
        """The owner has answered the REMOTE request, perhaps with an exception."""
        self._steps.apply(ev.CreationConfirmed(fork=fork_id))
        creation = self._creations.pop(fork_id, None)
        if creation is not None:
            creation.settle(None)

    def creation_failed(self, fork_id: ForkId, error: Exception) -> None:
        """The REMOTE request ended in `error`, without an answer."""

        def fail() -> Callbacks:
            record = self._users.get(fork_id)
            # Also if it was confirmed before: the call as a whole has failed.
            return (
                [] if record is None else fail_user(record, lambda _: texts.creation_error(error))
            )

        # At once, so that the next use of the value raises.
        self._steps.apply(ev.CreationFailed(fork=fork_id), first=fail)
        creation = self._creations.pop(fork_id, None)
        if creation is not None:
            creation.settle(error)

    # --- At the owner ----------------------------------------------------------------------------

    def owner_created(self, rref_id: RRefId, fork_id: ForkId, creator: int) -> OwnerEntry:
        """A REMOTE message has arrived. The caller runs the function and fills the entry. If the
        creator has given up meanwhile, only the caller keeps the entry."""
        event = ev.CreationArrived(rref=rref_id, fork=fork_id, creator=creator)
        entry = self._entry_after(event, rref_id)
        return entry if entry is not None else OwnerEntry(rref_id)

    def entry(self, rref_id: RRefId) -> OwnerEntry:
        """The value by its id, even if its REMOTE message is still under way.

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
        self._steps.apply(event)
        return self._steps.exclusively(lambda: self._entries.get(rref_id))

    # --- Packing and unpacking: see `in_messages` ------------------------------------------------

    def reduce(
        self, rref: RRef[Any], destination: int | None, packed: PackedReferences | None = None
    ) -> tuple[Any, tuple[Any]]:
        """What the codec packs in place of `rref`, in a message to worker `destination`."""
        return rebuild_rref, (self.fork(rref, destination, packed),)

    def fork(
        self, rref: RRef[Any], destination: int | None, packed: PackedReferences | None = None
    ) -> tuple[Any, ...]:
        """A child of `rref` as plain data; it must be unpacked once, or abandoned.

        Args:
            packed: gets the child before the protocol does, so that Ctrl-C cannot lose it.

        Raises:
            RRefError, WorkerLost: the reference is no longer usable.
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
        self._steps.apply_soon(event)
        return (owner, *record.rref_id, *fork_id, parent, "")

    def abandon(self, made: Iterable[Made]) -> None:
        """These references were packed into a message that is not sent."""
        self._steps.abandon(made)

    def rebuild(self, fields: tuple[Any, ...]) -> RRef[Any]:
        """Unpacks the result of `fork`."""
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
            self._steps.apply_soon(event)  # until then the fork keeps the value
            return rref
        if self._steps.is_closed:
            record = UserRecord(rref_id, fork_id, owner)
            record.error = partial(texts.deleted, rref_id, fork_id)
            return RRef._of(self, record)
        record = self._users.setdefault(fork_id, UserRecord(rref_id, fork_id, owner))
        rref = RRef._of(self, record)
        if parent == owner:
            record.is_confirmed = True  # it counted this fork when it made it
        self._steps.apply_soon(event, record=record)
        if not record.is_settled:
            noted = self._unpacking.unconfirmed
            if len(noted) >= _MOST_NOTED:
                noted[:] = [note for note in noted if note() is not None]
            noted.append(weakref.ref(rref))
        return rref

    def take_unconfirmed(self) -> list[RRef[Any]]:
        """Takes the references unpacked on this thread that their owners do not count yet. A
        function with such arguments runs after `when_confirmed`."""
        noted = self._unpacking.unconfirmed
        if not noted:
            return []
        self._unpacking.unconfirmed = []
        return [rref for note in noted if (rref := note()) is not None]

    def when_confirmed(self, rrefs: list[RRef[Any]], callback: Callable[[], None]) -> None:
        """Runs `callback` once each is confirmed or has failed: after the owners' answers or
        losses, after `close`, or at once."""
        waiting = itertools.count(1)
        total = len(rrefs) + 1

        def one_done() -> None:
            if next(waiting) == total:
                callback()

        def wait_for(record: OwnerEntry | UserRecord) -> Callbacks:
            if isinstance(record, OwnerEntry) or record.is_settled or self._steps.is_closed:
                return [one_done]
            record.callbacks.append(one_done)
            return []

        for rref in rrefs:
            self._steps.apply(first=partial(wait_for, rref._record))
        one_done()

    # --- Handles ---------------------------------------------------------------------------------

    def watch(self, rref: RRef[Any], record: OwnerEntry | UserRecord) -> Handle:
        """Makes the handle of an object, before the machine counts it: so none is lost."""
        fork_id = record.fork_id if isinstance(record, UserRecord) else None
        return self.housekeeper.watch(rref, record.rref_id, fork_id)

    def note_death(self, handle: Handle) -> None:
        if not self._steps.is_closed:
            self.housekeeper.note((handle,))

    def _new_id(self) -> tuple[int, int]:
        return self.worker_id, next(self._ids)

    # --- Its contents --------------------------------------------------------------------------

    def debug_info(self) -> dict[str, str]:
        """The counts of upstream's `_rref_context_get_debug_info`, under its names."""
        counts = self._steps.exclusively(self._steps.machine.counts)
        return {f"num_{name}": str(count) for name, count in counts.items()}

    def leak_report(self) -> list[str]:
        """One line for each reference that another worker still holds to a value here."""
        forks = self._steps.exclusively(lambda: list(self._steps.machine.forks()))
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
            for rref, _, worker in self._steps.machine.forks()
        ]
        users = [
            f"worker {owner} has not acknowledged the end of {texts.text_of_id(rref)} "
            f"({state.name})"
            for rref, _, owner, state in self._steps.machine.references()
        ]
        return users if self._others_stay else forks + users
