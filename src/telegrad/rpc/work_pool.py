"""Threads that run asynchronous calls.

A call may block on another call that waits in the same queue, at any depth. So the pool has a
usual size and no fixed end: when tasks wait and no thread has finished anything between two ticks
of the clock, all threads are taken to be blocked and more are started. They go away again when
they have nothing to do.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

__all__ = ["WorkPool"]

_log = logging.getLogger("telegrad.rpc")

_IDLE_SECONDS = 5.0
_GROWTH = 16  # threads started at once when all are blocked

Task = Callable[[], None]


class WorkPool:
    """Runs tasks in the order they came, as many at a time as there are threads.

    Args:
        name: prefix of the threads' names.
        usual_size: how many threads are started before tasks wait.
        on_thread_start: runs first in each thread.
    """

    def __init__(self, name: str, usual_size: int, on_thread_start: Task) -> None:
        self._name = name
        self._usual_size = usual_size
        self._on_thread_start = on_thread_start
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._counts_lock = threading.Lock()  # guards the counts and the set below
        self._waiting = 0  # threads without a task
        self._backlog = 0  # tasks without a thread
        self._started = 0  # tasks ever begun
        self._started_at_last_tick = 0
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def submit(self, task: Task) -> None:
        with self._counts_lock:
            self._backlog += 1
            wants_thread = self._backlog > self._waiting and len(self._threads) < self._usual_size
        self._queue.put(task)
        if wants_thread:
            self._start_thread()

    @property
    def is_idle(self) -> bool:
        with self._counts_lock:
            return self._backlog == 0 and self._waiting == len(self._threads)

    @property
    def idle_threads(self) -> int:
        with self._counts_lock:
            return self._waiting

    def tick(self) -> None:
        """Starts more threads if tasks wait and nothing moves."""
        with self._counts_lock:
            is_stuck = self._backlog > self._waiting and self._started == self._started_at_last_tick
            self._started_at_last_tick = self._started
            growth = min(self._backlog, _GROWTH) if is_stuck else 0
        for _ in range(growth):
            self._start_thread()

    def close(self, timeout: float) -> None:
        """Ends the threads; those still in user code after `timeout` seconds are left behind."""
        with self._counts_lock:
            self._is_closed = True
            threads = set(self._threads)
        for _ in threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout
        for thread in threads - {threading.current_thread()}:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("a call is still running on %s while its worker ends", thread.name)

    def _start_thread(self) -> None:
        with self._counts_lock:
            if self._is_closed:
                return
            thread = threading.Thread(
                target=self._run, name=f"{self._name}-call-{len(self._threads)}", daemon=True
            )
            self._threads.add(thread)
            thread.start()  # one that is in the set can be joined

    def _run(self) -> None:
        self._on_thread_start()
        try:
            while True:
                with self._counts_lock:
                    self._waiting += 1
                try:
                    task = self._queue.get(timeout=_IDLE_SECONDS)  # ends by a task or the time
                except queue.Empty:
                    with self._counts_lock:
                        self._waiting -= 1
                        # One may have been queued in between: then somebody must stay for it.
                        if self._backlog == 0 or len(self._threads) > self._usual_size:
                            self._threads.discard(threading.current_thread())
                            return
                    continue
                with self._counts_lock:
                    self._waiting -= 1
                    if task is None:
                        return
                    self._backlog -= 1
                    self._started += 1
                try:
                    task()
                except Exception:  # noqa: BLE001 - tasks answer for themselves; this is a bug trap
                    _log.exception("a task failed outside of its call")
                del task  # its arguments must not live until the next one comes
        finally:
            with self._counts_lock:
                self._threads.discard(threading.current_thread())
