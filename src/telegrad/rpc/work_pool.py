"""Threads that run asynchronous calls.

A call may block on another call that waits in the same queue, at any depth. So the pool has a
usual size and no fixed end: when tasks wait and no thread has finished anything between two ticks
of the clock, all threads are taken to be blocked and more are started. They go away again when
they have nothing to do, but for one.

If the system gives no thread, a task waits for those that there are, and each tick tries again:
whoever submits it has done its part, and must not fail for that. The one that stays sees to it
that a task does not wait for a thread while there is nothing else to do.

A task that comes when the pool is closed has a thread of its own: it may be what ends a wait, of a
call for which a connection was just being opened, say.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from telegrad.forks import leave_at_fork

__all__ = ["WorkPool"]

_log = logging.getLogger("telegrad.rpc")

_IDLE_SECONDS = 5.0
_GROWTH = 16  # threads started at once when all are blocked
_FIRST_PAUSE, _LAST_PAUSE = 0.0002, 0.005  # seconds

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
        self._is_silent = False  # closed, and leaves undone what comes
        self._is_starved = False  # no thread could be started when it was last tried
        leave_at_fork(self)

    def start(self) -> None:
        """Starts the thread that stays.

        Raises:
            RuntimeError: the system gives none.
        """
        if not self._start_thread():
            raise RuntimeError(f"{self._name}: no thread can be started that runs calls")

    def submit(self, task: Task) -> None:
        with self._counts_lock:
            is_late = self._is_closed
            if not is_late:
                self._backlog += 1
                self._queue.put(task)  # in here: before those that end the threads
            wants_thread = self._backlog > self._waiting and len(self._threads) < self._usual_size
        if is_late:
            if not self._is_silent:
                self._run_late(task)
        elif wants_thread:
            self._start_thread()

    def _run_late(self, task: Task) -> None:
        def run() -> None:
            self._on_thread_start()
            _run_guarded(task)

        try:
            threading.Thread(target=run, name=f"{self._name}-late-call", daemon=True).start()
        except RuntimeError:  # no thread to be had, nor to be waited for
            _run_guarded(task)

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
            if not self._start_thread():
                break

    def drain(self, timeout: float) -> None:
        """Waits until each task has a thread, `timeout` seconds at most. Others may wait for what
        one of them does, and no clock ticks any more where this is asked."""
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while self._backlog and time.monotonic() < deadline:
            time.sleep(pause)
            if pause < _LAST_PAUSE:
                pause *= 2
            else:
                self.tick()

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

    def fall_silent(self, timeout: float) -> None:
        """Closes, and leaves undone what comes later: the interpreter is about to end."""
        self._is_silent = True
        self.close(timeout)

    def leave_to_parent(self) -> None:
        """In a forked child: the tasks are the parent's. The one that has forked may be a thread of
        this pool, and ends with its task."""
        self._counts_lock = threading.Lock()
        self._is_closed = self._is_silent = True
        self._queue = queue.SimpleQueue()
        self._queue.put(None)

    def _start_thread(self) -> bool:
        with self._counts_lock:
            if self._is_closed:
                return False
            thread = threading.Thread(
                target=self._run, name=f"{self._name}-call-{len(self._threads)}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                is_news, self._is_starved = not self._is_starved, True
                reason = str(error)
            else:
                self._threads.add(thread)  # it waits for the lock before it takes itself out
                self._is_starved = False
                return True
        if is_news:
            _log.warning("%s: calls wait for a thread to run on: %s", self._name, reason)
        return False

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
                        is_needed = self._backlog and len(self._threads) <= self._usual_size
                        if not is_needed and len(self._threads) > 1:
                            self._threads.discard(threading.current_thread())
                            return
                    continue
                with self._counts_lock:
                    self._waiting -= 1
                    if task is None:
                        return
                    self._backlog -= 1
                    self._started += 1
                _run_guarded(task)
                del task  # its arguments must not live until the next one comes
        finally:
            with self._counts_lock:
                self._threads.discard(threading.current_thread())


def _run_guarded(task: Task) -> None:
    try:
        task()
    except Exception:  # noqa: BLE001 - tasks answer for themselves; this is a bug trap
        _log.exception("a task failed outside of its call")
