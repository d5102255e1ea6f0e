"""The events and effects of the RRef protocol.

Events are in the past tense and go into `RRefProtocol.handle`; effects are imperative and come out
of it. All are data. `telegrad.rpc.references.protocol` has the theory.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from telegrad.errors import ProtocolError
from telegrad.ids import ForkId, RRefId
from telegrad.wire.frames import Kind

__all__ = [
    "UNKNOWN_WORKER",
    "ConfirmUser",
    "CreationArrived",
    "CreationConfirmed",
    "CreationFailed",
    "CreationStarted",
    "DropValue",
    "Effect",
    "Event",
    "FailUser",
    "FlushStarted",
    "ForgetUser",
    "HandleDied",
    "HoldValue",
    "Message",
    "MessageArrived",
    "PassingAbandoned",
    "Reason",
    "ReferencePassed",
    "ReferenceReceived",
    "Send",
    "Timing",
    "ValueMade",
    "ValueWanted",
    "WorkerDied",
]

UNKNOWN_WORKER = -1
"""The receiver or parent of a reference that was packed for an unknown receiver."""


class Reason(enum.Enum):
    """Why a reference or a value is no longer usable."""

    OWNER_LOST = "its owner was lost"
    CREATOR_LOST = "the worker that was creating it was lost"
    GONE = "its owner no longer has the value"
    DELETED = "it was deleted by shutdown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Durations in seconds.

    Args:
        retry_first: the wait for the acknowledgement of a message before it is repeated.
        retry_last: each further wait is twice as long, up to this.
        max_message_age: no message arrives later than this after it was sent. TCP's TIME_WAIT
            makes the same assumption; tombstones and placeholders live as long.
    """

    retry_first: float = 0.25
    retry_last: float = 4.0
    max_message_age: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A control message; `gone` says, in RREF_FORK_ACCEPTED, that the value no longer exists."""

    kind: Kind
    rref: RRefId
    fork: ForkId
    gone: bool = False

    def body(self) -> tuple[int, int, int, int, bool]:
        return (*self.rref, *self.fork, self.gone)

    @classmethod
    def from_body(cls, kind: Kind, body: Any) -> Message:
        """Raises: ProtocolError: the body is not that of a control message."""
        if not (
            isinstance(body, tuple) and len(body) == 5 and all(isinstance(x, int) for x in body)
        ):
            raise ProtocolError(f"a {kind.name} message must hold five numbers, got {body!r}")
        return cls(kind=kind, rref=RRefId(*body[:2]), fork=ForkId(*body[2:4]), gone=bool(body[4]))


# --- Events, at the owner ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueMade:
    """This worker made a value of its own, with one local handle."""

    rref: RRefId


@dataclass(frozen=True, kw_only=True, slots=True)
class CreationArrived:
    """A REMOTE message has arrived; it registers its creator's fork."""

    rref: RRefId
    fork: ForkId
    creator: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueWanted:
    """A worker asks for the value by its id."""

    rref: RRefId


# --- Events, at a user ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CreationStarted:
    """This worker is about to send a REMOTE message; it has one handle."""

    rref: RRefId
    fork: ForkId
    owner: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CreationConfirmed:
    """The owner has answered the REMOTE message."""

    fork: ForkId


@dataclass(frozen=True, kw_only=True, slots=True)
class CreationFailed:
    """The REMOTE message timed out or could not be sent; it may have arrived nevertheless."""

    fork: ForkId


# --- Events, at both -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencePassed:
    """A reference was packed into a message to worker `to`.

    Args:
        fork: the child, made for this message.
        parent: the fork it was made from; None at the owner.
    """

    rref: RRefId
    fork: ForkId
    parent: ForkId | None
    to: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PassingAbandoned:
    """The message that `fork` was made for was never sent."""

    rref: RRefId
    fork: ForkId


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceReceived:
    """A reference was unpacked here, and now has a handle. `parent` is the worker that sent it."""

    rref: RRefId
    fork: ForkId
    owner: int
    parent: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HandleDied:
    """One handle was collected: an owner's if `fork` is None, else one of that fork."""

    rref: RRefId
    fork: ForkId | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageArrived:
    source: int
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerDied:
    """The worker is lost. Also the answer to a `Send` that fails because it is gone."""

    worker: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushStarted:
    """This worker shuts down: all its user references end, even those with live handles."""


Event = (
    ValueMade
    | CreationArrived
    | ValueWanted
    | CreationStarted
    | CreationConfirmed
    | CreationFailed
    | ReferencePassed
    | PassingAbandoned
    | ReferenceReceived
    | HandleDied
    | MessageArrived
    | WorkerDied
    | FlushStarted
)


# --- Effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Send:
    """Post the message. If the receiver is lost, answer with `WorkerDied`."""

    to: int
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldValue:
    """Make an empty place for the value."""

    rref: RRefId


@dataclass(frozen=True, kw_only=True, slots=True)
class DropValue:
    """Drop the value. With a reason, it will never be made: fail all waits for it."""

    rref: RRefId
    reason: Reason | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfirmUser:
    fork: ForkId


@dataclass(frozen=True, kw_only=True, slots=True)
class FailUser:
    """Every wait for, and every later use of, this reference raises."""

    fork: ForkId
    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetUser:
    """The reference is over; no effect names it again."""

    fork: ForkId


Effect = Send | HoldValue | DropValue | ConfirmUser | FailUser | ForgetUser
