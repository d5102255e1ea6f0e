"""Thread pools for asynchronous calls and for internal work.

**Size.** A pool starts up to `usual_size` threads as tasks come. It grows beyond that only when it
stands still: tasks wait, none has begun for a fifth of a second, and the process computes little.
Then its threads are assumed to be blocked in a program's own code (asleep, reading a file, waiting
for a lock), and more are started, up to `most`. Further tasks wait in the queue. One of them may be
what the others wait for, such as a call that sets an event. So a pool that has stood still at its
limit for two seconds gets one more thread, and the log a warning: nothing deadlocks, and the number
of threads does not grow with the number of calls.

**Nested calls** wait for each other at any depth, so one limit for all threads would deadlock them.
A call carries its depth: 0 if a thread of the program made it, else one more than the depth of the
call that made it. `CallPools` has a pool for each depth, so a call waits only for deeper ones,
which have threads of their own. The last pool, for all depths from `DEEPEST` on, has no limit.
Synchronous calls need no pool: each has a lane, with a thread at its other end.

**Internal messages** (signs of life, reference counting, ends of calls) have a pool of their own,
without a limit, so that they do not wait behind calls.

Idle threads end, except for one. If the system has no thread left, a task waits for the existing
threads, and each tick tries again.

A task that is submitted to a closed pool gets a thread of its own: another thread may wait for it.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from telegrad.forks import leave_at_fork

__all__ = ["DEEPEST", "CallPools", "WorkPool"]

_log = logging.getLogger("telegrad.rpc")

_IDLE_SECONDS = 5.0
_GROWTH = 16  # threads started at once, at most
_STILL_TICKS = 10  # ticks without a task begun, after which all threads count as blocked
_STUCK_TICKS = 100  # the same for a pool at its limit
_BUSY = 0.5  # seconds of processor time per second, above which a process is not blocked
DEEPEST = 15
"""The greatest depth that is distinguished."""
_FIRST_PAUSE, _LAST_PAUSE = 0.0002, 0.005  # seconds

Task = Callable[[], None]


class WorkPool:
    """Runs tasks in the order they are submitted.

    Args:
        name: prefix of the threads' names.
        usual_size: how many threads are started before tasks wait.
        on_thread_start: runs first in each thread.
        most: the limit on threads, unless all of them are stuck.
    """

    def __init__(
        self, name: str, usual_size: int, on_thread_start: Task, most: float = math.inf
    ) -> None:
        self._name = name
        self._usual_size = usual_size
        self._most = most
        self._on_thread_start = on_thread_start
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        # Guards the counts and the set below. A destructor that makes a call may take it again.
        self._counts_lock = threading.RLock()
        self._waiting = 0  # threads without a task
        self._backlog = 0  # tasks without a thread
        self._started = 0  # tasks ever begun
        self._started_at_last_tick = 0
        self._still_ticks = 0
        self._still_since = 0.0, 0.0  # by the clock, and in processor time
        self._threads: set[threading.Thread] = set()
        self._is_closed = False
        self._is_silent = False  # closed, and drops new tasks
        self._is_starved = False  # the last attempt to start a thread failed
        leave_at_fork(self)

    def start(self) -> None:
        """Starts the thread that never ends while the pool is open.

        Raises:
            RuntimeError: the system has no thread left.
        """
        if not self._start_thread():
            raise RuntimeError(f"{self._name}: no thread can be started that runs calls")

    def submit(self, task: Task) -> None:
        with self._counts_lock:
            is_late = self._is_closed
            if not is_late:
                self._backlog += 1
                self._queue.put(task)  # under the lock: before the entries that end the threads
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
        except RuntimeError:  # the system has no thread left, and this task cannot wait
            _run_guarded(task)

    @property
    def is_idle(self) -> bool:
        with self._counts_lock:
            return self._backlog == 0 and self._waiting == len(self._threads)

    @property
    def idle_threads(self) -> int:
        with self._counts_lock:
            return self._waiting

    def tick(self, senders: int = 0) -> None:
        """Starts more threads if tasks wait and nothing moves.

        Args:
            senders: threads of the process that wait for a peer to read their answers. If these
                are many, more threads would only wait with them.
        """
        with self._counts_lock:
            is_still = self._backlog > self._waiting and self._started == self._started_at_last_tick
            is_still = is_still and senders < max(1, len(self._threads) // 2)
            self._started_at_last_tick = self._started
            self._still_ticks = self._still_ticks + 1 if is_still else 0
            if self._still_ticks == 1:
                self._still_since = time.monotonic(), time.process_time()
            room = self._most - len(self._threads)
            growth = 0
            if is_still and len(self._threads) < self._usual_size:
                growth = 1  # the system had no thread left
            elif room <= 0 and self._still_ticks >= _STUCK_TICKS:
                growth = 1
            elif self._still_ticks >= _STUCK_TICKS or (
                self._still_ticks >= _STILL_TICKS and not self._is_computing()
            ):
                growth = int(max(0, min(self._backlog, 1 + len(self._threads) // 4, _GROWTH, room)))
            if growth or not is_still:
                self._still_ticks = 0
        if growth and room <= 0:
            _log.warning(
                "%s: %d calls are blocked and %d wait for a thread; one more is started, for they "
                "may wait for each other",
                self._name,
                len(self._threads),
                self._backlog,
            )
        self._start_threads(growth)

    def _is_computing(self) -> bool:
        """Whether it stands still because the processors are busy: more threads would not help."""
        since, used = self._still_since
        return time.process_time() - used > _BUSY * (time.monotonic() - since)

    def _start_threads(self, count: int) -> None:
        for _ in range(count):
            if not self._start_thread():
                break

    def drain(self, timeout: float) -> None:
        """Waits until each task has a thread, `timeout` seconds at most. It replaces the clock,
        which has stopped by then, in starting threads."""
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while self._backlog and time.monotonic() < deadline:
            time.sleep(pause)
            if pause < _LAST_PAUSE:
                pause *= 2
            else:
                self._start_threads(min(self._backlog, _GROWTH))

    def close(self, timeout: float) -> None:
        """Ends the threads. Those still in user code after `timeout` seconds are left running."""
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
        """Closes, and drops later tasks: the interpreter is about to end."""
        self._is_silent = True
        self.close(timeout)

    def leave_to_parent(self) -> None:
        """In a forked child, the tasks belong to the parent. The thread that forked may belong to
        this pool; it ends with its task."""
        self._counts_lock = threading.RLock()
        self._is_closed = self._is_silent = True
        self._queue = queue.SimpleQueue()
        self._queue.put(None)

    def _start_thread(self) -> bool:
        thread = threading.Thread(
            target=self._run, name=f"{self._name}-call-{len(self._threads)}", daemon=True
        )
        with self._counts_lock:
            if self._is_closed:
                return False
            try:
                thread.start()
            except RuntimeError as error:
                is_news, self._is_starved = not self._is_starved, True
                reason = str(error)
            else:
                self._threads.add(thread)  # its end waits for the lock
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
                        # A task may have been queued at this moment: then a thread must stay.
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
                del task  # its arguments must not live until the next task comes
        finally:
            with self._counts_lock:
                self._threads.discard(threading.current_thread())


class CallPools:
    """A pool for each depth of calls, created at first use.

    Args:
        name, usual_size, on_thread_start, most: see `WorkPool`.
    """

    def __init__(self, name: str, usual_size: int, on_thread_start: Task, most: int) -> None:
        self._new: list[Callable[[], WorkPool]] = [
            partial(WorkPool, name, usual_size, on_thread_start, most) for _ in range(DEEPEST)
        ]
        self._new.append(partial(WorkPool, name, usual_size, on_thread_start))
        self._pools: dict[int, WorkPool] = {0: self._new[0]()}
        self._is_closed = False

    def start(self) -> None:
        """Raises: RuntimeError: the system gives no thread."""
        self._pools[0].start()

    def submit(self, depth: int, task: Task) -> None:
        pool = self._pools.get(depth)
        if pool is None:
            pool = self._pools.setdefault(depth, self._new[depth]())
            if self._is_closed:
                pool.close(0.0)
        pool.submit(task)

    @property
    def idle_threads(self) -> int:
        return sum(pool.idle_threads for pool in self._all())

    def tick(self, senders: int = 0) -> None:
        for pool in self._all():
            pool.tick(senders)

    def drain(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for pool in self._all():
            pool.drain(max(0.0, deadline - time.monotonic()))

    def close(self, timeout: float) -> None:
        self._is_closed = True
        deadline = time.monotonic() + timeout
        for pool in self._all():
            pool.close(max(0.0, deadline - time.monotonic()))

    def fall_silent(self, timeout: float) -> None:
        self._is_closed = True
        for pool in self._all():
            pool.fall_silent(timeout)

    def _all(self) -> list[WorkPool]:
        return list(self._pools.values())


def _run_guarded(task: Task) -> None:
    try:
        task()
    except Exception:  # noqa: BLE001 - tasks handle their own errors; this would be a bug
        _log.exception("a task failed outside its call")
