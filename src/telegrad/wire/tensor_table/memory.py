"""Reusable memory for received tensors.

Touching a fresh page costs about ten times as much as writing to it: a read of a 64 MB tensor into
new memory spends most of its time in page faults. So buffers for large tensors come from a pool of
mappings. A buffer is an ordinary writable buffer object under a tensor; when the last tensor on it
dies, on any thread, its memory returns to the pool. That may happen inside the garbage collector,
so it takes no lock: it appends to a deque.

A forked process returns none of its parent's buffers: shared memory would be reused under its
parent's tensors. Memory that is shared with another process would also be shared with the child, so
the child first copies what lies under its tensors into private memory. Its parent waits for that,
because until then the memory must neither change nor be returned.
"""

from __future__ import annotations

import collections
import ctypes
import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["BufferPool", "lend"]

_PAGE = mmap.PAGESIZE
_HUGE = 1 << 21


class _Loan(weakref.ref[Any]):
    """A weak reference with what must be done when its object dies."""

    __slots__ = ("is_shared", "returned")
    is_shared: bool
    returned: Callable[[], object]


# A weak reference calls back only while it lives. By id: one to an unhashable cannot be hashed.
_loans: dict[int, _Loan] = {}


def _end_of_loan(loan: weakref.ref[Any]) -> None:
    assert isinstance(loan, _Loan)
    _loans.pop(id(loan), None)
    loan.returned()


def lend(
    mapping: mmap.mmap,
    offset: int,
    length: int,
    returned: Callable[[], object],
    *,
    is_shared: bool = False,
) -> ctypes.Array[ctypes.c_ubyte]:
    """A writable buffer over part of a mapping; `returned()` is called when it is unused.

    `returned` runs in the thread that drops the last reference, possibly in the garbage collector:
    it must not block, take a lock or raise.

    Args:
        offset: where the buffer begins: at a page, if it is shared.
        is_shared: another process has the memory, too; a forked process gets a copy of its own.
    """
    array = (ctypes.c_ubyte * length).from_buffer(mapping, offset)
    loan = _Loan(array, _end_of_loan)
    loan.returned = returned
    loan.is_shared = is_shared
    _loans[id(loan)] = loan
    return array


class _Fork:
    """A fork in progress: the memory under tensors, and a pipe by which the child reports that it
    has copied the shared part."""

    def __init__(self) -> None:
        self.lent: list[Any] = []  # the child has no other threads, which may hold them
        self.shared: list[Any] = []
        for loan in list(_loans.values()):
            array = loan()
            if array is not None:
                (self.shared if loan.is_shared else self.lent).append(array)
        self.pipe: tuple[int, ...] = ()
        if self.shared:
            try:
                self.pipe = os.pipe()
            except OSError:  # no descriptors left
                _never_given_back.append(self.shared)


_PATIENCE = 10_000  # ms; copying takes a few, unless the child is being debugged
_forks = threading.local()
_never_given_back: list[Any] = []
"""Memory that a child may not have copied yet."""


def _before_fork() -> None:
    _forks.now = _Fork()


def _after_fork_in_parent() -> None:
    fork: _Fork = _forks.__dict__.pop("now")
    if not fork.pipe:
        return
    reading, writing = fork.pipe
    os.close(writing)
    try:
        # Ends with the child's report, its death, or the timeout.
        poller = select.poll()
        poller.register(reading, select.POLLIN)
        if not poller.poll(_PATIENCE):
            _never_given_back.append(fork.shared)
    finally:
        os.close(reading)


def _after_fork_in_child() -> None:
    for loan in list(_loans.values()):
        loan.returned = _nothing
    fork: _Fork = _forks.__dict__.pop("now")
    for array in fork.shared:
        _make_private(ctypes.addressof(array), ctypes.sizeof(array))
    if fork.pipe:
        reading, writing = fork.pipe
        os.close(reading)
        os.write(writing, b"\0")
        os.close(writing)


def _make_private(address: int, size: int) -> None:
    """Replaces shared pages by a private copy. This process has one thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    size = -(-size // _PAGE) * _PAGE
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    copy = libc.mmap(None, ctypes.c_size_t(size), protection, flags, -1, ctypes.c_long(0))
    if copy != _MAP_FAILED:
        ctypes.memmove(copy, address, size)
        length, place = ctypes.c_size_t(size), ctypes.c_void_p(address)
        if libc.mremap(ctypes.c_void_p(copy), length, length, _MREMAP_FIXED, place) != _MAP_FAILED:
            return
    # The child must not use memory to which its parent and another process write.
    os.write(2, b"telegrad: no memory for a forked process's copies of received tensors\n")
    os._exit(1)


_MAP_FAILED = ctypes.c_void_p(-1).value
_MREMAP_FIXED = 3  # MREMAP_MAYMOVE | MREMAP_FIXED


def _nothing() -> None:
    """Replaces `returned` of the parent's loans in the child."""


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


def size_class(length: int) -> int:
    """The size of the mapping for a buffer: up to a quarter larger, so that buffers are reused."""
    step = max(_PAGE, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _fresh(size: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)  # one fault for 512 pages
        except OSError:
            pass  # a kernel without huge pages: it is only slower
    return mapping


class BufferPool:
    """Buffers for received tensors.

    Args:
        max_idle: how many bytes of unused memory are kept at most.
        max_age: how many seconds an unused mapping is kept by `trim`.
    """

    def __init__(self, max_idle: int = 1 << 28, max_age: float = 2.0) -> None:
        self._max_idle = max_idle
        self._max_age = max_age
        self._free: dict[int, collections.deque[tuple[mmap.mmap, float]]] = {}
        self._free_lock = threading.RLock()  # guards the dict and trimming, not the returning

    def take(self, length: int) -> ctypes.Array[ctypes.c_ubyte]:
        """A buffer of `length` > 0 bytes with arbitrary content."""
        size = size_class(length)
        with self._free_lock:
            free = self._free.get(size)
            if free is None:
                free = self._free[size] = collections.deque()
        try:
            mapping, _ = free.pop()
        except IndexError:
            mapping = _fresh(size)
        return lend(mapping, 0, length, lambda: free.append((mapping, time.monotonic())))

    def idle_bytes(self) -> int:
        with self._free_lock:
            return sum(size * len(free) for size, free in self._free.items())

    def trim(self, now: float) -> None:
        """Frees memory that has been unused for a while or is over the limit."""
        with self._free_lock:
            idle = sum(size * len(free) for size, free in self._free.items())
            for size, free in sorted(self._free.items(), reverse=True):
                while free and (now - free[0][1] > self._max_age or idle > self._max_idle):
                    try:
                        free.popleft()
                    except IndexError:
                        break  # a reader has taken it meanwhile
                    idle -= size
