"""Runs the workers to their common end. One thread, which waits for output, deaths and signals.

The group ends when all workers have, when one fails, when a signal asks for it, when nobody reads
the output any more, or when the launcher's front is gone. From then on signals go out by a fixed
plan: first one that asks, and after a grace one that does not. It is over when no process is left.

Who is to blame: when one worker fails, others soon fail for want of it, and may be gone before it.
The cause is one that was killed; or else one that did not just miss another (`WorkerLost`); or else
the one that complained first.
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

from telegrad.launch.descendants import descendants, signal_all
from telegrad.launch.environment import group_environment
from telegrad.launch.options import LaunchOptions
from telegrad.launch.output import Screen
from telegrad.launch.signals import SignalInbox, only_noted
from telegrad.launch.worker_process import Stream, WorkerProcess, start_workers

__all__ = ["PASSED_ON", "Group"]

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that are meant for the program, not for the launcher."""

_SETTLING = 1.0  # seconds for the cause of a failure to end, when another has ended for want of it
_LEAVING = 2.0  # seconds for what workers have started to end by itself, after all of them have
_LOOKING_AGAIN = 0.05  # seconds, while processes that are not our children are left


class Group:
    """
    Args:
        port: where the workers meet.
        front: a descriptor that becomes readable when the launcher's front has died.
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
        self._plan: list[tuple[float, signal.Signals]] = []  # what is sent to all, and when
        self._is_ending = False
        self._interrupted_by = 0
        self._is_broken = False  # our output cannot be written
        self._spoke_last = -1  # whose error output was shown last
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Returns the exit code of the whole."""
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
                    # Ends by output, a death, a signal, or when the next step of the plan is due.
                    for key, _ in self._selector.select(self._patience()):
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
            self._tell(f"OMP_NUM_THREADS={threads} for each of {size} workers")
        environment = group_environment(
            os.environ, size=size, port=self._port, secret=secret, threads=threads
        )
        # Ends when they are forked. Signals that come meanwhile wait, but not the front's patience.
        self._workers = start_workers(
            size, self._options.program.arguments_of_nursery(), environment
        )
        for worker in self._workers:
            for stream in (worker.out, worker.err):
                self._watch(stream.descriptor, partial(self._on_output, worker, stream))

    def _watch(self, descriptor: int, handle: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, handle)

    # -- what happens

    def _on_output(self, worker: WorkerProcess, stream: Stream) -> None:
        if stream.has_ended():
            return  # closed by an event before this one
        lines = stream.read()
        if stream.has_ended():
            self._selector.unregister(stream.descriptor)
        self._show(worker, stream, lines)

    def _show(self, worker: WorkerProcess, stream: Stream, lines: list[bytes]) -> None:
        if not lines:
            return
        if stream is worker.err:
            worker.last_words.hear(lines, time.monotonic())
            self._spoke_last = worker.rank
        elif self._spoke_last != worker.rank:
            self._spoke_last = -1
        if not self._is_broken:
            try:
                (self._err if stream is worker.err else self._out).show(worker.rank, lines)
            except OSError as error:  # a pipe that nobody reads, a closed terminal, a full disk
                if not isinstance(error, BrokenPipeError):
                    self._tell(f"output cannot be written: {error.strerror}")
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
            worker = by_process.get(process)  # None: an orphan that we have adopted
            if worker is not None:
                worker.code = os.waitstatus_to_exitcode(status)
                worker.ended_at = time.monotonic()
                worker.was_asked = self._have_been_asked()
                if worker.code != 0 and not worker.was_asked:
                    self._on_failure(worker)

    def _on_failure(self, failed: WorkerProcess) -> None:
        for worker in self._workers:  # all that has been said until now counts
            for stream in (worker.out, worker.err):
                self._on_output(worker, stream)
        wait = _SETTLING if self._is_a_consequence(failed) else 0.0
        self._end(signal.SIGTERM, after=wait)

    def _is_a_consequence(self, failed: WorkerProcess) -> bool:
        """Whether one that still runs may be what another failed for."""
        running = [worker for worker in self._workers if worker.code is None]
        now = time.monotonic()
        complained = failed.last_words.complained_at(now)
        earlier = (
            complained is not None
            and (other := worker.last_words.complained_at(now)) is not None
            and other < complained
            for worker in running
        )
        return any(earlier) or (bool(running) and _misses_another(failed))

    # -- ending

    def _end(self, first: signal.Signals, *, after: float = 0.0) -> None:
        """Plans the end. Of two plans the one that asks sooner counts."""
        due = time.monotonic() + after
        if self._have_been_asked():
            return
        if not self._is_ending or due < self._plan[0][0]:
            self._plan = [(due, first), (due + self._options.grace, signal.SIGKILL)]
        self._is_ending = True
        self._follow_plan()

    def _have_been_asked(self) -> bool:
        """Whether the first step of the plan is done."""
        return self._is_ending and (not self._plan or self._plan[0][1] == signal.SIGKILL)

    def _follow_plan(self) -> None:
        while self._plan and self._plan[0][0] <= time.monotonic():
            _, number = self._plan.pop(0)
            if number == signal.SIGKILL:
                slow = [str(worker.rank) for worker in self._workers if worker.code is None]
                if slow:
                    which = ("worker " if len(slow) == 1 else "workers ") + ", ".join(slow)
                    self._tell(f"{which} did not end within {self._options.grace:g} s: killed")
            else:
                self._note_who_had_raised()
            signal_all(number)

    def _note_who_had_raised(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.code is None and not _misses_another(worker):
                worker.had_raised = worker.last_words.complained_at(now) is not None

    def _is_over(self) -> bool:
        if any(worker.code is None for worker in self._workers):
            return False
        if not descendants():
            return True
        if not self._is_ending:  # all went well, and something is left
            self._is_ending = True
            due = time.monotonic() + _LEAVING
            self._plan = [
                (due, signal.SIGTERM),
                (due + self._options.grace, signal.SIGKILL),
            ]
        elif not self._plan:
            signal_all(signal.SIGKILL)  # also what was started while the others were killed
        return False

    def _patience(self) -> float | None:
        until_due = self._plan[0][0] - time.monotonic() if self._plan else None
        if any(worker.code is None for worker in self._workers):
            return until_due
        return _LOOKING_AGAIN if until_due is None else min(until_due, _LOOKING_AGAIN)

    # -- the verdict

    def _conclude(self) -> int:
        for worker in self._workers:
            for stream in (worker.out, worker.err):
                self._show(worker, stream, stream.finish())
        if self._interrupted_by:
            name = signal.Signals(self._interrupted_by).name
            self._tell(f"ended by {name}")
            return 128 + self._interrupted_by
        cause = self._cause()
        if cause is not None:
            self._accuse(cause)
            return cause.exit_code
        return 128 + signal.SIGPIPE if self._is_broken else 0

    def _cause(self) -> WorkerProcess | None:
        """Whose failure ended the run, if one's did."""
        failed = [w for w in self._workers if w.code and not w.was_asked]
        if failed and all(map(_misses_another, failed)):
            # One that has raised in its main thread may be kept alive by others, and leave its
            # group all the same. Then it was still there to be ended.
            for worker in self._workers:
                if worker.was_asked and worker.had_raised:
                    worker.code = 1  # what it would have ended with
                    failed.append(worker)
        return min(failed, key=_blame, default=None)

    def _accuse(self, cause: WorkerProcess) -> None:
        others = len([w for w in self._workers if w is not cause and (w.was_asked or w.code)])
        text = cause.end
        if others:
            text += f"; {others} other{'s' if others > 1 else ''} ended with it"
        lines = [] if self._spoke_last == cause.rank else cause.last_words.lines()
        if self._is_broken or (len(self._workers) == 1 and cause.exit_code < 128):
            return  # nobody listens; or it has said all there is to say
        with contextlib.suppress(OSError):  # nobody is left to be told
            self._err.warn(text + (". It said:" if lines else ""))
            self._err.show(cause.rank, lines)
            if _misses_another(cause):
                self._tell_who_left_early()

    def _tell_who_left_early(self) -> None:
        for worker in self._workers:
            if worker.code == 0 and not worker.was_asked:
                self._err.say(
                    f"worker {worker.rank} had ended before, with exit code 0, while others still "
                    "needed it. Each worker calls rpc.init_rpc(), and at its end rpc.shutdown(), "
                    "which is what keeps it serving until all are done"
                )

    def _tell(self, text: str) -> None:
        self._spoke_last = -1
        if not self._is_broken:
            with contextlib.suppress(OSError):  # nobody is left to be told
                self._err.say(text)


def _misses_another(worker: WorkerProcess) -> bool:
    """Whether it failed because another worker was gone, or had never come."""
    signs = (b"WorkerLost", b"did not join within")
    return any(sign in line for line in worker.last_words.lines() for sign in signs)


def _blame(worker: WorkerProcess) -> tuple[bool, bool, float]:
    """Orders those that failed: the cause comes first."""
    complained = worker.last_words.complained_at(worker.ended_at)
    was_killed = (worker.code or 0) < 0
    return (
        not was_killed,
        _misses_another(worker),
        worker.ended_at if complained is None else complained,
    )
