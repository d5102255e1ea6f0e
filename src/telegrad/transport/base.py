"""The network seam: all that the rest of telegrad knows of a network.

A `Transport` listens at and connects to addresses such as `unix:@name`, `tcp:10.0.0.1:4000`,
`tls:10.0.0.1:4000` or `inproc:name`. A `Connection` carries whole messages in order; one thread
sends and one thread receives at a time. Every implementation passes the contract suite in
`telegrad.testing.transport_contract`.

What ends a wait: `receive` ends in a frame, in `TransportTimeout` once `set_timeout` seconds have
passed, or it has got too late for the rest of a message, or in `ConnectionClosed` when either end
closes or the peer dies. `interrupt` makes a wait in another thread end in `ConnectionClosed` at
once. `accept` ends when the listener is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from telegrad.wire.frames import Frame, Kind, Loan

__all__ = [
    "Connection",
    "ConnectionClosed",
    "Listener",
    "MemorySharing",
    "Placed",
    "Transport",
    "TransportTimeout",
    "aligned",
]


class ConnectionClosed(Exception):
    """The connection has ended. Never leaves the agent: it becomes a `WorkerLost` there."""


class TransportTimeout(Exception):
    """Nothing came within the set time. Never leaves the agent: it becomes an `RpcTimeout`."""


class Placed(NamedTuple):
    """Where a buffer lies in shared memory.

    Attributes:
        is_handed_back: the segment is the peer's; else it is one's own, and lent.
        descriptor: to be passed with the message, or -1.
    """

    segment: int
    is_handed_back: bool
    descriptor: int


def aligned(offset: int) -> int:
    """Where the next of several buffers begins that lie in one piece of shared memory."""
    return -(-offset // 64) * 64


class MemorySharing(Protocol):
    """Memory shared with one peer process: large buffers go through it, not through the socket."""

    def lend(self, *data: memoryview) -> Placed | None:
        """Copies buffers into one segment, each to the next `aligned` place, or says None: send
        them."""

    def abandon(self, segments: Sequence[int]) -> None:
        """The message that these were lent for has not left whole: they are not used again."""

    def in_flight(self, segments: Sequence[int]) -> list[int]:
        """Which of these have been handed back and not yet been received."""

    def mislay(self, segments: Sequence[int]) -> None:
        """The peer may never get the message that these were handed back with."""

    def take_back(self, segment: int) -> memoryview:
        """One's own segment, which the peer has handed back."""

    def learn(self, segment: int, descriptor: int) -> None:
        """The peer has announced a segment of its own.

        Raises:
            OSError: there is no memory or descriptor for it.
        """

    def decline(self, segment: int) -> None:
        """The peer has announced a segment that cannot be taken."""

    def borrow(self, segment: int) -> tuple[memoryview, Loan]:
        """The peer's segment, and the loan of it. When nobody has a view of it any more it is given
        back, unless somebody holds the loan."""


class Connection(Protocol):
    @property
    def reads(self) -> int:
        """Grows whenever something has been read: a peer that is in the middle of a long message
        is alive."""

    def send(
        self,
        kind: Kind,
        flags: int = 0,
        call_id: int = 0,
        context_id: int = -1,
        message_id: int = -1,
        body: Sequence[bytes | memoryview] = (),
        buffers: Sequence[memoryview] = (),
    ) -> None:
        """Sends one message, straight from the buffers' memory; returns when it has been handed
        over, so that the memory may change afterwards."""

    def send_without_waiting(
        self,
        kind: Kind,
        flags: int = 0,
        call_id: int = 0,
        context_id: int = -1,
        message_id: int = -1,
        body: Sequence[bytes | memoryview] = (),
        buffers: Sequence[memoryview] = (),
    ) -> None:
        """Sends as much of a message as the peer takes at once. If `has_rest` is true afterwards,
        `send_rest` must be called before anything else is sent; the memory must stay until then.

        An exception, Ctrl-C among them, leaves the stream whole: either nothing of the message has
        been sent, or the rest of it stays for `send_rest`."""

    @property
    def messages_begun(self) -> int:
        """How many messages `send_without_waiting` has sent, whole or in part."""

    @property
    def has_rest(self) -> bool:
        """Whether a message has been sent in part."""

    def send_rest(self) -> None:
        """Sends the rest of it, and waits until the peer has taken it."""

    @property
    def peer_process(self) -> int:
        """The id of the process at the other end, if it runs on this host and is known; else 0."""

    def receive(self) -> Frame:
        """The next message."""

    def send_bytes(self, data: bytes) -> None:
        """Sends bytes outside of any frame: the handshake, before the first message."""

    def receive_bytes(self, length: int) -> bytes:
        """Exactly `length` bytes of a handshake."""

    def channel_binding(self) -> bytes:
        """Bytes that the two ends of this connection have in common, and no other connection has;
        empty where nobody can stand in between, or where encryption was switched off.

        Raises:
            AuthenticationError: the other end is a process of another user.
        """

    def poll(self) -> bool:
        """Whether `receive` would not wait."""

    def has_more(self) -> bool:
        """Looks a moment whether something comes; True if `receive` has begun to get it."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when something comes; -1 if there is none."""

    def receive_now(self) -> Frame | None:
        """The next message, if all of it is here; does not wait. Whoever has called it looks for
        the next one with `glance` too, until `rest`: not all that comes shows at the descriptor."""

    def glance(self) -> bool:
        """Whether something is here that does not show at the descriptor; no system call."""

    def rest(self) -> bool:
        """From now on everything that comes shows at the descriptor; False if something is here
        already that does not."""

    def serve_from(self, processor: int) -> None:
        """Tells the other end from which processor it is served together with many others, so
        that it can wait on another one (`processors`); `UNKNOWN` when that is over."""

    def set_timeout(self, seconds: float | None, until: float | None = None) -> None:
        """How long `send` and `receive` wait for the peer; None is for ever.

        Args:
            until: a time of `time.monotonic`. What keeps going or coming, slowly, is waited for
                until then; without it, to its end.
        """

    def share_memory(self, memory: MemorySharing) -> None:
        """Offers shared memory for large buffers; a transport that cannot use it ignores it."""

    def open_mailbox(self) -> None:
        """Takes a shorter way for small messages, if there is one; only of use between two ends
        that wait for each other's messages in turn, and for that which has connected. Memory has
        to be shared before."""

    def interrupt(self) -> None:
        """Ends the connection and every wait on it, from any thread."""

    def close(self) -> None:
        """Frees the descriptor. Only the thread that uses the connection may call it, or any
        thread once nobody uses it."""


class Listener(Protocol):
    @property
    def address(self) -> str:
        """Where others can connect."""

    def accept(self) -> Connection:
        """The next connection, not yet proved to be a friend's."""

    def close(self) -> None: ...


class Transport(Protocol):
    def listen(self) -> Listener: ...

    def connect(self, address: str, timeout: float) -> Connection: ...
