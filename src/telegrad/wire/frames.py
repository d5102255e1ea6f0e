"""Frames: how one message stands on a byte stream.

::

    header   36 bytes, fixed
    buffers  16 bytes each: length, shared-memory segment (0: the bytes follow on the stream), note
    body     what the kind of message says; for calls: a call head, then the codec's payload
    stream   the bytes of those buffers that are not in shared memory, in order

The header says all sizes, so a reader knows before it allocates anything whether a frame is within
its limits. One that is not is skipped, and fails the call that it belongs to. A frame that lies
about its sizes is a `ProtocolError`, and ends the connection: after it, nothing on that stream
means anything.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from telegrad.errors import ProtocolError, SerializationError

__all__ = [
    "BUFFER",
    "HEADER",
    "PROTOCOL_VERSION",
    "Flags",
    "Frame",
    "Header",
    "Kind",
    "Limits",
    "Loan",
    "Unread",
    "kind_of",
    "over_limits",
    "pack_header",
    "pack_rider",
    "rider_size",
    "split_rider",
    "unpack_header",
    "whole_frame",
]

PROTOCOL_VERSION = 13
MAGIC = 0x4754  # "TG", read as little-endian

HEADER = struct.Struct("<HHHHqqqI")
_SIZE = HEADER.size
_unpack = HEADER.unpack_from
BUFFER = struct.Struct("<QII")


class Kind(IntEnum):
    """What a frame is. The numbers are part of the protocol version."""

    # The connection itself
    PING = 1
    PONG = 2
    GOODBYE = 3
    MAILBOX = 4
    WAKE = 5
    DECLINED = 6
    # Calls
    CALL = 10
    REMOTE = 11
    REPLY = 12
    ERROR = 13
    RECEIPT = 14
    UNREAD = 15
    # Remote references
    RREF_FETCH = 20
    RREF_FORK = 21
    RREF_FORK_ACCEPTED = 22
    RREF_CHILD_ACCEPTED = 23
    RREF_CHILD_ACKNOWLEDGED = 24
    RREF_DELETE = 25
    RREF_DELETED = 26
    # Plain autograd
    PLAIN_CALL = 30
    PLAIN_RELEASE = 31
    PLAIN_ASK = 32
    PLAIN_GRADIENTS = 33
    # Autograd contexts
    GRADIENTS = 40
    PASS_ANSWER = 41
    PASS_GATHER = 42
    PASS_REACHABILITY = 43
    PASS_STRIKE = 44
    PASS_ABORT = 45
    CONTEXT_RELEASE = 46
    CONTEXT_RELEASED = 47
    PASS_END = 48
    CONTEXT_HELD = 49
    # Membership
    GATHER = 60
    MEMBERS = 61


_KINDS = {int(kind): kind for kind in Kind}


def kind_of(number: int) -> Kind:
    """`Kind(number)`, sooner.

    Raises:
        ProtocolError: there is no such kind.
    """
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"no kind of message has the number {number}")
    return kind


class Flags:
    """Bits of a header's flags. Plain numbers: a member of an enumeration takes four times as long
    to find, and every message asks for several."""

    NO_ANSWER: Final = 1
    """A post: the sender waits for nothing but, on a lane, a receipt."""
    CONVERSATION: Final = 2
    """A post whose sender waits: what is posted back to it travels in the receipt."""
    RIDER: Final = 4
    """The body begins with another message, a post."""
    NO_GRAD: Final = 8
    """The caller has switched gradients off: what is computed for it has no history."""
    HISTORY_LEFT: Final = 16
    """An answer outside of any context: something in it has a history, which stays behind."""
    RESENT: Final = 32
    """A second copy of a request, whose first one was on a lane that broke. In a receipt: the
    request has begun by its first copy."""
    DEPTH: Final = 0xF00
    """Four bits that are a number: how many calls the call is nested in; 15 for more."""
    DEPTH_ONE: Final = 0x100


_RIDER_HEAD = struct.Struct("<BI")  # kind, length


def pack_rider(kind: Kind, news: bytes) -> bytes:
    """A message that is to ride in front of a body. It consists of bytes, as they are."""
    return _RIDER_HEAD.pack(kind, len(news)) + news


def rider_size(body: bytes) -> int:
    """How many bytes of a body the message takes that rides in front."""
    try:
        _, length = _RIDER_HEAD.unpack_from(body)
    except struct.error as error:
        raise ProtocolError(f"a message says that another rides with it: {error}") from None
    size: int = _RIDER_HEAD.size + length
    return size


def split_rider(body: bytes) -> tuple[Kind, bytes, bytes]:
    """The kind and bytes of the message that rides in front, and the body that is left.

    Raises:
        ProtocolError: there is none.
    """
    try:
        number, length = _RIDER_HEAD.unpack_from(body)
        kind = _KINDS.get(number) or kind_of(number)
    except (struct.error, ProtocolError) as error:
        raise ProtocolError(f"a message says that another rides with it: {error}") from None
    start, end = _RIDER_HEAD.size, _RIDER_HEAD.size + length
    if end > len(body):
        raise ProtocolError("a message that rides with another is longer than both")
    return kind, body[start:end], body[end:]


Header: TypeAlias = tuple[Kind, int, int, int, int, int, int]
"""Kind, flags, how many buffers, call, context, message, length of the body."""


class Loan(Protocol):
    """Memory of its sender that a message lies in."""

    def hold(self) -> None:
        """From now on it may carry what is sent back, once no buffer needs it any more."""

    def end(self) -> None:
        """It may not, from now on; it is given back as soon as no buffer needs it."""


class Unread(Sequence[Any]):
    """In the place of buffers that were not taken: whoever decodes their message is told why. That
    ends the call, and not the connection."""

    def __init__(
        self,
        reason: str = (
            "the large tensors of a message were not received: there was no memory or no file "
            "descriptor for them (see `ulimit -n`)"
        ),
    ) -> None:
        self.reason = reason

    def __len__(self) -> int:
        raise SerializationError(self.reason)

    def __getitem__(self, index: Any) -> Any:
        return len(self)


def over_limits(body: int, buffers: int, limits: Limits) -> str:
    """What is to be said of a message that is too large to be taken; empty if it is not.

    Args:
        body: bytes of it besides its large tensors.
        buffers: bytes of these.
    """
    for name, size, limit in (
        ("max_body", body, limits.max_body),
        ("max_message", buffers, limits.max_message),
    ):
        if size > limit:
            return (
                f"a message was not received: its {size} bytes are over the limit of {limit} there "
                f"({name} in the limits of RpcOptions, which should be the same on all workers)"
            )
    return ""


@dataclass(slots=True)
class Frame:
    """One received message. `buffers` own their memory and give it back when they die; of those
    that lie in the sender's memory, `loans` are what can be held on to."""

    kind: Kind
    flags: int
    call_id: int
    context_id: int
    message_id: int
    body: bytes
    buffers: Sequence[Any] = field(default_factory=list)
    loans: Sequence[Loan] = ()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a reader accepts. Checked before anything is allocated.

    Args:
        max_body: bytes of a message besides its large tensors.
        max_buffers: how many large tensors a message may have; 65535 at most.
        max_message: bytes of all its large tensors.

    Raises:
        ValueError: `max_buffers` is more than that.
    """

    max_body: int = 1 << 30
    max_buffers: int = (1 << 16) - 1
    max_message: int = 1 << 36

    def __post_init__(self) -> None:
        if self.max_buffers >= 1 << 16:
            raise ValueError(f"max_buffers must be at most 65535, got {self.max_buffers}")


pack_header: Callable[[int, int, int, int, int, int, int], bytes] = partial(HEADER.pack, MAGIC)
"""Writes what `unpack_header` reads."""


def unpack_header(data: bytes | bytearray | memoryview, offset: int, limits: Limits) -> Header:
    """Reads and checks a header.

    Raises:
        ProtocolError: it is no header, or what it announces is beyond the limits.
    """
    magic, kind, flags, buffers, call_id, context_id, message_id, body = HEADER.unpack_from(
        data, offset
    )
    if magic != MAGIC:
        raise ProtocolError(f"the stream does not hold a telegrad frame (it begins {magic:#06x})")
    known = _KINDS.get(kind) or kind_of(kind)
    if buffers > limits.max_buffers:
        raise ProtocolError(f"{buffers} buffers are over the limit of {limits.max_buffers}")
    return known, flags, buffers, call_id, context_id, message_id, body


def whole_frame(message: bytes, limits: Limits) -> Frame:
    """A frame without buffers, of which `message` is all.

    Raises:
        ProtocolError: it is none.
    """
    try:
        magic, number, flags, buffers, call_id, context_id, message_id, length = _unpack(message)
    except struct.error as error:
        raise ProtocolError(f"a message is shorter than its header: {error}") from None
    kind = _KINDS.get(number)
    is_whole = magic == MAGIC and not buffers and length == len(message) - _SIZE
    if kind is None or not is_whole:
        unpack_header(message, 0, limits)  # it knows better what is the matter
        raise ProtocolError("a message is not as long as it says")
    return Frame(kind, flags, call_id, context_id, message_id, message[_SIZE:], [])
