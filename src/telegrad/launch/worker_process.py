"""One worker of `launch`: its process, its two streams, and how it ended."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from telegrad.errors import LaunchError
from telegrad.launch.output import ErrorOutput, Stream

__all__ = ["WorkerProcess", "end_in_words", "start_workers"]

_FORKING = os.path.join(os.path.dirname(os.path.abspath(__file__)), "forking.py")


class WorkerProcess:
    def __init__(self, rank: int, process: int, out: Stream, err: Stream) -> None:
        self.rank = rank
        self.process = process
        self.out = out
        self.err = err
        self.errors = ErrorOutput()
        self.code: int | None = None  # None while it runs; negative: the signal that killed it
        self.ended_at = 0.0
        self.was_asked = False  # was it asked to end before it did?
        self.had_raised = False  # before it was asked to end

    @property
    def exit_code(self) -> int:
        """As in a shell: 128 plus the signal's number if it was killed."""
        code = self.code or 0
        return code if code >= 0 else 128 - code

    @property
    def end(self) -> str:
        return end_in_words(f"worker {self.rank}", self.code or 0, verb="failed")


def end_in_words(what: str, code: int, *, verb: str = "ended") -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"{what} {verb} with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"{what} was killed by {name}{hint}"


def start_workers(
    size: int, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[WorkerProcess]:
    """Starts a process that forks the workers of a group (`forking`), and adopts them.

    Args:
        arguments: that process's, which name the program.
        environment: the workers', without their ranks.

    Raises:
        LaunchError: a process cannot be started. Some workers may have been.
    """
    births: list[int] = []
    outputs: list[int] = []
    writers: list[int] = []
    try:
        _open_pipe(births, writers)
        for _ in range(2 * size):
            _open_pipe(outputs, writers)
        _start_forking(writers, arguments, environment)
    except OSError as error:
        for reader in (*births, *outputs):
            os.close(reader)
        raise _no_room(min(len(outputs) // 2, size - 1), error.errno) from None
    finally:
        for writer in writers:
            os.close(writer)
    with open(births[0], encoding="ascii") as lines:
        printed = [int(line) for line in lines]  # ends with that process: no worker keeps it open
    processes = [process for process in printed if process > 0]
    if len(processes) < size:
        raise _no_room(len(processes), -min(printed, default=0))
    return [
        WorkerProcess(rank, process, *(Stream(outputs[2 * rank + i]) for i in range(2)))
        for rank, process in enumerate(processes)
    ]


def _open_pipe(readers: list[int], writers: list[int]) -> None:
    reader, writer = os.pipe()
    readers.append(reader)
    writers.append(writer)
    os.set_inheritable(writer, True)


def _start_forking(
    writers: Sequence[int], arguments: Sequence[str], environment: Mapping[str, str]
) -> None:
    births, *outputs = writers
    os.posix_spawn(
        sys.executable,
        [sys.executable, _FORKING, ",".join(map(str, outputs)), *arguments],
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, births, 1), (os.POSIX_SPAWN_CLOSE, births)],
        setsid=True,
        setsigmask=(),
        setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # ignored by Python itself
    )


def _no_room(rank: int, number: int | None) -> LaunchError:
    reason = os.strerror(number) if number else "the process that starts the workers has ended"
    return LaunchError(f"worker {rank} cannot be started: {reason}")
