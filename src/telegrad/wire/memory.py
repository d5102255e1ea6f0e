"""Memory for received tensors, used again and again.

The first touch of a fresh page costs about ten times as much as writing to it: a 64 MB tensor read
into new memory spends most of its time in page faults. So buffers for large tensors come from a
pool of mappings. A buffer is an ordinary writable buffer object that a tensor is built on; when the
last tensor on it dies, its memory is back in the pool, on whichever thread that happens.

Giving back runs inside the garbage collector, so it takes no lock: it appends to a deque.

A forked process has copies of the buffers, and gives none of them back: shared memory would be used
again under its parent's tensors.
"""

from __future__ import annotations

import collections
import ctypes
import mmap
import os
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

    __slots__ = ("returned",)
    returned: Callable[[], object]


# A weak reference must itself be alive to be called. By id: one to an unhashable cannot be hashed.
_loans: dict[int, _Loan] = {}


def _end_of_loan(loan: weakref.ref[Any]) -> None:
    assert isinstance(loan, _Loan)
    _loans.pop(id(loan), None)
    loan.returned()


def lend(
    mapping: mmap.mmap, offset: int, length: int, returned: Callable[[], object]
) -> ctypes.Array[ctypes.c_ubyte]:
    """A writable buffer over part of a mapping; `returned()` is called when nobody holds it.

    `returned` runs in whatever thread drops the last reference, maybe in the garbage collector: it
    must not block, take a lock or raise.
    """
    array = (ctypes.c_ubyte * length).from_buffer(mapping, offset)
    loan = _Loan(array, _end_of_loan)
    loan.returned = returned
    _loans[id(loan)] = loan
    return array


_kept_over_forks: list[list[Any]] = []


def _before_fork() -> None:
    # What other threads keep for themselves dies in the child before `_after_fork_in_child` runs.
    _kept_over_forks.append([loan() for loan in list(_loans.values())])


def _after_fork_in_child() -> None:
    for loan in list(_loans.values()):
        loan.returned = _nothing
    _kept_over_forks.clear()


def _nothing() -> None:
    """What is done at the end of a parent's loan."""


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_kept_over_forks.pop,
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
        self._free_lock = threading.Lock()  # guards the dict and trimming, never taken on return

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
