"""Messages over a stream socket.

A small message takes one gather-write and one read. Large buffers are written from, and read into,
the memory of the tensors themselves.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import Any

from telegrad.errors import ProtocolError
from telegrad.forks import leave_at_fork
from telegrad.transport.base import MemorySharing
from telegrad.transport.same_host.shared_buffers import Placement, SharedBuffers
from telegrad.transport.socket_bytes import JOINED_UP_TO, SocketBytes, is_ready
from telegrad.wire.frames import (
    BUFFER,
    HEADER,
    Frame,
    Kind,
    Limits,
    Loan,
    Unread,
    over_limits,
    pack_header,
    unpack_header,
)
from telegrad.wire.tensor_table.memory import BufferPool

__all__ = ["POOLED_FROM", "SocketConnection"]

POOLED_FROM = 1 << 16
"""Smaller buffers are plain memory: cheaper than a buffer of the pool."""


class SocketConnection(SocketBytes):
    """One message stream over a connected socket."""

    def __init__(
        self, sock: socket.socket, pool: BufferPool, limits: Limits, busy_wait: float = 0.0
    ) -> None:
        super().__init__(sock, busy_wait)
        self._pool = pool
        self._limits = limits
        leave_at_fork(self)

    # -- sending

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
        message = (kind, flags, call_id, context_id, message_id, body, buffers)
        parts, placement = self._packed(*message)
        if placement is None:
            self._write(parts, ())
            return
        was_sent = False
        try:
            self._write(parts, placement.descriptors)
            was_sent = True
        finally:
            placement.settle(was_sent=was_sent)

    def send_without_waiting(self, *message: Any) -> None:
        parts, placement = self._packed(*message)
        if placement is None:
            self._write_what_fits(parts, ())
            return
        begun_before = self.messages_begun
        try:
            self._write_what_fits(parts, placement.descriptors)
        finally:
            placement.settle(was_sent=self.messages_begun != begun_before)

    def _packed(
        self,
        kind: Kind,
        flags: int = 0,
        call_id: int = 0,
        context_id: int = -1,
        message_id: int = -1,
        body: Sequence[bytes | memoryview] = (),
        buffers: Sequence[memoryview] = (),
    ) -> tuple[list[Any], Placement | None]:
        """The parts of a message as they go over the socket, and where its buffers go."""
        length = sum(map(len, body))
        header = pack_header(kind, flags, len(buffers), call_id, context_id, message_id, length)
        if not buffers:
            if HEADER.size + length <= JOINED_UP_TO:
                return [b"".join((header, *body))], None
            return [header, *body], None
        placement = Placement(buffers) if self._shared is None else self._shared.place(buffers)
        return [header, placement.table, *body, *placement.streamed], placement

    # -- receiving

    def receive(self) -> Frame:
        if self._start == self._end:
            self._spinner.spin(self._is_readable)
        self._fill(HEADER.size)
        kind, flags, buffer_count, call_id, context_id, message_id, length = unpack_header(
            self._ahead, self._start, self._limits
        )
        self._start += HEADER.size
        buffers: Sequence[Any] = []
        loans: list[Loan] = []
        if not buffer_count:
            if length <= self._limits.max_body:
                body = self._take(length)
            else:
                body, buffers = self._skip_message(length, [])
        else:
            table = list(BUFFER.iter_unpack(self._take(buffer_count * BUFFER.size)))
            if over_limits(length, sum(entry[0] for entry in table), self._limits):
                body, buffers = self._skip_message(length, table)
            else:
                body = self._take(length)
                buffers = self._read_buffers(table, loans)
        if self._start == self._end:
            self._start = self._end = 0
        return Frame(kind, flags, call_id, context_id, message_id, body, buffers, loans)

    def _skip_message(
        self, length: int, table: list[tuple[int, int, int]]
    ) -> tuple[bytes, Sequence[Any]]:
        """Reads a message that is too large, and keeps only the reason."""
        self._skip(length)
        loans: list[Loan] = []
        for size, segment, note in table:
            if not segment:
                self._skip(size)
            elif self._shared is not None:
                self._shared.received(size, segment, note, loans)
        if self._shared is not None:
            self._shared.message_read()
        for loan in loans:
            loan.end()
        size = sum(entry[0] for entry in table)
        return b"", Unread(over_limits(length, size, self._limits))

    def _read_buffers(self, table: list[tuple[int, int, int]], loans: list[Loan]) -> Sequence[Any]:
        buffers: list[Any] = []
        for length, segment, note in table:
            if not segment:
                buffers.append(self._streamed_buffer(length))
            elif self._shared is not None:
                buffers.append(self._shared.received(length, segment, note, loans))
            else:
                raise ProtocolError("the peer uses shared memory that was not agreed on")
        if self._shared is not None:
            self._shared.message_read()
        return Unread() if any(buffer is None for buffer in buffers) else buffers

    def _streamed_buffer(self, length: int) -> Any:
        try:
            target = self._pool.take(length) if length >= POOLED_FROM else bytearray(length)
        except (OSError, MemoryError):
            self._skip(length)
            return None
        self._take_into(memoryview(target).cast("B"))
        return target

    def poll(self, *, patiently: bool = False) -> bool:
        return (
            self._end > self._start
            or (patiently and self._spinner.spin(self._is_readable))
            or is_ready(self._socket, select.POLLIN, 0)
        )

    # -- the connection

    def share_memory(self, memory: MemorySharing) -> None:
        if self._socket.family == socket.AF_UNIX:  # others pass no descriptors
            self._shared = SharedBuffers(memory)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
        self._socket.close()

    def leave_to_parent(self) -> None:
        self._shared = None
        self._socket.close()
