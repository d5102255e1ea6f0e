"""The buffers of one connection's messages, as far as they go through shared memory.

The memory is shared by two processes, over all connections between them. What belongs to a single
connection is here: the descriptors that come with its messages, and what was handed back by it.
"""

from __future__ import annotations

import array
import collections
import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

from telegrad.errors import ProtocolError
from telegrad.transport.base import MemorySharing
from telegrad.wire.frames import BUFFER, Loan

__all__ = ["ANCILLARY", "Placement", "SharedBuffers"]

_MOST_DESCRIPTORS = 64  # in one message; the kernel's limit is 253
ANCILLARY = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
"""How much room a message's descriptors take."""

# Notes of a buffer:
_NEW_SEGMENT = 1  # its segment's file descriptor comes with this frame
_HANDED_BACK = 2  # its segment is the reader's own


class Placement:
    """Where the buffers of a message go.

    Attributes:
        table: tells the reader.
        streamed: those that follow on the stream.
        descriptors: to be passed with the message.
    """

    __slots__ = ("descriptors", "handed_back", "lent", "streamed", "table")

    def __init__(self) -> None:
        self.table = bytearray()
        self.streamed: list[memoryview] = []
        self.descriptors: list[int] = []
        self.lent: list[int] = []
        self.handed_back: list[int] = []

    def stream(self, buffer: memoryview) -> None:
        self.table += BUFFER.pack(buffer.nbytes, 0, 0)
        self.streamed.append(buffer)


class SharedBuffers:
    """
    Args:
        memory: shared with the process at the other end.
    """

    def __init__(self, memory: MemorySharing) -> None:
        self._memory = memory
        # Of each message that came with some. Where there is none left for the program, the kernel
        # drops those of a message, or the last of them.
        self._arrived: collections.deque[collections.deque[int]] = collections.deque()
        self._of_message: collections.deque[int] | None = None  # of that which is being read
        self._handed_back: list[int] = []  # what the other end may not have received yet

    def place(self, buffers: Sequence[memoryview]) -> Placement:
        """Copies buffers into shared memory, as far as there is room."""
        if self._handed_back:
            self._handed_back = self._memory.in_flight(self._handed_back)
        placement = Placement()
        try:
            for buffer in buffers:
                self._place(buffer, placement)
        except BaseException:  # Ctrl-C: the message will not be sent
            self.not_sent(placement)
            raise
        return placement

    def _place(self, buffer: memoryview, placement: Placement) -> None:
        placed = None
        if len(placement.descriptors) < _MOST_DESCRIPTORS:
            placed = self._memory.lend(buffer)
        if placed is None:
            placement.stream(buffer)
            return
        note = 0
        if placed.is_handed_back:
            note = _HANDED_BACK
            placement.handed_back.append(placed.segment)
        else:
            placement.lent.append(placed.segment)
            if placed.descriptor >= 0:
                note = _NEW_SEGMENT
                placement.descriptors.append(placed.descriptor)
        placement.table += BUFFER.pack(buffer.nbytes, placed.segment, note)

    def sent(self, placement: Placement) -> None:
        """The message has left."""
        self._handed_back += placement.handed_back

    def not_sent(self, placement: Placement) -> None:
        """It has not left whole: whether the other end has learnt of its segments is not known."""
        self._memory.abandon(placement.lent)
        self._memory.mislay(placement.handed_back)

    def received(self, length: int, segment: int, note: int, loans: list[Loan]) -> Any:
        """A buffer that has come in a segment; if that is lent, `loans` grow by it. None if there
        is no descriptor or no memory for it here.

        Raises:
            ProtocolError: there is no such segment.
        """
        if note & _HANDED_BACK:
            return self._memory.take_back(segment, length)
        if note & _NEW_SEGMENT:
            try:
                self._memory.learn(segment, self.next_descriptor())
            except OSError:
                self._memory.decline(segment)
                return None
        buffer, loan = self._memory.borrow(segment, length)
        loans.append(loan)
        return buffer

    def keep_descriptors(self, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        """Takes what has come beside the bytes of the stream: the kernel reads no further than the
        first message that has descriptors."""
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        self._arrived.append(collections.deque(descriptors))

    def next_descriptor(self) -> int:
        """The next of the message that is being read.

        Raises:
            OSError: it was dropped on the way, for there was none left for this program.
            ProtocolError: none has come.
        """
        if self._of_message is None:
            if not self._arrived:
                raise ProtocolError("shared memory came without its descriptor")
            self._of_message = self._arrived.popleft()
        if not self._of_message:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._of_message.popleft()

    def message_read(self) -> None:
        """The descriptors that follow are another's."""
        if self._of_message is not None:
            _close_all(self._of_message)
            self._of_message = None

    def close(self) -> None:
        """The connection has ended."""
        self.message_read()
        for descriptors in self._arrived:
            _close_all(descriptors)
        self._arrived.clear()
        self._memory.mislay(self._handed_back)


def _close_all(descriptors: collections.deque[int]) -> None:
    while descriptors:
        os.close(descriptors.popleft())
