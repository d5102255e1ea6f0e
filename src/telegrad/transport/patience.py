"""Looking a moment longer before going to sleep.

Between two processes that call each other, most of a small call is not work but waking up: the
processor of the one that waits has gone idle, and on a virtual machine it has to be woken by its
host, with cold caches. Measured on two virtual cores: a call of a small tensor takes 150 to 180 µs
when both ends sleep while they wait, and 30 µs when they look for a moment before they do, and use
a mailbox meanwhile.

Looking costs processor time, so it is done only where it pays:

- on at least two processors, and by one thread of a process at a time: several would only wait for
  each other's interpreter lock;
- by connections on which it has paid lately. Each time that nothing has come within the window, a
  connection trusts it less, and then leaves it for ever longer stretches; a connection whose calls
  take milliseconds soon looks once in a few hundred waits.
- giving way at every look (`sched_yield`) to whoever else wants the processor.

Time that others had meanwhile does not count: it cost nobody anything, and whoever goes to sleep
has to be woken, by a worker that is busy enough as it is. Three trainers and a server on two
processors are 4 % faster by that. But a thread does not look for longer than a window if another
one of its process would like to.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from telegrad.forks import renewed

__all__ = ["DEFAULT_WINDOW", "Patience"]

DEFAULT_WINDOW = 500e-6

_LONGEST = 8  # windows, with the time in between that others had
_TURN = 20e-6  # seconds, after which others must have had the processor

_MOST_TRUST = 8
_FIRST_REST = 8
_LONGEST_REST = 512

_looking = renewed(threading.Lock())  # held by the one thread of this process that looks
_turned_away = 0  # how often others wanted to; one lost between threads is no matter
_now = time.perf_counter
_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Patience:
    """One connection's.

    Args:
        window: how many seconds to look; 0 never looks.
    """

    __slots__ = ("_rest", "_resting", "_trust", "_window")

    def __init__(self, window: float = DEFAULT_WINDOW) -> None:
        self._window = window if _processors() > 1 else 0.0
        self._trust = _MOST_TRUST // 2
        self._rest = _FIRST_REST
        self._resting = 0  # how many waits to let pass without looking

    @property
    def is_on(self) -> bool:
        return self._window > 0

    def look(self, is_there: Callable[[], object]) -> bool:
        """Asks `is_there` until it says so, or the moment is over."""
        if not self._window:
            return False
        if self._resting:
            self._resting -= 1
            return False
        if not _looking.acquire(blocking=False):
            global _turned_away
            _turned_away += 1
            return False
        try:
            turned_away = _turned_away
            now = _now()
            end = now + self._window
            latest = now + _LONGEST * self._window
            while not is_there():
                before = now
                _give_way()
                now = _now()
                if now - before > _TURN and turned_away == _turned_away:
                    end = min(end + now - before, latest)
                if now > end:
                    break
            else:
                if self._trust < _MOST_TRUST:
                    self._trust += 1
                self._rest = _FIRST_REST
                return True
        finally:
            _looking.release()
        self._trust -= 1
        if self._trust <= 0:
            self._trust = 1  # one more chance after the rest
            self._resting = self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
        return False
