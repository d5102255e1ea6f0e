"""How long a remote value lives: the RRef protocol, as a state machine.

No sockets, threads, torch or clocks: an event and the time go in, a list of effects comes out.
The network may lose, delay, repeat and reorder control messages, and workers may die.

**What it guarantees**

1. *A value outlives its references.* It is not dropped while a live handle, or a reference under
   way in a message, exists anywhere.
2. *A value without references is dropped*, and leaves nothing in memory.
3. *Every wait ends*: with a confirmation, with the loss of the awaited worker, or with "gone".

The exception to 1: a worker dies while a reference that it passed on is still unconfirmed. The
receiver may then find the value gone, and gets an error.

**Who knows what**

The owner counts *forks*, one per reference that another worker holds, and its own handles. A user
is one fork; it may have several handles (Python objects).

- *Creation.* ``remote()`` makes the ids; the REMOTE message registers the creator's fork. The
  answer to the request confirms it. If the request fails, the message may have arrived
  nevertheless, so the creator sends DELETE at the end of such a reference, too.
- *A user passes it on.* A makes a child fork for B, and stays registered until the owner counts
  the child, even if A's own handles die. ``B → owner: FORK``, ``owner → B: FORK_ACCEPTED``,
  ``B → A: CHILD_ACCEPTED``, ``A → B: CHILD_ACKNOWLEDGED``.
- *The owner passes it on.* It counts B's fork at once; B is confirmed from the start, without a
  message. (If the receiver is unknown when the reference is packed, B sends FORK, so that the
  owner learns who holds it.)
- *It comes home.* The owner counts a handle and sends CHILD_ACCEPTED to the parent.
- *The end.* A user without handles, confirmed, and with no unconfirmed children, sends
  ``DELETE`` until ``DELETED`` answers it.

FORK, CHILD_ACCEPTED and DELETE are idempotent, and repeated until acknowledged
(`telegrad.rpc.references.user.Outbox`).

**Late and early messages**

A FORK, or the REMOTE message, may come after the DELETE of its fork, and must not bring the fork
back. So the owner keeps a *tombstone* of each deleted fork and of each dropped value for
`Timing.max_message_age`. No message is older than that, so none comes later, and memory is bounded
in a run of any length. Ids made by the owner itself need no tombstone: they are in its table, or
over.

A FORK, a fetch, or a reference coming home may also arrive *before* the REMOTE message, over
another connection. The owner then opens a *placeholder*, which the REMOTE message fills. So a
reference can be used before it is confirmed: ``remote(...).to_here()`` takes one round trip.
(Rejected: fetching only after confirmation, which takes two; and refusing early messages, which
costs a retry.) The wait for a placeholder ends with the REMOTE message, with the loss of the
creator, or after `max_message_age`: the worker that used the id learned it after the REMOTE message
was sent, so by then the message has arrived or never will.

**Loss of a worker**

The owner strikes off the lost worker's forks, with tombstones. A user whose owner is lost fails,
and sends the owner nothing more. If its parent still waits for it to be counted, it sends
CHILD_ACCEPTED there, since the parent may not have lost the owner. A parent stops waiting for a
child on the lost worker; a child whose parent is lost continues.

A loss is one worker's view. Others may have reached the same worker all the time, or again after a
silence longer than the heartbeat, and may pass on references to its values. So everything that was
open at a loss has ended, and a reference that arrives later is new: its FORK is sent, with a new
attempt to connect.

A FORK from a dead worker may arrive after its loss was handled. There is no list of dead workers,
because a worker may return under its id. But the answer cannot be sent, which reports the loss to
the machine again. That is why a failed `Send` must be answered with `WorkerDied`.

**What the machine cannot see**

Whether a message with references was sent at all: `PassingAbandoned` says that it was not
(`telegrad.rpc.references.in_messages`). There is no time limit on a reference under way: a leak
until the receiver's loss is better than dropping the value of a slow receiver.
"""

from __future__ import annotations

from collections.abc import Iterable

from telegrad.ids import ForkId, RRefId
from telegrad.rpc.references.events import (
    UNKNOWN_WORKER,
    CreationArrived,
    CreationConfirmed,
    CreationFailed,
    CreationStarted,
    Effect,
    Event,
    FlushStarted,
    HandleDied,
    Message,
    MessageArrived,
    PassingAbandoned,
    ReferencePassed,
    ReferenceReceived,
    Timing,
    ValueMade,
    ValueWanted,
    WorkerDied,
)
from telegrad.rpc.references.owner import OwnedState, OwnerLedger
from telegrad.rpc.references.user import Outbox, UserLedger, UserState
from telegrad.wire.frames import Kind

__all__ = ["RRefProtocol"]


