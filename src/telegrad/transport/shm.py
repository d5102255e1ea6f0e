"""Shared memory between two processes of one host, for large tensors.

Each side owns the segments it lends to the other: anonymous memory (`memfd`), passed once by file
descriptor and then named by number. Nothing has a name in the file system, so nothing is left when
processes die. The first page of a segment holds one byte of state that both sides see:

=========  ==================================================================
FREE       the owner may fill it again
LENT       the borrower has tensors on it
RETIRED    the owner has let go of it; the borrower unmaps it when it next looks
=========  ==================================================================

The owner alone moves FREE → LENT and FREE → RETIRED, and LENT → RETIRED if the message did not
leave whole, for then nobody may come to borrow it; the borrower alone moves LENT → FREE, by one
store, when the last tensor on the buffer dies, on any thread, even inside the garbage collector. So
giving back needs no message and no lock. A borrower that dies takes nothing along: its owner sees
the connection end and drops every segment lent to it. A segment is announced in the frame that
first uses it and used again only after the borrower has freed it, hence has mapped it: no frame can
name a segment that its reader does not know.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy

from telegrad.errors import ProtocolError
from telegrad.wire.memory import lend, size_class

__all__ = ["SHARE_FROM", "SharedMemory", "is_available", "map_sealed", "sealed_memory"]

SHARE_FROM = 1 << 16
"""Buffers of at least this many bytes go through shared memory; below it, a socket is faster."""

_MOST_SEGMENTS = (
    64  # lent to one peer: each costs both sides a descriptor for as long as it is used
)

_FREE, _LENT, _RETIRED = 0, 1, 2
_DATA = mmap.PAGESIZE  # the state has the first page to itself, data begins page-aligned
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)


def is_available() -> bool:
    """Whether this system has what it takes: Linux's memfd and its seals."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class _Segment:
    __slots__ = ("announced", "data", "descriptor", "freed_at", "mapping", "number", "size")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.descriptor, self.mapping = sealed_memory(_DATA + size)
        self.data = numpy.frombuffer(self.mapping, numpy.uint8, offset=_DATA)
        self.announced = False
        self.freed_at = time.monotonic()

    def retire(self) -> None:
        self.mapping[0] = _RETIRED
        self.close_descriptor()

    def close_descriptor(self) -> None:
        """It is needed until the borrower has its own."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class SharedMemory:
    """The memory that this process shares with one peer process: what it lends and borrows.

    Args:
        max_idle: how many bytes of free segments are kept at most.
        max_age: after how many seconds without use `trim` lets a free segment go.
    """

    def __init__(self, max_idle: int = 1 << 28, max_age: float = 2.0) -> None:
        self._max_idle = max_idle
        self._max_age = max_age
        self._lock = threading.Lock()  # guards the two tables below
        self._own: dict[int, _Segment] = {}
        self._theirs: dict[int, mmap.mmap] = {}
        self._count = 0
        self._closed = False
        self._refused = False  # the system has no memory for segments: stop asking

    def lend(self, data: memoryview) -> tuple[int, int] | None:
        length = data.nbytes
        if length < SHARE_FROM:
            return None
        with self._lock:
            segment = self._free_segment(length)
            if segment is None:
                return None
            segment.mapping[0] = _LENT
            if segment.announced:
                segment.close_descriptor()
            descriptor = segment.descriptor
            segment.announced = True
        # numpy copies without the interpreter lock, and on this core alone: torch would wake its
        # whole thread team for 1 MB, and on a busy machine wait for the slowest.
        numpy.copyto(segment.data[:length], numpy.frombuffer(data, numpy.uint8))
        return segment.number, descriptor

    def _free_segment(self, length: int) -> _Segment | None:
        if self._closed or self._refused:
            return None
        wanted = size_class(length)
        best: _Segment | None = None
        for segment in self._own.values():
            if (
                length <= segment.size <= 2 * wanted
                and segment.mapping[0] == _FREE
                and (best is None or segment.size < best.size)
            ):
                best = segment
        if best is None:
            if len(self._own) >= _MOST_SEGMENTS:
                return None
            self._count += 1
            try:
                best = _Segment(self._count, wanted)
            except OSError:
                # No memory or descriptors for it: the socket still works. Not asked again, so that
                # a starved machine does not pay for the attempt at every message.
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

    def learn(self, segment: int, descriptor: int) -> None:
        mapping = map_sealed(descriptor)
        if len(mapping) <= _DATA:
            raise ProtocolError("a shared-memory segment is too small")
        with self._lock:
            self._theirs[segment] = mapping

    def borrow(self, segment: int, length: int) -> Any:
        with self._lock:
            mapping = self._theirs.get(segment)
        if mapping is None or length > len(mapping) - _DATA:
            raise ProtocolError(f"shared-memory segment {segment} is not known, or too small")
        return lend(mapping, _DATA, length, lambda: _give_back(mapping))

    def trim(self, now: float) -> None:
        """Lets go of segments that have been free for a while, or are over the limit."""
        with self._lock:
            for number, mapping in list(self._theirs.items()):
                if mapping[0] == _RETIRED:
                    del self._theirs[number]
            free = []
            for segment in self._own.values():
                if segment.mapping[0] == _FREE:
                    free.append(segment)
                else:
                    segment.freed_at = now
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


def sealed_memory(size: int) -> tuple[int, mmap.mmap]:
    """Anonymous memory that another process can map by the descriptor."""
    descriptor = os.memfd_create("telegrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        # The other process must be able to trust the size: reading past a shrunk file kills it.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor, _map(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise


def map_sealed(descriptor: int) -> mmap.mmap:
    """Maps another process's memory, and closes the descriptor.

    Raises:
        ProtocolError: it is not what `sealed_memory` makes.
    """
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ProtocolError("a shared-memory segment is not sealed")
        return _map(descriptor, os.fstat(descriptor).st_size)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"a shared-memory segment cannot be mapped: {error}") from None
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, trackfd=False)
    return mmap.mmap(descriptor, size)  # keeps a copy of the descriptor


def _give_back(mapping: mmap.mmap) -> None:
    if mapping[0] == _LENT:  # else its owner has let go of it meanwhile
        mapping[0] = _FREE
