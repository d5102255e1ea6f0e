"""Runs the workers of `launch` until all have ended.

One thread waits for output, deaths and signals.

The group ends when all workers have ended, when one fails, when a signal demands it, when the
reader of the output is gone, or when the launcher's front has died. Then all workers get a signal
that asks them to end and, after a grace period, SIGKILL. `run` returns when no process is left.

When one worker fails, others soon fail because of it, and may even exit first. The reported cause
is a worker that was killed; or else one that did not fail with `WorkerLost`; or else the one that
first showed a traceback.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import time
from collections.abc import Callable
from functools import partial

from telegrad.launch.environment import group_environment
from telegrad.launch.output import Screen, Stream
from telegrad.launch.processes import SignalInbox, descendants, only_noted, signal_all
from telegrad.launch.program import LaunchOptions
from telegrad.launch.worker_process import WorkerProcess, start_workers

__all__ = ["PASSED_ON", "Group"]

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals for the program, not for the launcher."""

_SETTLING = 1.0  # seconds for a failing worker to end, after another has failed because of it
_LEAVING = 2.0  # seconds for processes that workers have started, after all workers have ended
_LOOKING_AGAIN = 0.05  # seconds between looks at processes that are not our children


class Group:
    """
    Args:
        port: where the workers meet.
        front: a descriptor that is readable once the launcher's front has died.
    """

    def __init__(
        self, options: LaunchOptions, port: int, front: int, out: Screen, err: Screen
    ) -> None:
        self._options = options
        self._port = port
        self._front = front
        self._out = out
        self._err = err
        self._workers: list[WorkerProcess] = []
        self._plan: list[tuple[float, signal.Signals]] = []  # what to send to all, and when
        self._is_ending = False
        self._interrupted_by = 0
        self._is_broken = False  # our output cannot be written
        self._shown_last = -1  # the worker whose error output was shown last
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Returns the exit code of the launcher."""
        with SignalInbox() as inbox:
            for number in PASSED_ON:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a job in the background
                    signal.signal(number, only_noted)
            signal.signal(signal.SIGCHLD, only_noted)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            self._watch(inbox.fileno(), partial(self._on_signals, inbox))
            self._watch(self._front, self._on_front_lost)
            try:
                self._start()
                while not self._is_over():
                    # Ends with output, a death, a signal, or the next step of the plan.
                    for key, _ in self._selector.select(self._time_to_wait()):
                        key.data()
                    self._follow_plan()
            finally:
                signal_all(signal.SIGKILL)
            return self._conclude()

    # -- starting

    def _start(self) -> None:
        threads = self._options.threads
        secret = secrets.token_hex(32)
        size = self._options.workers
        if threads is not None:
            self._say(f"OMP_NUM_THREADS={threads} for each of {size} workers")
        environment = group_environment(
            os.environ, size=size, port=self._port, secret=secret, threads=threads
        )
        # Ends when they are forked. Signals that come meanwhile are handled after it.
        self._workers = start_workers(
            size, self._options.program.arguments_of_forking(), environment
        )
        for worker in self._workers:
            for stream in (worker.out, worker.err):
                self._watch(stream.descriptor, partial(self._on_output, worker, stream))

    def _watch(self, descriptor: int, handle: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, handle)

    # -- what happens

    def _on_output(self, worker: WorkerProcess, stream: Stream) -> None:
        if stream.has_ended():
            return  # an earlier event closed it
        lines = stream.read()
        if stream.has_ended():
            self._selector.unregister(stream.descriptor)
        self._show(worker, stream, lines)

    def _show(self, worker: WorkerProcess, stream: Stream, lines: list[bytes]) -> None:
        if not lines:
            return
        if stream is worker.err:
            worker.errors.add(lines, time.monotonic())
            self._shown_last = worker.rank
        elif self._shown_last != worker.rank:
            self._shown_last = -1
        if not self._is_broken:
            try:
                (self._err if stream is worker.err else self._out).show(worker.rank, lines)
            except OSError as error:  # a pipe without a reader, a closed terminal, a full disk
                if not isinstance(error, BrokenPipeError):
                    self._say(f"output cannot be written: {error.strerror}")
                self._is_broken = True
                self._end(signal.SIGTERM)

    def _on_front_lost(self) -> None:
        self._selector.unregister(self._front)
        self._end(signal.SIGTERM)

    def _on_signals(self, inbox: SignalInbox) -> None:
        for number in inbox.read():
            if number == signal.SIGCHLD:
                self._reap()
            elif number in PASSED_ON:
                self._interrupted_by = self._interrupted_by or number
                self._end(signal.Signals(number))

    def _reap(self) -> None:
        by_process = {worker.process: worker for worker in self._workers}
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            worker = by_process.get(process)  # None: an adopted orphan
            if worker is not None:
                worker.code = os.waitstatus_to_exitcode(status)
                worker.ended_at = time.monotonic()
                worker.was_asked = self._have_been_asked()
                if worker.code != 0 and not worker.was_asked:
                    self._on_failure(worker)

    def _on_failure(self, failed: WorkerProcess) -> None:
        for worker in self._workers:  # to judge by all output until now
            for stream in (worker.out, worker.err):
                self._on_output(worker, stream)
        wait = _SETTLING if self._is_a_consequence(failed) else 0.0
        self._end(signal.SIGTERM, after=wait)

    def _is_a_consequence(self, failed: WorkerProcess) -> bool:
        """Whether a worker that still runs may have caused another's failure."""
        running = [worker for worker in self._workers if worker.code is None]
        now = time.monotonic()
        raised = failed.errors.traceback_at(now)
        earlier = (
            raised is not None
            and (other := worker.errors.traceback_at(now)) is not None
            and other < raised
            for worker in running
        )
        return any(earlier) or (bool(running) and _lacks_another(failed))

    # -- ending

    def _end(self, first: signal.Signals, *, after: float = 0.0) -> None:
        """Plans the end. Of two plans, the earlier one counts."""
        due = time.monotonic() + after
        if self._have_been_asked():
            return
        if not self._is_ending or due < self._plan[0][0]:
            self._plan = [(due, first), (due + self._options.grace, signal.SIGKILL)]
        self._is_ending = True
        self._follow_plan()

    def _have_been_asked(self) -> bool:
        """Whether the workers were asked to end."""
        return self._is_ending and (not self._plan or self._plan[0][1] == signal.SIGKILL)

    def _follow_plan(self) -> None:
        while self._plan and self._plan[0][0] <= time.monotonic():
            _, number = self._plan.pop(0)
            if number == signal.SIGKILL:
                slow = [str(worker.rank) for worker in self._workers if worker.code is None]
                if slow:
                    which = ("worker " if len(slow) == 1 else "workers ") + ", ".join(slow)
                    self._say(f"{which} did not end within {self._options.grace:g} s: killed")
            else:
                self._note_tracebacks()
            signal_all(number)

    def _note_tracebacks(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.code is None and not _lacks_another(worker):
                worker.had_raised = worker.errors.traceback_at(now) is not None

    def _is_over(self) -> bool:
        if any(worker.code is None for worker in self._workers):
            return False
        if not descendants():
            return True
        if not self._is_ending:  # all workers have succeeded, and other processes are left
            self._is_ending = True
            due = time.monotonic() + _LEAVING
            self._plan = [
                (due, signal.SIGTERM),
                (due + self._options.grace, signal.SIGKILL),
            ]
        elif not self._plan:
            signal_all(signal.SIGKILL)  # also processes started while others were killed
        return False

    def _time_to_wait(self) -> float | None:
        until_due = self._plan[0][0] - time.monotonic() if self._plan else None
        if any(worker.code is None for worker in self._workers):
            return until_due
        return _LOOKING_AGAIN if until_due is None else min(until_due, _LOOKING_AGAIN)

    # -- the result

    def _conclude(self) -> int:
        for worker in self._workers:
            for stream in (worker.out, worker.err):
                self._show(worker, stream, stream.finish())
        if self._interrupted_by:
            name = signal.Signals(self._interrupted_by).name
            self._say(f"ended by {name}")
            return 128 + self._interrupted_by
        cause = self._cause()
        if cause is not None:
            self._report(cause)
            return cause.exit_code
        return 128 + signal.SIGPIPE if self._is_broken else 0

    def _cause(self) -> WorkerProcess | None:
        """The worker whose failure ended the run, if one did."""
        failed = [w for w in self._workers if w.code and not w.was_asked]
        if failed and all(map(_lacks_another, failed)):
            # A worker that has raised in its main thread may be kept alive by other threads, and
            # leave its group nevertheless. It was still running when all were asked to end.
            for worker in self._workers:
                if worker.was_asked and worker.had_raised:
                    worker.code = 1  # its exit code, had it ended by itself
                    failed.append(worker)
        return min(failed, key=_blame, default=None)

    def _report(self, cause: WorkerProcess) -> None:
        others = len([w for w in self._workers if w is not cause and (w.was_asked or w.code)])
        text = cause.end
        if others:
            text += f"; {others} other{'s' if others > 1 else ''} ended with it"
        lines = [] if self._shown_last == cause.rank else cause.errors.lines()
        if self._is_broken or (len(self._workers) == 1 and cause.exit_code < 128):
            return  # the output has no reader; or the worker's own output says it all
        with contextlib.suppress(OSError):  # the output has no reader
            self._err.warn(text + (". Its last output:" if lines else ""))
            self._err.show(cause.rank, lines)
            if _lacks_another(cause):
                self._report_early_ends()

    def _report_early_ends(self) -> None:
        for worker in self._workers:
            if worker.code == 0 and not worker.was_asked:
                self._err.say(
                    f"worker {worker.rank} had ended before, with exit code 0, while others still "
                    "needed it. Each worker calls rpc.init_rpc(), and at its end rpc.shutdown(), "
                    "which keeps it serving until all are done"
                )

    def _say(self, text: str) -> None:
        self._shown_last = -1
        if not self._is_broken:
            with contextlib.suppress(OSError):  # the output has no reader
                self._err.say(text)


def _lacks_another(worker: WorkerProcess) -> bool:
    """Whether it failed because another worker was gone, or never joined."""
    signs = (b"WorkerLost", b"did not join within")
    return any(sign in line for line in worker.errors.lines() for sign in signs)


def _blame(worker: WorkerProcess) -> tuple[bool, bool, float]:
    """Sorts failed workers: the cause comes first."""
    raised = worker.errors.traceback_at(worker.ended_at)
    was_killed = (worker.code or 0) < 0
    return (
        not was_killed,
        _lacks_another(worker),
        worker.ended_at if raised is None else raised,
    )
