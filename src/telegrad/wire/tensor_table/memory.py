"""Memory for received tensors, used again and again.

The first touch of a fresh page costs about ten times as much as writing to it: a 64 MB tensor read
into new memory spends most of its time in page faults. So buffers for large tensors come from a
pool of mappings. A buffer is an ordinary writable buffer object that a tensor is built on; when the
last tensor on it dies, its memory is back in the pool, on whichever thread that happens.

Giving back runs inside the garbage collector, so it takes no lock: it appends to a deque.

A forked process gives none of its parent's buffers back: shared memory would be used again under
its parent's tensors. Memory that is shared with another process would also stay shared with the
child, so the child moves what tensors stand on into private memory, before anything else runs in
it. Its parent waits for that: until then the memory must neither change nor be given back.
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
    """A weak reference that keeps what must be done at the death of its object."""

    __slots__ = ("is_shared", "returned")
    is_shared: bool
    returned: Callable[[], object]


# A weak reference must itself be alive to be called. By id: one to an unhashable cannot be hashed.
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
    """A writable buffer over part of a mapping; `returned()` is called when nobody holds it.

    `returned` runs in whatever thread drops the last reference, maybe in the garbage collector: it
    must not block, take a lock or raise.

    Args:
        offset: where the buffer begins: at a page, if it is shared.
        is_shared: another process has the memory too; a forked one gets a copy of its own.
    """
    array = (ctypes.c_ubyte * length).from_buffer(mapping, offset)
    loan = _Loan(array, _end_of_loan)
    loan.returned = returned
    loan.is_shared = is_shared
    _loans[id(loan)] = loan
    return array


class _Fork:
    """A fork that is under way: what tensors stand on, and a pipe by which the child reports that
    it has copied what is shared of it."""

    def __init__(self) -> None:
        self.lent: list[Any] = []  # what other threads keep dies in the child at once
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


_PATIENCE = 10_000  # ms: copying is a matter of milliseconds, unless the child is being debugged
_forks = threading.local()
_never_given_back: list[Any] = []
"""What a child may not have copied yet."""


def _before_fork() -> None:
    _forks.now = _Fork()


def _after_fork_in_parent() -> None:
    fork: _Fork = _forks.__dict__.pop("now")
    if not fork.pipe:
        return
    reading, writing = fork.pipe
    os.close(writing)
    try:
        # Ends by the child's report, by its death, or when its time is up.
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
    """Puts a private copy in the place of shared pages. This process has one thread."""
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
    # The child must not go on with memory that its parent and another process write to.
    os.write(2, b"telegrad: no memory for a forked process's copies of received tensors\n")
    os._exit(1)


_MAP_FAILED = ctypes.c_void_p(-1).value
_MREMAP_FIXED = 3  # MREMAP_MAYMOVE | MREMAP_FIXED


def _nothing() -> None:
    """What is done at the end of a parent's loan."""


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


def size_class(length: int) -> int:
    """The mapping size used for a buffer: at most a quarter larger, so that sizes meet again."""
    step = max(_PAGE, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step


def _fresh(size: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)  # one fault in 512 pages, where the kernel allows
        except OSError:
            pass  # a kernel without huge pages: slower, not wrong
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
        self._free_lock = threading.RLock()  # guards the dict and trimming, never taken on return

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
        """Frees what has not been used for a while, and what is over the limit."""
        with self._free_lock:
            idle = sum(size * len(free) for size, free in self._free.items())
            for size, free in sorted(self._free.items(), reverse=True):
                while free and (now - free[0][1] > self._max_age or idle > self._max_idle):
                    try:
                        free.popleft()
                    except IndexError:
                        break  # a reader took it meanwhile
                    idle -= size
