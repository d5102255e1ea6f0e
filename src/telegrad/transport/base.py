"""The network seam: what the rest of telegrad knows about a network.

A `Transport` listens at and connects to addresses such as `unix:@name`, `tcp:10.0.0.1:4000`,
`tls:10.0.0.1:4000` or `inproc:name`. A `Connection` carries whole messages in order; one thread
sends and one thread receives at a time. Every implementation passes the contract suite in
`telegrad.testing.transport_contract`.

How a wait ends: `receive` returns a frame, or raises `TransportTimeout` at the time that
`set_timeout` has set, or `ConnectionClosed` when either end closes or the peer dies. `interrupt`
ends a wait in another thread with `ConnectionClosed`. `accept` ends when the listener is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

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
    """The connection has ended. The agent turns it into a `WorkerLost`."""


class TransportTimeout(Exception):
    """Nothing came within the set time. The agent turns it into an `RpcTimeout`."""


class Placed(NamedTuple):
    """Where a buffer lies in shared memory.

    Attributes:
        is_handed_back: the segment belongs to the peer; otherwise it is ours, and lent.
        descriptor: to pass with the message, or -1.
    """

    segment: int
    is_handed_back: bool
    descriptor: int


def aligned(offset: int) -> int:
    """The next offset at which a buffer may begin in shared memory."""
    return -(-offset // 64) * 64


class MemorySharing(Protocol):
    """Memory shared with one peer process: large buffers go through it, not through the socket."""

    def lend(self, *data: memoryview) -> Placed | None:
        """Copies buffers into one segment, each at the next `aligned` offset. None means that they
        must go through the socket."""

    def abandon(self, segments: Sequence[int]) -> None:
        """Gives up segments that were lent for a message that was not sent completely."""

    def in_flight(self, segments: Sequence[int]) -> list[int]:
        """Which of these have been handed back and not been received yet."""

    def mislay(self, segments: Sequence[int]) -> None:
        """Records that the message that handed these segments back may be lost."""

    def take_back(self, segment: int) -> memoryview:
        """A segment of our own that the peer has handed back."""

    def learn(self, segment: int, descriptor: int) -> None:
        """Maps a segment that the peer has announced.

        Raises:
            OSError: the system has no memory or descriptor for it.
        """

    def decline(self, segment: int) -> None:
        """Records that a segment of the peer could not be mapped."""

    def borrow(self, segment: int) -> tuple[memoryview, Loan]:
        """A segment of the peer, and the loan of it. The last view returns it, unless the loan is
        held."""


class Connection(Protocol):
    @property
    def reads(self) -> int:
        """How often data has arrived: it grows while a long message arrives, too."""

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
        """Sends one message, straight from the buffers' memory, which may change afterwards."""

    def send_without_waiting(self, *message: Any) -> None:
        """Sends as much of a message as the peer takes at once; the arguments are those of `send`.

        If `has_rest` is true afterwards, call `send_rest` before sending anything else, and keep
        the memory unchanged until then. After an exception (Ctrl-C, say) the stream is intact:
        either no part of the message was sent, or the rest of it is left for `send_rest`."""

    @property
    def messages_begun(self) -> int:
        """How many messages `send_without_waiting` has sent, completely or in part."""

    @property
    def has_rest(self) -> bool:
        """Whether a message has been sent in part."""

    def send_rest(self) -> None:
        """Sends the rest of it, and waits until the peer has taken it."""

    @property
    def peer_process(self) -> int:
        """The id of the process at the other end if it is known and on this host; else 0."""

    def receive(self) -> Frame:
        """The next message."""

    def send_bytes(self, data: bytes) -> None:
        """Sends bytes outside of any frame: the handshake, before the first message."""

    def receive_bytes(self, length: int) -> bytes:
        """Exactly `length` bytes of a handshake."""

    def channel_binding(self) -> bytes:
        """Bytes that only the two ends of this connection share. Empty for connections within a
        process or a host, and without encryption.

        Raises:
            AuthenticationError: the other end is a process of another user.
        """

    def poll(self, *, patiently: bool = False) -> bool:
        """Whether a message, or its beginning, is there.

        Args:
            patiently: wait a moment for one.
        """

    def fileno(self) -> int:
        """A descriptor that becomes readable when data arrives; -1 if there is none."""

    def set_timeout(self, seconds: float | None, until: float | None = None) -> None:
        """Sets how long `send` and `receive` wait for the peer; None means forever.

        Args:
            until: a time of `time.monotonic` at which a message that is still arriving or leaving
                is given up; by default it may take any time while it makes progress.
        """

    def share_memory(self, memory: MemorySharing) -> None:
        """Offers shared memory for large buffers; transports that cannot use it ignore it."""

    def interrupt(self) -> None:
        """Ends the connection and every wait on it, from any thread."""

    def close(self) -> None:
        """Frees the descriptor. Only for the thread that uses the connection, or for any thread
        once it is unused."""


class Listener(Protocol):
    @property
    def address(self) -> str:
        """Where others can connect."""

    def accept(self) -> Connection:
        """The next connection, which has not authenticated itself yet."""

    def close(self) -> None: ...


class Transport(Protocol):
    def listen(self) -> Listener: ...

    def connect(self, address: str, timeout: float) -> Connection: ...
