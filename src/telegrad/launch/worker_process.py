"""One worker: its process, its two streams, and how it ended."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from telegrad.errors import LaunchError
from telegrad.launch.failure_output import LastWords
from telegrad.launch.output import Lines

__all__ = ["Stream", "WorkerProcess", "start_workers"]

_AT_ONCE = 1 << 16  # bytes that are read at a time
_FORKING = os.path.join(os.path.dirname(os.path.abspath(__file__)), "forking.py")


class Stream:
    """The launcher's end of a worker's stdout or stderr."""

    def __init__(self, rank: int, descriptor: int) -> None:
        self.rank = rank
        self.descriptor = descriptor
        self._is_open = True
        self._lines = Lines()
        os.set_blocking(descriptor, False)

    def read(self) -> list[bytes]:
        """The lines that have become whole. At the end of the stream it is closed."""
        try:
            data = os.read(self.descriptor, _AT_ONCE)
        except BlockingIOError:
            return []
        if data:
            return self._lines.feed(data)
        self.close()
        return self._lines.rest()

    def finish(self) -> list[bytes]:
        """All that is left, now. The worker has ended; who else holds the stream is cut off."""
        lines = []
        while self._is_open and (more := self._read_if_ready()) is not None:
            lines += more
        self.close()
        return lines + self._lines.rest()

    def _read_if_ready(self) -> list[bytes] | None:
        try:
            data = os.read(self.descriptor, _AT_ONCE)
        except BlockingIOError:
            return None
        return self._lines.feed(data) if data else None

    def has_ended(self) -> bool:
        return not self._is_open

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self.descriptor)


class WorkerProcess:
    def __init__(self, rank: int, process: int, out: Stream, err: Stream) -> None:
        self.rank = rank
        self.process = process
        self.out = out
        self.err = err
        self.last_words = LastWords()
        self.code: int | None = None  # None while it runs; negative: the signal that killed it
        self.ended_at = 0.0
        self.was_asked = False  # to end, before it did
        self.had_raised = False  # before it was asked

    @property
    def exit_code(self) -> int:
        """As a shell has it: 128 and the signal's number for one that was killed."""
        code = self.code or 0
        return code if code >= 0 else 128 - code

    @property
    def end(self) -> str:
        """How it ended, in words."""
        code = self.code or 0
        if code >= 0:
            return f"worker {self.rank} failed with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:  # a real-time signal has no name
            name = f"signal {-code}"
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"worker {self.rank} was killed by {name}{hint}"


def start_workers(
    size: int, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[WorkerProcess]:
    """Has a nursery fork the workers of a group, and adopts them.

    Args:
        arguments: what the nursery has to know of the program.
        environment: the workers', but for their ranks.

    Raises:
        LaunchError: the system does not let us. Some may have been started.
    """
    births: list[int] = []
    outputs: list[int] = []
    writers: list[int] = []
    try:
        _open_pipe(births, writers)
        for _ in range(2 * size):
            _open_pipe(outputs, writers)
        _start_nursery(writers, arguments, environment)
    except OSError as error:
        for reader in (*births, *outputs):
            os.close(reader)
        raise _no_room(min(len(outputs) // 2, size - 1), error.errno) from None
    finally:
        for writer in writers:
            os.close(writer)
    with open(births[0], encoding="ascii") as lines:
        told = [int(line) for line in lines]  # ends with the nursery: no worker keeps it open
    processes = [process for process in told if process > 0]
    if len(processes) < size:
        raise _no_room(len(processes), -min(told, default=0))
    return [
        WorkerProcess(rank, process, *(Stream(rank, outputs[2 * rank + i]) for i in range(2)))
        for rank, process in enumerate(processes)
    ]


def _open_pipe(readers: list[int], writers: list[int]) -> None:
    reader, writer = os.pipe()
    readers.append(reader)
    writers.append(writer)
    os.set_inheritable(writer, True)


def _start_nursery(
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
        setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # Python ignores them for itself only
    )


def _no_room(rank: int, number: int | None) -> LaunchError:
    reason = os.strerror(number) if number else "the process that starts the workers has ended"
    return LaunchError(f"worker {rank} cannot be started: {reason}")
