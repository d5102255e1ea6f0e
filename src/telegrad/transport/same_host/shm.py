"""Shared memory between two processes of one host, for large tensors.

Each side owns the segments that it lends to the other: anonymous memory (`memfd`), passed once by
file descriptor and then named by number. It has no name in the file system, so nothing is left when
processes die. The first page of a segment holds one byte of state that both sides see:

=========  ==================================================================
FREE       the owner may fill it again
LENT       the borrower has tensors on it
RETIRED    the owner has unmapped it; the borrower unmaps it when it next checks
HANDED     the borrower has filled it, and a message announces that to the owner
KEPT       the owner has tensors on it that were sent back in it
LOST       that message may never arrive
=========  ==================================================================

Only the owner changes FREE → LENT and FREE → RETIRED, and LENT → RETIRED if the message was not
sent completely, since then the borrower may not know the segment. Only the borrower changes LENT →
FREE, by one store, when the last tensor on the buffer dies, on any thread, even inside the garbage
collector. So returning a segment needs no message and no lock. If a borrower dies, the owner sees
the connection end and drops every segment lent to it. A segment is announced in the frame that
first uses it, and used again only after the borrower has freed it, hence has mapped it: no frame
names a segment that its reader does not know.

A thread that serves a request holds the segments of the request (`_Loan.hold`), and once their
tensors are dead it may send its answer in them: LENT → HANDED. So the answer to a large message
needs no further memory. The owner changes HANDED → KEPT when it receives that message, and KEPT →
FREE when the tensors on it die. If the message is not sent completely, or its connection ends
before it was received, the borrower changes HANDED → LOST; the owner may still receive it, and
retires segments that have been LOST for a while. At any time only one side writes to a segment, so
a state that is overwritten while a connection ends costs no more than the segment.
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
"""One buffer or several with this many bytes go through shared memory; below it, a socket is
faster."""

_MOST_SEGMENTS = (
    64  # lent to one peer: each costs both sides a descriptor for as long as it is used
)

# Numbers of all segments that this process lends, to any peer. A lost peer may reconnect before it
# has read everything that was sent to it, and must not take one segment for another.
_numbers = itertools.count(1)

_FREE, _LENT, _RETIRED, _HANDED, _KEPT, _LOST = range(6)
_DATA = mmap.PAGESIZE  # the state has the first page to itself, data begins page-aligned
_STEP = 1 << 26
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)


def is_available() -> bool:
    """Whether this system has Linux's memfd and its seals."""
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
        self.lost_at: float | None = None  # when that state was first seen

    def retire(self) -> None:
        self.mapping[0] = _RETIRED
        self.close_descriptor()

    def close_descriptor(self) -> None:
        """Closes the descriptor, which the borrower has a copy of."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class _Loan:
    """A segment of the peer while it is borrowed: by tensors, or because it is held.

    Args:
        spares: the loans that are held and that no tensor uses.
    """

    __slots__ = ("_is_held", "_is_unused", "_spares", "_ticket", "mapping", "number")

    def __init__(self, number: int, mapping: mmap.mmap, spares: dict[_Loan, None]) -> None:
        self.number = number
        self.mapping = mapping
        self._spares = spares
        self._is_held = self._is_unused = False
        self._ticket = [True]  # the thread that takes it decides what happens next

    def hold(self) -> None:
        """Until `end`, the segment is not returned, and may be handed back instead."""
        self._is_held = True

    def end(self) -> None:
        self._is_held = False
        if self._is_unused:
            self._spares.pop(self, None)
            self._give_back()

    def unused(self) -> None:
        """Called when the last tensor dies, maybe in the garbage collector: takes no lock."""
        self._is_unused = True
        if self._is_held:
            self._spares[self] = None
        if not self._is_held:  # checked last: another thread may just have ended it
            self._spares.pop(self, None)
            self._give_back()

    def claim(self) -> bool:
        """Whether the caller decides what happens to it: true once."""
        try:
            return self._ticket.pop()
        except IndexError:
            return False

    def hand_back(self, data: Sequence[memoryview]) -> bool:
        """Fills the segment for its owner. The loan must have been claimed."""
        filled = _FREE  # if it is not, because of Ctrl-C
        try:
            _copy(data, _data_of(self.mapping))
            filled = _HANDED
        finally:
            is_lent: bool = self.mapping[0] == _LENT  # else its owner has retired it
            if is_lent:
                self.mapping[0] = filled
        return is_lent

    def _give_back(self) -> None:
        if self.claim() and self.mapping[0] == _LENT:  # else its owner has retired it
            self.mapping[0] = _FREE


class SharedMemory:
    """The memory that this process shares with one peer process: what it lends and borrows.

    Args:
        max_idle: how many bytes of free segments are kept at most.
        max_age: after how many unused seconds `trim` retires a free segment.
    """

    def __init__(self, max_idle: int = 1 << 28, max_age: float = 2.0) -> None:
        self._max_idle = max_idle
        self._max_age = max_age
        self._lock = threading.RLock()  # guards the two tables below
        self._own: dict[int, _Segment] = {}
        self._theirs: dict[int, mmap.mmap] = {}
        self._spares: dict[
            _Loan, None
        ] = {}  # changed by single steps, also in the garbage collector
        self._closed = False
        self._refused = False  # the system had no memory for a segment: do not ask for a while
        self._declined: list[
            int
        ] = []  # segments of the peer that could not be mapped, until it knows
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
        except BaseException:  # Ctrl-C: the peer will not hear of it
            self.abandon((segment.number,))
            raise
        return Placed(segment.number, False, descriptor)

    def _fitting_spare(self, length: int) -> _Loan | None:
        """Claims a segment of the peer that is held and no longer used."""
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
                # No memory or descriptors: the socket still works. Do not ask again before the next
                # `trim`: it would cost time at every message.
                self._refused = True
                return None
            self._own[best.number] = best
        return best

    def abandon(self, segments: Sequence[int]) -> None:
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
        """The peer's segments that could not be mapped: it must be told, and drops them."""
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
        """Retires segments that have been free for a while or are over the limit."""
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
        """Drops everything, because the peer is gone. Tensors on borrowed memory stay valid."""
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
            loan.claim()  # else its holder would return it
        self._own, self._theirs, self._spares = {}, {}, {}


