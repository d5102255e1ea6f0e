"""A connection's messages over a stream socket.

Written for few system calls: a small message is one gather-write and one read, or goes by a
mailbox. Large buffers are written from, and read into, the memory of the tensors themselves.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from typing import Any

from telegrad.errors import ProtocolError
from telegrad.forks import leave_at_fork
from telegrad.transport.base import ConnectionClosed, MemorySharing, TransportTimeout
from telegrad.transport.same_host.mailbox import FOR_SLEEPER, NOT_PUT, Mailbox
from telegrad.transport.same_host.mailbox import is_available as has_mailboxes
from telegrad.transport.same_host.shared_buffers import Placement, SharedBuffers
from telegrad.transport.socket_bytes import JOINED_UP_TO, READ_AHEAD, SocketBytes, is_ready
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
    whole_frame,
)
from telegrad.wire.tensor_table.memory import BufferPool

__all__ = ["POOLED_FROM", "SocketConnection"]

POOLED_FROM = 1 << 16
"""Smaller buffers are plain memory: cheaper than a loan."""

_WAKE = pack_header(Kind.WAKE, 0, 0, 0, -1, -1, 0)


class SocketConnection(SocketBytes):
    """One message stream over a connected socket."""

    def __init__(
        self, sock: socket.socket, pool: BufferPool, limits: Limits, busy_wait: float = 0.0
    ) -> None:
        super().__init__(sock, busy_wait)
        self._pool = pool
        self._limits = limits
        self._passes_descriptors = sock.family == socket.AF_UNIX
        self._mailbox: Mailbox | None = None
        self._frames_sent = self._frames_read = 0  # by the socket, since there is a mailbox
        self._looks = 0
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
        length = sum(map(len, body))
        header = pack_header(kind, flags, len(buffers), call_id, context_id, message_id, length)
        mailbox = self._mailbox
        if not buffers:
            total = HEADER.size + length
            if total <= JOINED_UP_TO:
                whole = b"".join((header, *body))
                try:
                    put = NOT_PUT if mailbox is None else mailbox.put(whole, self._frames_sent)
                except ValueError:  # its memory is gone: whoever reads here has found the end
                    raise ConnectionClosed("it has been closed") from None
                if put != NOT_PUT:
                    if put == FOR_SLEEPER:
                        self._frames_sent += 1
                        self._write([_WAKE], (), HEADER.size)
                    return
                self._frames_sent += 1
                self._write([whole], (), total)
            else:
                self._frames_sent += 1
                self._write([header, *body], (), total)
            return
        self._frames_sent += 1
        shared = self._shared
        placement = Placement(buffers) if shared is None else shared.place(buffers)
        try:
            parts = [header, placement.table, *body, *placement.streamed]
            self._write(parts, placement.descriptors, sum(len(part) for part in parts))
        except BaseException:
            if shared is not None:
                shared.not_sent(placement)
            raise
        if shared is not None:
            shared.sent(placement)

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
        length = sum(map(len, body))
        header = pack_header(kind, flags, len(buffers), call_id, context_id, message_id, length)
        if not buffers:
            is_short = HEADER.size + length <= JOINED_UP_TO
            self._write_what_fits([b"".join((header, *body))] if is_short else [header, *body], ())
            return
        shared = self._shared
        placement = Placement(buffers) if shared is None else shared.place(buffers)
        begun_before = self.messages_begun
        try:
            parts = [header, placement.table, *body, *placement.streamed]
            self._write_what_fits(parts, placement.descriptors)
        finally:
            if shared is not None:
                if self.messages_begun == begun_before:
                    shared.not_sent(placement)
                else:
                    shared.sent(placement)

    # -- receiving

    def receive(self) -> Frame:
        while True:
            mailbox = self._mailbox
            if mailbox is not None:
                message = self._take_message(mailbox)
                if message is not None:
                    self.reads += 1
                    return whole_frame(message, self._limits)
            elif self._start == self._end:
                self._patience.look(self._is_readable)
            self._fill(HEADER.size)
            frame = self._read_frame()
            if frame is not None:
                return frame

    def receive_now(self) -> Frame | None:
        mailbox = self._mailbox
        if mailbox is not None:
            if mailbox.is_asleep:
                mailbox.wake_up()
            message = mailbox.take(self._frames_read)
            if message is not None:
                self.reads += 1
                return whole_frame(message, self._limits)
        while self._has_whole_frame():
            mailbox = self._mailbox  # asked after the socket: what was put in before comes before
            message = None if mailbox is None else mailbox.take(self._frames_read)
            if message is not None:
                self.reads += 1
                return whole_frame(message, self._limits)
            frame = self._read_frame()
            if frame is not None:
                return frame
        return None

    def glance(self) -> bool:
        return self._end > self._start or (self._mailbox is not None and self._mailbox.has_new())

    def rest(self) -> bool:
        if self._end > self._start:
            return False
        return self._mailbox is None or self._mailbox.fall_asleep()

    def serve_from(self, processor: int) -> None:
        if self._mailbox is not None:
            self._mailbox.serve_from(processor)

    def _has_whole_frame(self) -> bool:
        """Whether a frame is ahead to its end; reads what is there, without waiting."""
        if self._is_whole_frame_ahead():
            return True
        if self._start == self._end:
            self._start = self._end = 0
        if self._end < READ_AHEAD:
            count = self._try_read(self._ahead[self._end :])
            if count < 0:
                self._read_into(self._ahead[self._end :])  # raises what is the matter
            self._end += max(0, count)
        return self._is_whole_frame_ahead()

    def _is_whole_frame_ahead(self) -> bool:
        here = self._end - self._start
        if here < HEADER.size:
            return False
        _, _, buffer_count, _, _, _, length = unpack_header(self._ahead, self._start, self._limits)
        needed: int = HEADER.size + buffer_count * BUFFER.size + length
        if buffer_count and here >= needed:
            table = self._start + HEADER.size
            entries = self._ahead[table : table + buffer_count * BUFFER.size]
            needed += sum(size for size, segment, _ in BUFFER.iter_unpack(entries) if not segment)
        return here >= needed

    def _read_frame(self) -> Frame | None:
        """The frame whose header is ahead; None if it was meant for the connection itself."""
        kind, flags, buffer_count, call_id, context_id, message_id, length = unpack_header(
            self._ahead, self._start, self._limits
        )
        self._start += HEADER.size
        self._frames_read += 1
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
        if kind is Kind.WAKE:
            return None
        if kind is Kind.MAILBOX:
            self._accept_mailbox()
            return None
        return Frame(kind, flags, call_id, context_id, message_id, body, buffers, loans)

    def _skip_message(
        self, length: int, table: list[tuple[int, int, int]]
    ) -> tuple[bytes, Sequence[Any]]:
        """Reads a message that is too large, and keeps nothing of it but why."""
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
        is_whole = True
        shared = self._shared
        for length, segment, note in table:
            if not segment:
                buffer = self._streamed_buffer(length)
            elif shared is not None:
                buffer = shared.received(length, segment, note, loans)
            else:
                raise ProtocolError("the peer uses shared memory that was not agreed on")
            if buffer is None:
                is_whole = False
            buffers.append(buffer)
        if shared is not None:
            shared.message_read()
        return buffers if is_whole else Unread()

    def _streamed_buffer(self, length: int) -> Any:
        try:
            target = self._pool.take(length) if length >= POOLED_FROM else bytearray(length)
        except (OSError, MemoryError):
            self._skip(length)
            return None
        self._take_into(memoryview(target).cast("B"))
        return target

    def _take_message(self, mailbox: Mailbox) -> bytes | None:
        """The next message, out of the mailbox; None if it comes by the socket."""
        if mailbox.is_asleep:
            mailbox.wake_up()
        while True:
            if mailbox.has_new():
                return mailbox.take(self._frames_read)
            if self._end > self._start:
                return None
            if self._patience.look(self._is_anything_there):
                if not mailbox.has_new():
                    return None
            elif mailbox.fall_asleep():
                return None

    def _is_anything_there(self) -> bool:
        mailbox = self._mailbox
        if mailbox is not None and mailbox.has_new():
            return True
        self._looks += 1
        if self._looks & 7:
            return False
        if mailbox is not None:
            mailbox.make_way()
        return bool(self._is_readable())

    def open_mailbox(self) -> None:
        if self._shared is None or not self._patience.is_on or not has_mailboxes():
            return
        try:
            made, descriptor = Mailbox.make()
        except OSError:
            return  # no memory for it: the socket still works
        try:
            header = pack_header(Kind.MAILBOX, 0, 0, 0, -1, -1, 0)
            self._write([header], [descriptor], HEADER.size)
        except (ConnectionClosed, TransportTimeout):
            made.close()
            return  # whoever sends the first message will hear of it
        finally:
            os.close(descriptor)
        self._frames_sent = self._frames_read = 0
        self._mailbox = made

    def _accept_mailbox(self) -> None:
        if self._shared is None or self._mailbox is not None:
            raise ProtocolError("a mailbox came that was not agreed on")
        try:
            self._mailbox = Mailbox.open(self._shared.next_descriptor())
            self._frames_sent = self._frames_read = 0
        except OSError:
            pass  # no memory or descriptor for it: the other end uses it when this one looks there
        finally:
            self._shared.message_read()

    def poll(self) -> bool:
        if self._mailbox is None:
            return self._end > self._start or is_ready(self._socket, select.POLLIN, 0)
        return self._has_message(self._mailbox)

    def _has_message(self, mailbox: Mailbox) -> bool:
        """Whether a message is there, or the end: not just a frame that has come too late to wake
        anybody."""
        while True:
            if self._end - self._start >= HEADER.size:
                if self._ahead[self._start : self._start + HEADER.size] != _WAKE:
                    return True
                self._read_frame()
            elif self._end > self._start or mailbox.has_new():
                return True
            elif not self._is_readable():
                return False
            else:
                count = self._try_read(self._ahead)
                if count <= 0:
                    return True
                self._start, self._end = 0, count

    def has_more(self) -> bool:
        mailbox = self._mailbox
        if mailbox is None:
            if self._end == self._start:
                if not self._patience.look(self._is_readable):
                    return False
                self._fill(1)
            return True
        while not self._has_message(mailbox):
            if not self._patience.look(self._is_anything_there) and mailbox.fall_asleep():
                return False
        return True

    # -- the connection

    def share_memory(self, memory: MemorySharing) -> None:
        if self._passes_descriptors:
            self._shared = SharedBuffers(memory)

    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None
        if self._shared is not None:
            self._shared.close()
        self._socket.close()

    def leave_to_parent(self) -> None:
        self._mailbox = self._shared = None
        self._socket.close()