class RRefProtocol:
    """One worker's part in the protocol. Not safe for threads: guard it with one lock."""

    def __init__(self, worker_id: int, timing: Timing | None = None) -> None:
        timing = timing if timing is not None else Timing()
        self.worker_id = worker_id
        self._outbox = Outbox(timing)
        self._owner = OwnerLedger(worker_id, timing)
        self._user = UserLedger(self._outbox)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Takes an event; returns its effects, in order. Defined for every event in every state:
        one
        that does not fit is late, early or repeated, and changes nothing."""
        owner, user = self._owner, self._user
        match event:
            case MessageArrived(source=source, message=message):
                return self._handle_message(source, message, now)
            case ValueMade(rref=rref):
                return owner.value_made(rref)
            case CreationArrived(rref=rref, fork=fork, creator=creator):
                return owner.creation_arrived(rref, fork, creator, now)
            case ValueWanted(rref=rref):
                return owner.value_wanted(rref, now)
            case CreationStarted(rref=rref, fork=fork, owner=owner_id):
                return user.creation_started(rref, fork, owner_id)
            case CreationConfirmed(fork=fork):
                return user.creation_confirmed(fork, now)
            case CreationFailed(fork=fork):
                return user.creation_failed(fork, now)
            case ReferencePassed(rref=rref, fork=fork, parent=None, to=to):
                return owner.passed(rref, fork, to)
            case ReferencePassed(fork=fork, parent=ForkId() as parent, to=to):
                return user.passed(fork, parent, to)
            case PassingAbandoned(rref=rref, fork=fork):
                return user.release_child(fork, now) + owner.strike_fork(rref, fork, now)
            case ReferenceReceived():
                return self._receive(event, now)
            case HandleDied(rref=rref, fork=None):
                return owner.handle_died(rref, now)
            case HandleDied(fork=ForkId() as fork):
                return user.handle_died(fork, now)
            case WorkerDied(worker=worker):
                return owner.worker_died(worker, now) + user.worker_died(worker, now)
            case FlushStarted():
                return user.flush_started(now)
        raise TypeError(f"not an event of the RRef protocol: {event!r}")

    def tick(self, now: float) -> list[Effect]:
        """The effects of time passing. To be called at `next_deadline`; at other times it is
        harmless."""
        return [*self._outbox.due(now), *self._owner.tick(now)]

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if no event comes before."""
        retry, expiry = self._outbox.next_deadline(), self._owner.next_deadline()
        if retry is None or expiry is None:
            return retry if expiry is None else expiry
        return min(retry, expiry)

    # --- What can be asked -----------------------------------------------------------------------

    def owned_state(self, rref: RRefId) -> OwnedState | None:
        return self._owner.state_of(rref)

    def user_state(self, fork: ForkId) -> UserState | None:
        return self._user.state_of(fork)

    def can_pass(self, fork: ForkId) -> bool:
        """Whether a child may be made from this user's fork."""
        return self._user.can_pass(fork)

    def forks(self) -> Iterable[tuple[RRefId, ForkId, int]]:
        """The forks of values here: value, fork, and the worker that holds it."""
        return self._owner.forks()

    def references(self) -> Iterable[tuple[RRefId, ForkId, int, UserState]]:
        """This worker's references to others' values: value, fork, owner, state."""
        return self._user.references()

    def is_settled(self) -> bool:
        """Whether no reference connects this worker with others, and no message is open."""
        no_forks = next(iter(self._owner.forks()), None) is None
        return no_forks and self.has_let_go()

    def has_let_go(self) -> bool:
        """Whether this worker refers to no values of others, and their owners know it."""
        return self._user.is_empty() and not self._outbox

    def is_empty(self) -> bool:
        """Whether the machine remembers nothing at all."""
        return self._owner.is_empty() and self._user.is_empty() and not self._outbox

    def counts(self) -> dict[str, int]:
        """The counts in upstream's debug information."""
        return {
            "owner_rrefs": self._owner.count_forked(),
            "forks": sum(1 for _ in self._owner.forks()),
            "pending_users": self._user.count_pending(),
            "pending_futures": len(self._outbox),
        }

    # --- Parts -----------------------------------------------------------------------------------

    def _handle_message(self, source: int, message: Message, now: float) -> list[Effect]:
        rref, fork = message.rref, message.fork
        match message.kind:
            case Kind.RREF_FORK:
                return self._owner.fork_arrived(rref, fork, source, now)
            case Kind.RREF_FORK_ACCEPTED:
                return self._user.fork_answered(fork, message.gone, now)
            case Kind.RREF_CHILD_ACCEPTED:
                return self._user.child_accepted(rref, fork, source, now)
            case Kind.RREF_CHILD_ACKNOWLEDGED:
                return self._user.child_acknowledged(fork)
            case Kind.RREF_DELETE:
                return self._owner.delete_arrived(rref, fork, source, now)
            case Kind.RREF_DELETED:
                return self._user.deleted(fork)
        return []  # not a message of this protocol

    def _receive(self, event: ReferenceReceived, now: float) -> list[Effect]:
        if event.owner != self.worker_id:
            return self._user.received(event.rref, event.fork, event.owner, event.parent, now)
        effects = self._owner.received(event.rref, event.fork, now)
        if event.parent not in (self.worker_id, UNKNOWN_WORKER):
            message = Message(kind=Kind.RREF_CHILD_ACCEPTED, rref=event.rref, fork=event.fork)
            effects.append(self._outbox.send(event.parent, message, now))
        return effects
