"""The buffers of one connection's messages, as far as they go through shared memory.

The memory is shared by two processes, over all connections between them. What belongs to a single
connection is here: the descriptors that come with its messages, and what was handed back by it.
"""

from __future__ import annotations

import array
import collections
import errno
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from telegrad.errors import ProtocolError
from telegrad.transport.base import MemorySharing, Placed, aligned
from telegrad.wire.frames import BUFFER, Loan

__all__ = ["ANCILLARY", "Placement", "SharedBuffers"]

_MOST_DESCRIPTORS = 64  # in one message; the kernel's limit is 253
ANCILLARY = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
"""How much room a message's descriptors take."""

# Notes of a buffer:
_NEW_SEGMENT = 1  # its segment's file descriptor comes with this frame
_HANDED_BACK = 2  # its segment is the reader's own

# Those that are smaller lie in one segment together: each would take a system call of its own on
# the socket, and a segment of its own takes a descriptor at both ends. A tensor that is kept keeps
# all of its segment.
_ALONE_FROM = 1 << 20
_BUNDLE = 1 << 22


class Placement:
    """Where the buffers of a message go: on the stream, unless they are shared."""

    __slots__ = ("_announced", "_buffers", "_entries", "handed_back", "lent")

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._entries = [(buffer.nbytes, 0, 0) for buffer in buffers]
        self._announced: list[tuple[int, int]] = []  # a buffer, and its segment's descriptor
        self.lent: list[int] = []
        self.handed_back: list[int] = []

    def share(self, numbers: Sequence[int], placed: Placed) -> None:
        """Buffers of these numbers lie in a segment."""
        note = 0
        if placed.is_handed_back:
            note = _HANDED_BACK
            self.handed_back.append(placed.segment)
        else:
            self.lent.append(placed.segment)
            if placed.descriptor >= 0:
                note = _NEW_SEGMENT
                self._announced.append((numbers[0], placed.descriptor))
        for number in numbers:
            self._entries[number] = self._entries[number][0], placed.segment, note
            note = 0

    @property
    def has_room(self) -> bool:
        """Whether there is room for another descriptor in the message."""
        return len(self._announced) < _MOST_DESCRIPTORS

    @property
    def table(self) -> bytes:
        """Tells the reader."""
        return b"".join(itertools.starmap(BUFFER.pack, self._entries))

    @property
    def streamed(self) -> list[memoryview]:
        """Those that follow on the stream."""
        return [b for b, entry in zip(self._buffers, self._entries, strict=True) if not entry[1]]

    @property
    def descriptors(self) -> list[int]:
        """To be passed with the message."""
        return [descriptor for _, descriptor in sorted(self._announced)]


def _bundles(buffers: Sequence[memoryview]) -> Iterator[list[int]]:
    """The numbers of those that go into one segment."""
    bundle: list[int] = []
    size = 0
    for number, buffer in enumerate(buffers):
        if buffer.nbytes >= _ALONE_FROM:
            yield [number]
        elif buffer.nbytes:
            if size + buffer.nbytes > _BUNDLE:
                yield bundle
                bundle, size = [], 0
            bundle.append(number)
            size = aligned(size + buffer.nbytes)
    if bundle:
        yield bundle


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
        # The segments of that message, from where on they have not been read; None for one that
        # cannot be.
        self._unread: dict[int, memoryview | None] = {}
        self._handed_back: list[int] = []  # what the other end may not have received yet

    def place(self, buffers: Sequence[memoryview]) -> Placement:
        """Copies buffers into shared memory, as far as there is room."""
        if self._handed_back:
            self._handed_back = self._memory.in_flight(self._handed_back)
        placement = Placement(buffers)
        try:
            for numbers in _bundles(buffers):
                if not placement.has_room:
                    break
                placed = self._memory.lend(*[buffers[number] for number in numbers])
                if placed is not None:
                    placement.share(numbers, placed)
        except BaseException:  # Ctrl-C: the message will not be sent
            self.not_sent(placement)
            raise
        return placement

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
            ProtocolError: there is no such segment, or it is too small.
        """
        if segment not in self._unread:
            self._unread[segment] = self._segment(segment, note, loans)
        rest = self._unread[segment]
        if rest is None:
            return None
        if length > len(rest):
            raise ProtocolError(f"shared-memory segment {segment} is too small for its buffers")
        self._unread[segment] = rest[aligned(length) :]
        return rest[:length]

    def _segment(self, segment: int, note: int, loans: list[Loan]) -> memoryview | None:
        """All of a segment."""
        if note & _HANDED_BACK:
            return self._memory.take_back(segment)
        if note & _NEW_SEGMENT:
            try:
                self._memory.learn(segment, self.next_descriptor())
            except OSError:
                self._memory.decline(segment)
                return None
        memory, loan = self._memory.borrow(segment)
        loans.append(loan)
        return memory

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
        self._unread.clear()
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
