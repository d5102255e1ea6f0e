"""A real transport without a network: agents of one process, for tests.

Messages are copied on their way, so nothing is shared by accident that a socket would not share.
Addresses are `inproc:<number>`; a listener is found by its address while it is open.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence
from typing import Any

from telegrad.transport.base import ConnectionClosed, MemorySharing, TransportTimeout
from telegrad.wire.frames import Frame, Kind

__all__ = ["InprocConnection", "InprocListener", "InprocTransport"]

_listeners: dict[str, InprocListener] = {}
_numbers = itertools.count(1)

_Item = Frame | bytes | None  # None: the other end has closed


class InprocConnection:
    """One end of a pair of queues; `has_ended` is common to both ends."""

    def __init__(
        self,
        inbox: queue.SimpleQueue[_Item],
        outbox: queue.SimpleQueue[_Item],
        has_ended: threading.Event,
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._has_ended = has_ended
        self.reads = 0
        self.messages_begun = 0
        self._timeout: float | None = None
        self._is_closed = threading.Event()
        self._pending = b""
        self._peeked: list[_Item] = []

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
        copies = [bytearray(buffer) for buffer in buffers]
        frame = Frame(kind, flags, call_id, context_id, message_id, b"".join(body), list(copies))
        self._put(frame)

    def send_without_waiting(self, *message: Any) -> None:
        self.send(*message)  # a queue takes everything at once
        self.messages_begun += 1

    has_rest = False
    peer_process = 0  # it is this one

    def send_rest(self) -> None:
        pass

    def send_bytes(self, data: bytes) -> None:
        self._put(bytes(data))

    def _put(self, item: Frame | bytes) -> None:
        if self._has_ended.is_set():
            raise ConnectionClosed("the connection is closed")
        self._outbox.put(item)

    def receive(self) -> Frame:
        item = self._get()
        if not isinstance(item, Frame):
            raise ConnectionClosed("bytes came where a message was expected")
        return item

    def receive_bytes(self, length: int) -> bytes:
        while len(self._pending) < length:
            item = self._get()
            if not isinstance(item, bytes):
                raise ConnectionClosed("a message came where a handshake was expected")
            self._pending += item
        data, self._pending = self._pending[:length], self._pending[length:]
        return data

    def channel_binding(self) -> bytes:
        return b""  # both ends are this process

    def _get(self) -> Frame | bytes:
        if self._is_closed.is_set():
            raise ConnectionClosed("the connection is closed")
        if self._peeked:
            item = self._peeked.pop()
        else:
            try:
                item = self._inbox.get(timeout=self._timeout)
            except queue.Empty:
                raise TransportTimeout from None
        if item is None:
            self._inbox.put(None)  # every later read ends too
            raise ConnectionClosed("the other end closed the connection")
        self.reads += 1
        return item

    def poll(self) -> bool:
        if not self._peeked:
            try:
                self._peeked.append(self._inbox.get_nowait())
            except queue.Empty:
                return False
        return True

    def has_more(self) -> bool:
        return self.poll()

    def fileno(self) -> int:
        return -1

    def receive_now(self) -> Frame | None:
        return self.receive() if self.poll() else None

    def glance(self) -> bool:
        return self.poll()

    def rest(self) -> bool:
        return not self.poll()

    def serve_from(self, processor: int) -> None:
        pass  # the other end is in the same process

    def set_timeout(self, seconds: float | None, until: float | None = None) -> None:
        self._timeout = seconds

    def open_mailbox(self) -> None:
        pass  # there is no shorter way

    def share_memory(self, memory: MemorySharing) -> None:
        pass  # all memory is shared here; what a socket copies is copied here too

    def interrupt(self) -> None:
        self._is_closed.set()
        self._has_ended.set()
        self._inbox.put(None)
        self._outbox.put(None)

    def close(self) -> None:
        self.interrupt()


class InprocListener:
    def __init__(self) -> None:
        self._address = f"inproc:{next(_numbers)}"
        self._waiting: queue.SimpleQueue[InprocConnection | None] = queue.SimpleQueue()
        self._is_closed = False
        _listeners[self._address] = self

    @property
    def address(self) -> str:
        return self._address

    def accept(self) -> InprocConnection:
        connection = self._waiting.get()
        if connection is None:
            self._waiting.put(None)
            raise ConnectionClosed("the listener is closed")
        return connection

    def offer(self, connection: InprocConnection) -> None:
        self._waiting.put(connection)
        if self._is_closed:
            self._refuse_waiting()

    def close(self) -> None:
        _listeners.pop(self._address, None)
        self._is_closed = True
        self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        """Ends the connections that nobody will accept any more."""
        while True:
            try:
                connection = self._waiting.get_nowait()
            except queue.Empty:
                break
            if connection is not None:
                connection.close()
        self._waiting.put(None)


class InprocTransport:
    def listen(self) -> InprocListener:
        return InprocListener()

    def connect(self, address: str, timeout: float) -> InprocConnection:
        listener = _listeners.get(address)
        if listener is None:
            raise ConnectionClosed(f"nobody listens at {address}")
        there: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        back: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        has_ended = threading.Event()
        listener.offer(InprocConnection(there, back, has_ended))
        return InprocConnection(back, there, has_ended)
