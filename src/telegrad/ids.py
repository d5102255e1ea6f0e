"""Ids of things that several workers refer to.

A *worker id* is a worker's rank, at most 32767. A *context id* and an *autograd message id* carry
the id of the worker that made them in their upper 16 bits, so workers make them independently and
any worker can tell where one comes from. An `RRefId` names a remote value, a `ForkId` one reference
to it; both consist of the worker that made it and its counter.

No id is used twice while a group exists, however often a rank is taken again: by a worker that left
and came back, or by one started after a crash. Other workers remember the ids of dead workers, and
would mistake a new reference or context for an old one. So the store where the workers meet numbers
the *lives* of each rank, and every counter begins at `first_of_life`. (Rejected: the time of day,
which differs between hosts and can be set back.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

__all__ = [
    "COUNTER_BITS",
    "MAX_LIVES",
    "MAX_WORKER_ID",
    "ForkId",
    "RRefId",
    "WorkerCounter",
    "first_of_life",
    "worker_of",
]

COUNTER_BITS = 48
_LIFE_BITS = 14
MAX_LIVES = 1 << _LIFE_BITS
MAX_WORKER_ID = 0x7FFF  # ids travel as signed 64-bit integers: the sign bit stays clear


class RRefId(NamedTuple):
    """A remote value: number `local_id` of worker `created_on`."""

    created_on: int
    local_id: int


class ForkId(NamedTuple):
    """One user's reference to a remote value."""

    created_on: int
    local_id: int


class WorkerCounter:
    """Makes ids of 16 bits of worker id and 48 bits of counter.

    Safe to call from any thread: `itertools.count` is atomic under the interpreter lock.

    Args:
        first: the first value of the counter.
    """

    def __init__(self, worker_id: int, first: int = 0) -> None:
        if not 0 <= worker_id <= MAX_WORKER_ID:
            raise ValueError(f"a worker id must be between 0 and {MAX_WORKER_ID}, got {worker_id}")
        self._base = worker_id << COUNTER_BITS
        self.next: Callable[[], int] = itertools.count(self._base + first).__next__

    @property
    def max_id(self) -> int:
        """The largest id that this worker can ever make."""
        return self._base + (1 << COUNTER_BITS) - 1


def first_of_life(life: int) -> int:
    """The first value of a worker's counters: each life has 2^34 ids of every kind.

    Args:
        life: how many workers of the group have had the same rank before; less than `MAX_LIVES`.
    """
    return life << (COUNTER_BITS - _LIFE_BITS)


def worker_of(id_: int) -> int:
    """The worker that made a context or message id."""
    return id_ >> COUNTER_BITS
