"""What stands between a worker and its transport: something that counts, or does harm.

Whoever wants to see or change what a worker sends wraps each of its connections. A wrapper of a
connection derives from `WrappedConnection` and says only what it does otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from telegrad.transport.base import (
    Connection,
    Listener,
    MemorySharing,
    Transport,
)
from telegrad.wire.frames import Frame, Kind

__all__ = ["WrappedConnection", "WrappedTransport"]

Wrap = Callable[[Connection], Connection]


class WrappedTransport:
    """A transport all of whose connections are wrapped."""

    def __init__(self, transport: Transport, wrap: Wrap) -> None:
        self._transport = transport
        self._wrap = wrap

    def listen(self) -> Listener:
        return _WrappedListener(self._transport.listen(), self._wrap)

    def connect(self, address: str, timeout: float) -> Connection:
        return self._wrap(self._transport.connect(address, timeout))


class _WrappedListener:
    def __init__(self, listener: Listener, wrap: Wrap) -> None:
        self._listener = listener
        self._wrap = wrap

    @property
    def address(self) -> str:
        return self._listener.address

    def accept(self) -> Connection:
        return self._wrap(self._listener.accept())

    def close(self) -> None:
        self._listener.close()


class WrappedConnection:
    """Does what the connection does that it wraps."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.messages_begun = 0

    @property
    def reads(self) -> int:
        return self._connection.reads

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
        self._connection.send(kind, flags, call_id, context_id, message_id, body, buffers)

    def send_without_waiting(self, *message: Any) -> None:
        self.messages_begun += 1  # how much of it has left, if it is interrupted, is not known
        self.send(*message)  # waits: what a wrapper does to a message, it does in `send`

    @property
    def has_rest(self) -> bool:
        return False

    def send_rest(self) -> None:
        pass  # there never is one

    @property
    def peer_process(self) -> int:
        return self._connection.peer_process

    def receive(self) -> Frame:
        return self._connection.receive()

    def send_bytes(self, data: bytes) -> None:
        self._connection.send_bytes(data)

    def receive_bytes(self, length: int) -> bytes:
        return self._connection.receive_bytes(length)

    def channel_binding(self) -> bytes:
        return self._connection.channel_binding()

    def poll(self) -> bool:
        return self._connection.poll()

    def has_more(self) -> bool:
        return self._connection.has_more()

    def fileno(self) -> int:
        return self._connection.fileno()

    def receive_now(self) -> Frame | None:
        return self._connection.receive_now()

    def glance(self) -> bool:
        return self._connection.glance()

    def rest(self) -> bool:
        return self._connection.rest()

    def serve_from(self, processor: int) -> None:
        self._connection.serve_from(processor)

    def set_timeout(self, seconds: float | None, until: float | None = None) -> None:
        self._connection.set_timeout(seconds, until)

    def share_memory(self, memory: MemorySharing) -> None:
        self._connection.share_memory(memory)

    def open_mailbox(self) -> None:
        self._connection.open_mailbox()

    def interrupt(self) -> None:
        self._connection.interrupt()

    def close(self) -> None:
        self._connection.close()