def sealed_memory(size: int) -> tuple[int, mmap.mmap]:
    """Anonymous memory that another process can map by the descriptor."""
    descriptor = os.memfd_create("telegrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        # Touching memory that the system has promised and does not have kills the process (SIGBUS).
        # In steps, because a signal during a step undoes it.
        for start in range(0, size, _STEP):
            os.posix_fallocate(descriptor, start, min(_STEP, size - start))
        # The other process must be able to rely on the size: reading past a shrunk file kills it.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor, _map(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise


def map_sealed(descriptor: int) -> mmap.mmap:
    """Maps another process's memory, and closes the descriptor.

    Raises:
        OSError: the system has no memory or descriptor for it.
        ProtocolError: the memory was not made by `sealed_memory`.
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
    """The data of a segment; `unused` is called when no view of it is left."""
    array = lend(mapping, _DATA, len(mapping) - _DATA, unused, is_shared=True)
    return memoryview(array).cast("B")


def _length_of(data: Sequence[memoryview]) -> int:
    """How much room buffers need in one segment."""
    length = 0
    for buffer in data:
        length = aligned(length) + buffer.nbytes
    return length


def _copy(data: Sequence[memoryview], into: Any) -> None:
    # numpy copies without the interpreter lock, and on one core: for 1 MB torch would wake all its
    # threads, and on a busy machine wait for the slowest.
    offset = 0
    for buffer in data:
        start = aligned(offset)
        offset = start + buffer.nbytes
        numpy.copyto(into[start:offset], numpy.frombuffer(buffer, numpy.uint8))


def _most_for(length: int) -> int:
    """The size of the largest segment that may be used for so many bytes."""
    return 2 * size_class(length)


def _free_again(mapping: mmap.mmap) -> None:
    """Called when the owner's last tensor on a segment that was handed back dies."""
    if mapping[0] in (_KEPT, _LOST):  # else it was retired meanwhile
        mapping[0] = _FREE
