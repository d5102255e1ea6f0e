"""Frames: how one message is laid out on a byte stream.

::

    header   36 bytes, fixed
    buffers  16 bytes each: length, shared-memory segment (0: the bytes follow on the stream), note
    body     depends on the kind; for calls: a call head, then the codec's payload
    stream   the bytes of those buffers that are not in shared memory, in order

The header gives all sizes, so a reader can check them against its limits before it allocates
anything. A frame beyond the limits is skipped, and fails its call. A frame with wrong sizes is a
`ProtocolError` and ends the connection, since nothing behind it can be understood.
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
]

PROTOCOL_VERSION = 13
MAGIC = 0x4754  # "TG", read as little-endian

HEADER = struct.Struct("<HHHHqqqI")
BUFFER = struct.Struct("<QII")


class Kind(IntEnum):
    """What a frame is. The numbers are part of the protocol version."""

    # The connection itself
    PING = 1
    PONG = 2
    GOODBYE = 3
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
    """`Kind(number)`, but faster.

    Raises:
        ProtocolError: there is no such kind.
    """
    kind = _KINDS.get(number)
    if kind is None:
        raise ProtocolError(f"no kind of message has the number {number}")
    return kind


class Flags:
    """Bits of a header's flags. Plain numbers, because looking up a member of an enumeration takes
    four times as long."""

    NO_ANSWER: Final = 1
    """A post: it has no reply. On a lane it has a receipt."""
    CONVERSATION: Final = 2
    """A post whose sender waits: the receipt carries what is posted back to it."""
    RIDER: Final = 4
    """The body begins with another message, a post."""
    NO_GRAD: Final = 8
    """The caller has switched gradients off: the results have no history."""
    HISTORY_LEFT: Final = 16
    """An answer outside of any context, with a tensor whose history stays behind."""
    RESENT: Final = 32
    """A second copy of a request whose lane broke. In a receipt: the first copy has arrived."""
    DEPTH: Final = 0xF00
    """Four bits: in how many calls the call is nested; 15 means 15 or more."""
    DEPTH_ONE: Final = 0x100


_RIDER_HEAD = struct.Struct("<BI")  # kind, length


def pack_rider(kind: Kind, news: bytes) -> bytes:
    """A rider: a message of plain bytes that travels in front of another message's body."""
    return _RIDER_HEAD.pack(kind, len(news)) + news


def rider_size(body: bytes) -> int:
    """How many bytes of a body its rider takes."""
    try:
        _, length = _RIDER_HEAD.unpack_from(body)
    except struct.error as error:
        raise ProtocolError(f"a message announces a rider and has none: {error}") from None
    size: int = _RIDER_HEAD.size + length
    return size


def split_rider(body: bytes) -> tuple[Kind, bytes, bytes]:
    """The kind and bytes of a body's rider, and the rest of the body.

    Raises:
        ProtocolError: there is no valid rider.
    """
    try:
        number, length = _RIDER_HEAD.unpack_from(body)
        kind = kind_of(number)
    except (struct.error, ProtocolError) as error:
        raise ProtocolError(f"a message announces a rider and has none: {error}") from None
    start, end = _RIDER_HEAD.size, _RIDER_HEAD.size + length
    if end > len(body):
        raise ProtocolError("a rider is longer than its message")
    return kind, body[start:end], body[end:]


Header: TypeAlias = tuple[Kind, int, int, int, int, int, int]
"""Kind, flags, how many buffers, call, context, message, length of the body."""


class Loan(Protocol):
    """Memory of the sender in which a received message lies."""

    def hold(self) -> None:
        """Keeps the memory, so that an answer can be sent in it once no buffer uses it."""

    def end(self) -> None:
        """Ends `hold`: the memory is returned as soon as no buffer uses it."""


class Unread(Sequence[Any]):
    """Stands for buffers that were not received. Decoding their message raises the reason, which
    fails the call and leaves the connection intact."""

    def __init__(
        self,
        reason: str = (
            "the large tensors of a message were not received: the process had no memory or no "
            "file descriptor for them. Free some, or raise the limit (see `ulimit -n`)"
        ),
    ) -> None:
        self.reason = reason

    def __len__(self) -> int:
        raise SerializationError(self.reason)

    def __getitem__(self, index: Any) -> Any:
        return len(self)


def over_limits(body: int, buffers: int, limits: Limits) -> str:
    """Why a message is too large to be received; empty if it is not.

    Args:
        body: bytes of the message without its large tensors.
        buffers: bytes of the large tensors.
    """
    for name, size, limit in (
        ("max_body", body, limits.max_body),
        ("max_message", buffers, limits.max_message),
    ):
        if size > limit:
            return (
                f"a message was not received: its {size} bytes are over the limit of {limit} of "
                f"the receiver ({name} in the limits of RpcOptions). Send less at a time, or raise "
                "the limit on all workers"
            )
    return ""


@dataclass(slots=True)
class Frame:
    """One received message. `buffers` own their memory and return it when they die; `loans` are
    those of the buffers in the sender's memory."""

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
        max_body: bytes of a message without its large tensors.
        max_buffers: how many large tensors a message may have; 65535 at most.
        max_message: bytes of all its large tensors.

    Raises:
        ValueError: `max_buffers` is more than 65535.
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
        ProtocolError: the header is invalid, or announces more than the limits allow.
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
