"""The agent's clock: one thread that wakes every 20 ms and runs what is due.

Deadlines of calls are checked at each tick instead of having timers: a timer would cost each call a
thread wake-up, and a call may well fail a few hundredths of a second late.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from telegrad.locks import here

__all__ = ["Clock"]

_log = logging.getLogger("telegrad.rpc")

TICK = 0.02


class _Timer:
    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Clock:
    """Runs timers, and `on_tick(now)` at every tick, until it is stopped."""

    def __init__(self, name: str, on_tick: Callable[[float], None]) -> None:
        self._on_tick = on_tick
        self._timers: list[tuple[float, int, _Timer]] = []
        self._timers_lock = threading.RLock()  # a destructor or signal handler may take it again
        self._order = itertools.count()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-clock", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> _Timer:
        timer = _Timer(callback)
        item = (time.monotonic() + seconds, next(self._order), timer)
        with self._timers_lock:
            heapq.heappush(self._timers, item)
        return timer

    def stop(self) -> None:
        self._stopped.set()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        here.must_not_wait = True
        while not self._stopped.wait(TICK):  # ends by stop()
            now = time.monotonic()
            due: list[_Timer] = []
            with self._timers_lock:
                while self._timers and self._timers[0][0] <= now:
                    due.append(heapq.heappop(self._timers)[2])
            for timer in due:
                if timer.callback is not None:
                    self._guarded(timer.callback)
            self._guarded(lambda now=now: self._on_tick(now))  # type: ignore[misc]

    def _guarded(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 - one failing timer must not stop the others
            _log.exception("a timer failed")
