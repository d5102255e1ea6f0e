"""Shared memory between two processes of one host, for large tensors.

Each side owns the segments it lends to the other: anonymous memory (`memfd`), passed once by file
descriptor and then named by number. Nothing has a name in the file system, so nothing is left when
processes die. The first page of a segment holds one byte of state that both sides see:

=========  ==================================================================
FREE       the owner may fill it again
LENT       the borrower has tensors on it
RETIRED    the owner has let go of it; the borrower unmaps it when it next looks
HANDED     the borrower has filled it, and a message tells the owner so
KEPT       the owner has tensors on it that came back in it
LOST       that message may never arrive
=========  ==================================================================

The owner alone moves FREE → LENT and FREE → RETIRED, and LENT → RETIRED if the message did not
leave whole, for then nobody may come to borrow it; the borrower alone moves LENT → FREE, by one
store, when the last tensor on the buffer dies, on any thread, even inside the garbage collector. So
giving back needs no message and no lock. A borrower that dies takes nothing along: its owner sees
the connection end and drops every segment lent to it. A segment is announced in the frame that
first uses it and used again only after the borrower has freed it, hence has mapped it: no frame can
name a segment that its reader does not know.

Who serves a request holds on to the segments that it came in (`_Loan.hold`), and once their tensors
are dead may send what it has to say in them: LENT → HANDED. So the answer to a large message needs
no further memory. The owner moves HANDED → KEPT when it gets that message, and KEPT → FREE when the
tensors on it die. If the message does not leave whole, or its connection ends before it was
received, the borrower moves HANDED → LOST; the owner may still receive it, and retires what has
been LOST for a while. At every time one side alone writes to a segment, so a state that is
overwritten in the moment when a connection ends costs no more than the segment.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from telegrad.errors import ProtocolError
from telegrad.forks import leave_at_fork
from telegrad.transport.base import Placed, aligned
from telegrad.wire.tensor_table.memory import lend, size_class

__all__ = ["SHARE_FROM", "SharedMemory", "is_available", "map_sealed", "sealed_memory"]

SHARE_FROM = 1 << 16
"""What has at least this many bytes, one buffer or several together, goes through shared memory;
below it, a socket is faster."""

_MOST_SEGMENTS = (
    64  # lent to one peer: each costs both sides a descriptor for as long as it is used
)

# Of all segments that this process has lent to anybody. A peer that was lost may be back before it
# has read all that was sent to it, and must not find one of these in the place of another.
_numbers = itertools.count(1)

_FREE, _LENT, _RETIRED, _HANDED, _KEPT, _LOST = range(6)
_DATA = mmap.PAGESIZE  # the state has the first page to itself, data begins page-aligned
_STEP = 1 << 26
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)


def is_available() -> bool:
    """Whether this system has what it takes: Linux's memfd and its seals."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class _Segment:
    __slots__ = (
        "announced",
        "data",
        "descriptor",
        "freed_at",
        "lost_at",
        "mapping",
        "number",
        "size",
    )

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.descriptor, self.mapping = sealed_memory(_DATA + size)
        self.data = _data_of(self.mapping)
        self.announced = False
        self.freed_at = time.monotonic()
        self.lost_at: float | None = None  # when it was first seen to be

    def retire(self) -> None:
        self.mapping[0] = _RETIRED
        self.close_descriptor()

    def close_descriptor(self) -> None:
        """It is needed until the borrower has its own."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class _Loan:
    """A peer's segment for as long as it is borrowed: by tensors, and by who holds it.

    Args:
        spares: where it stands while it is held and no tensor needs it.
    """

    __slots__ = ("_is_held", "_is_unused", "_spares", "_ticket", "mapping", "number")

    def __init__(self, number: int, mapping: mmap.mmap, spares: dict[_Loan, None]) -> None:
        self.number = number
        self.mapping = mapping
        self._spares = spares
        self._is_held = self._is_unused = False
        self._ticket = [True]  # whoever takes it, on whichever thread, decides what happens next

    def hold(self) -> None:
        """Until `end`, it is not given back, and may be handed back instead."""
        self._is_held = True

    def end(self) -> None:
        self._is_held = False
        if self._is_unused:
            self._spares.pop(self, None)
            self._give_back()

    def unused(self) -> None:
        """The last tensor on it has died, maybe in the garbage collector: takes no lock."""
        self._is_unused = True
        if self._is_held:
            self._spares[self] = None
        if not self._is_held:  # asked last: another thread may just have ended it
            self._spares.pop(self, None)
            self._give_back()

    def claim(self) -> bool:
        """Whether the caller is the one to decide about it."""
        try:
            return self._ticket.pop()
        except IndexError:
            return False

    def hand_back(self, data: Sequence[memoryview]) -> bool:
        """Fills it for its owner. It must have been claimed."""
        filled = _FREE  # if it is not, because of Ctrl-C
        try:
            _copy(data, _data_of(self.mapping))
            filled = _HANDED
        finally:
            is_lent: bool = self.mapping[0] == _LENT  # else its owner has let go of it meanwhile
            if is_lent:
                self.mapping[0] = filled
        return is_lent

    def _give_back(self) -> None:
        if self.claim() and self.mapping[0] == _LENT:  # else its owner has let go of it meanwhile
            self.mapping[0] = _FREE


class SharedMemory:
    """The memory that this process shares with one peer process: what it lends and borrows.

    Args:
        max_idle: how many bytes of free segments are kept at most.
        max_age: after how many seconds without use `trim` lets a free segment go.
    """

    def __init__(self, max_idle: int = 1 << 28, max_age: float = 2.0) -> None:
        self._max_idle = max_idle
        self._max_age = max_age
        self._lock = threading.RLock()  # guards the two tables below
        self._own: dict[int, _Segment] = {}
        self._theirs: dict[int, mmap.mmap] = {}
        self._spares: dict[_Loan, None] = {}  # changes by single steps, also in the collector
        self._closed = False
        self._refused = False  # the system has no memory for segments: stop asking for a while
        self._declined: list[int] = []  # the peer's that could not be taken, and it does not know
        leave_at_fork(self)

    def lend(self, *data: memoryview) -> Placed | None:
        length = _length_of(data)
        if length < SHARE_FROM:
            return None
        if self._spares:
            spare = self._fitting_spare(length)
            if spare is not None and spare.hand_back(data):
                return Placed(spare.number, True, -1)
        with self._lock:
            segment = self._free_segment(length)
            if segment is None:
                return None
            segment.mapping[0] = _LENT
            if segment.announced:
                segment.close_descriptor()
            descriptor = segment.descriptor
            segment.announced = True
        try:
            _copy(data, segment.data)
        except BaseException:  # Ctrl-C: nobody will come to borrow it
            self.abandon((segment.number,))
            raise
        return Placed(segment.number, False, descriptor)

    def _fitting_spare(self, length: int) -> _Loan | None:
        """A segment of the peer's that is no longer used here, and is the caller's from now on."""
        most = _most_for(length)
        for spare in list(self._spares):
            if length <= len(spare.mapping) - _DATA <= most and spare.claim():
                self._spares.pop(spare, None)
                if spare.mapping[0] == _LENT:
                    return spare
        return None

    def _free_segment(self, length: int) -> _Segment | None:
        if self._closed or self._refused:
            return None
        best: _Segment | None = None
        most = _most_for(length)
        for segment in self._own.values():
            if (
                length <= segment.size <= most
                and segment.mapping[0] == _FREE
                and (best is None or segment.size < best.size)
            ):
                best = segment
        if best is None:
            if len(self._own) >= _MOST_SEGMENTS:
                return None
            try:
                best = _Segment(next(_numbers), size_class(length))
            except OSError:
                # No memory or descriptors for it: the socket still works. Not asked again before
                # the next `trim`: a starved machine should not pay for it at every message.
                self._refused = True
                return None
            self._own[best.number] = best
        return best

    def abandon(self, segments: Sequence[int]) -> None:
        """A message has not left whole: the peer may or may not know of the segments in it."""
        with self._lock:
            for number in segments:
                segment = self._own.pop(number, None)
                if segment is not None:
                    segment.retire()

    def take_back(self, segment: int) -> memoryview:
        with self._lock:
            own = self._own.get(segment)
        if own is None or own.mapping[0] not in (_HANDED, _LOST):
            raise ProtocolError(f"shared-memory segment {segment} was not lent")
        mapping = own.mapping
        mapping[0] = _KEPT
        own.lost_at = None
        return _view(mapping, lambda: _free_again(mapping))

    def in_flight(self, segments: Sequence[int]) -> list[int]:
        with self._lock:
            return [number for number, _ in self._in_flight(segments)]

    def mislay(self, segments: Sequence[int]) -> None:
        with self._lock:
            for _, mapping in self._in_flight(segments):
                mapping[0] = _LOST

    def _in_flight(self, segments: Sequence[int]) -> Iterator[tuple[int, mmap.mmap]]:
        for number in segments:
            mapping = self._theirs.get(number)
            if mapping is not None and mapping[0] == _HANDED:
                yield number, mapping

    def learn(self, segment: int, descriptor: int) -> None:
        mapping = map_sealed(descriptor)
        if len(mapping) <= _DATA:
            raise ProtocolError("a shared-memory segment is too small")
        with self._lock:
            self._theirs[segment] = mapping

    def decline(self, segment: int) -> None:
        with self._lock:
            self._declined.append(segment)

    @property
    def has_declined(self) -> bool:
        return bool(self._declined)

    def take_declined(self) -> list[int]:
        """Those of the peer's segments that it has to be told of: it may drop them."""
        with self._lock:
            declined, self._declined = self._declined, []
        return declined

    def borrow(self, segment: int) -> tuple[memoryview, _Loan]:
        with self._lock:
            mapping = self._theirs.get(segment)
        if mapping is None:
            raise ProtocolError(f"shared-memory segment {segment} is not known")
        loan = _Loan(segment, mapping, self._spares)
        return _view(mapping, loan.unused), loan

    def trim(self, now: float) -> None:
        """Lets go of segments that have been free for a while, or are over the limit."""
        with self._lock:
            self._refused = False
            for number, mapping in list(self._theirs.items()):
                if mapping[0] == _RETIRED:
                    del self._theirs[number]
            free = []
            for segment in list(self._own.values()):
                state = segment.mapping[0]
                if state == _FREE:
                    free.append(segment)
                    continue
                segment.freed_at = now
                if state != _LOST:
                    segment.lost_at = None
                elif segment.lost_at is None:
                    segment.lost_at = now
                elif now - segment.lost_at > self._max_age:
                    segment.retire()
                    del self._own[segment.number]
            idle = sum(segment.size for segment in free)
            for segment in sorted(free, key=lambda s: s.freed_at):
                if now - segment.freed_at > self._max_age or idle > self._max_idle:
                    segment.retire()
                    del self._own[segment.number]
                    idle -= segment.size

    def idle_bytes(self) -> int:
        with self._lock:
            return sum(s.size for s in self._own.values() if s.mapping[0] == _FREE)

    def close(self) -> None:
        """The peer is gone: drops everything. Tensors on borrowed memory stay valid."""
        with self._lock:
            self._closed = True
            for segment in self._own.values():
                segment.retire()
            self._own.clear()
            self._theirs.clear()
            self._spares.clear()

    def leave_to_parent(self) -> None:
        self._lock = threading.RLock()
        self._closed = True
        for loan in list(self._spares):
            loan.claim()  # or else whoever holds it gives it back
        self._own, self._theirs, self._spares = {}, {}, {}


