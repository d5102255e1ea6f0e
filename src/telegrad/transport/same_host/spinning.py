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
- giving way at every look (`sched_yield`) to whoever else wants the processor;
- among workers. Who gives way to a program that computes has the processor back after that one's
  slice, milliseconds later, while who sleeps gets it as soon as a message has come. So a process
  that loses much of its time that way stops looking, for ever longer if it goes on. Measured
  with a program that computes on each of the two processors: a call takes 100 to 330 µs on
  average, about as when both ends sleep, and took 200 to 3000 µs without this. It has lost nothing
  if another of its own threads had the interpreter, or if it was stopped and goes on.

Time that others had meanwhile does not count: it cost nobody anything, and whoever goes to sleep
has to be woken, by a worker that is busy enough as it is. Three trainers and a server on two
processors are 4 % faster by that. But a thread does not look for longer than a window if another
one of its process would like to.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

from telegrad.forks import renewed

__all__ = ["DEFAULT_WINDOW", "Patience"]

DEFAULT_WINDOW = 500e-6

_LONGEST = 8  # windows, with the time in between that others had
_TURN = 20e-6  # seconds, after which others must have had the processor
_SLICE = 1.5e-3  # seconds, after which these may be programs that do not give way themselves

# Among three trainers and a server on two processors, whoever looks loses up to a twentieth of its
# time in such slices, and among programs that compute nine tenths.
_MOST_LOST = 0.15
_LOST_FOR_SURE = 0.012  # seconds
_MEMORY = 0.2  # seconds, after which it counts anew
_FIRST_RETREAT = 0.02  # seconds
_LONGEST_RETREAT = 1.0
_AGAIN = 10  # times its length: if the next one is due before that, it is longer

_MOST_TRUST = 8
_FIRST_REST = 8
_LONGEST_REST = 512

_looking = renewed(threading.Lock())  # held by the one thread of this process that looks
_turned_away = 0  # how often others wanted to; one lost between threads is no matter
_now = time.perf_counter
_used = time.process_time
_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: None)


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Retreat:
    """Of all connections of this process, from looking."""

    def __init__(self) -> None:
        self.until = 0.0  # 0 if there is none
        self._length = _FIRST_RETREAT
        self._last_ended = -math.inf
        self._since = -math.inf  # when it began to count what is lost
        self._used_before = 0.0
        self._lost = 0.0

    def is_over(self) -> bool:
        if _now() < self.until:
            return False
        self._last_ended, self.until = self.until, 0.0
        return True

    def is_due(self, now: float, slice_lost: float) -> bool:
        """Others have just had the processor for so long; begins it if that is too much."""
        if now - self._since > _MEMORY:
            self._since, self._used_before, self._lost = now, _used(), 0.0
            return False  # one does not count: the process may have been stopped
        self._lost += slice_lost
        passed = now - self._since
        if self._lost < _LOST_FOR_SURE or self._lost < _MOST_LOST * passed:
            return False
        self._since = -math.inf
        if _used() - self._used_before > (1 - _MOST_LOST) * passed:
            return False  # its other threads had the interpreter
        self._begin(now)
        return True

    def _begin(self, now: float) -> None:
        if now - self._last_ended < _AGAIN * self._length:
            self._length = min(2 * self._length, _LONGEST_RETREAT)
        else:
            self._length = _FIRST_RETREAT
        self.until = now + self._length


_retreat = _Retreat()


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
        if not self._window or (_retreat.until and not _retreat.is_over()):
            return False
        if self._resting:
            self._resting -= 1
            return False
        is_looking: list[bool] = []
        try:
            # Noted in the step that takes it: Ctrl-C between two would keep it for good.
            is_looking.extend(map(_looking.acquire, (False,)))
            if not is_looking[0]:
                global _turned_away
                _turned_away += 1
                return False
            turned_away = _turned_away
            now = _now()
            end = now + self._window
            latest = now + _LONGEST * self._window
            while not is_there():
                before = now
                _give_way()
                now = _now()
                # If others of this process would like to look, they may have had the interpreter.
                if now - before > _TURN and turned_away == _turned_away:
                    if now - before > _SLICE and _retreat.is_due(now, now - before):
                        return False  # no matter whether it has come: who falls asleep looks
                    end = min(end + now - before, latest)
                if now > end:
                    break
            else:
                if self._trust < _MOST_TRUST:
                    self._trust += 1
                self._rest = _FIRST_REST
                return True
        finally:
            if is_looking and is_looking[0]:
                _looking.release()
        self._trust -= 1
        if self._trust <= 0:
            self._trust = 1  # one more chance after the rest
            self._resting = self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
        return False
