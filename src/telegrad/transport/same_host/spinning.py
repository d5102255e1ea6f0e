"""Polling for a message for a short time before the thread sleeps.

Most of a small call between two processes is waking up: the processor of the waiting process has
gone idle, and on a virtual machine its host must wake it. On two virtual cores, a call with a small
tensor takes 150 to 180 µs if both ends sleep while they wait, and a third of that if they spin.

Spinning costs processor time, so a connection spins only

- on at least two processors, and with one thread per process at a time: several threads would wait
  for each other's interpreter lock;
- if it has paid lately. A spin that finds nothing within the window makes the connection skip
  twice as many waits as the last time, and more if the spin took longer than the window: then
  another program needed the processor.

Each look ends in `sched_yield`, so other threads and processes can run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from telegrad.forks import renewed

__all__ = ["DEFAULT_WINDOW", "Spinner"]

DEFAULT_WINDOW = 500e-6
_MOST_SKIPPED = 512

_spinning = renewed(threading.Lock())  # held by the one thread of this process that spins
_now = time.perf_counter
_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Spinner:
    """The spinning of one connection.

    Args:
        window: how many seconds to spin; 0 never spins.
    """

    __slots__ = ("_backoff", "_to_skip", "_window")

    def __init__(self, window: float = DEFAULT_WINDOW) -> None:
        self._window = window if _processors() > 1 else 0.0
        self._backoff = 0  # how many waits the last failure has skipped
        self._to_skip = 0  # how many more waits to skip

    @property
    def is_on(self) -> bool:
        return self._window > 0

    def spin(self, is_there: Callable[[], object]) -> bool:
        """Calls `is_there` until it returns true, or the window is over."""
        if not self._window:
            return False
        if self._to_skip:
            self._to_skip -= 1
            return False
        is_held: list[bool] = []
        try:
            # One step of the interpreter takes the lock and records it: Ctrl-C cannot come between.
            is_held.extend(map(_spinning.acquire, (False,)))
            if not is_held[0]:
                return False
            begun = now = _now()
            while now - begun <= self._window:
                if is_there():
                    self._backoff //= 2
                    return True
                _yield()
                now = _now()
        finally:
            if is_held and is_held[0]:
                _spinning.release()
        lost = round((now - begun) / self._window)
        self._backoff = self._to_skip = min(2 * self._backoff + lost, _MOST_SKIPPED)
        return False