def sealed_memory(size: int) -> tuple[int, mmap.mmap]:
    """Anonymous memory that another process can map by the descriptor."""
    descriptor = os.memfd_create("telegrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        # Where the system has no page for memory that was promised, touching it kills the process
        # (SIGBUS). In steps, for a signal in the middle of one undoes it.
        for start in range(0, size, _STEP):
            os.posix_fallocate(descriptor, start, min(_STEP, size - start))
        # The other process must be able to trust the size: reading past a shrunk file kills it.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor, _map(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise


def map_sealed(descriptor: int) -> mmap.mmap:
    """Maps another process's memory, and closes the descriptor.

    Raises:
        OSError: the system has no memory or descriptor for it.
        ProtocolError: it is not what `sealed_memory` makes.
    """
    try:
        try:
            is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:
            is_sealed = False
        if not is_sealed:
            raise ProtocolError("a shared-memory segment is not sealed")
        try:
            return _map(descriptor, os.fstat(descriptor).st_size)
        except ValueError as error:
            raise ProtocolError(f"a shared-memory segment cannot be mapped: {error}") from None
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, trackfd=False)
    return mmap.mmap(descriptor, size)  # keeps a copy of the descriptor


def _data_of(mapping: mmap.mmap) -> Any:
    return numpy.frombuffer(mapping, numpy.uint8, offset=_DATA)


def _view(mapping: mmap.mmap, unused: Callable[[], None]) -> memoryview:
    """The data of a segment; `unused` is called when nobody has a view of it any more."""
    array = lend(mapping, _DATA, len(mapping) - _DATA, unused, is_shared=True)
    return memoryview(array).cast("B")


def _length_of(data: Sequence[memoryview]) -> int:
    """How much room buffers need in one segment."""
    length = 0
    for buffer in data:
        length = aligned(length) + buffer.nbytes
    return length


def _copy(data: Sequence[memoryview], into: Any) -> None:
    # numpy copies without the interpreter lock, and on this core alone: torch would wake its whole
    # thread team for 1 MB, and on a busy machine wait for the slowest.
    offset = 0
    for buffer in data:
        start = aligned(offset)
        offset = start + buffer.nbytes
        numpy.copyto(into[start:offset], numpy.frombuffer(buffer, numpy.uint8))


def _most_for(length: int) -> int:
    """The size of the largest segment that so much may be put into."""
    return 2 * size_class(length)


def _free_again(mapping: mmap.mmap) -> None:
    """The owner's last tensor on what was handed back has died."""
    if mapping[0] in (_KEPT, _LOST):  # else it was retired meanwhile
        mapping[0] = _FREE
