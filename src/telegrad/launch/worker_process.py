"""One worker: its process, its two streams, and how it ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

from telegrad.errors import LaunchError
from telegrad.launch.last_words import LastWords
from telegrad.launch.output import Lines

__all__ = ["Stream", "WorkerProcess", "start_process"]

_AT_ONCE = 1 << 16  # bytes that are read at a time


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


def start_process(
    rank: int, command: Sequence[str], environment: Mapping[str, str]
) -> WorkerProcess:
    """Starts a worker in a session of its own: what the terminal sends goes to the launcher alone.

    Worker 0 gets the launcher's stdin unless that is a terminal, which a process of another session
    cannot read; the others have none.

    Raises:
        LaunchError: the system does not let us.
    """
    opened: list[int] = []
    try:
        for _ in range(2):
            opened += os.pipe()
        out_reader, out_writer, err_reader, err_writer = opened
        actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_DUP2, out_writer, 1),
            (os.POSIX_SPAWN_DUP2, err_writer, 2),
        ]
        if rank != 0 or os.isatty(0):
            actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
        process = os.posix_spawn(
            command[0],
            list(command),
            environment,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),  # Python ignores them for itself only
        )
    except OSError as error:
        for descriptor in opened:
            os.close(descriptor)
        raise LaunchError(f"worker {rank} cannot be started: {error.strerror}") from None
    os.close(out_writer)
    os.close(err_writer)
    return WorkerProcess(rank, process, Stream(rank, out_reader), Stream(rank, err_reader))
