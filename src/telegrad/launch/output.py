"""Workers' output: read as whole lines, and shown marked with their worker.

The bytes are not decoded, so they need not be text. Each line is written with its mark by one call,
so lines of two workers never mix. A line without an end is shown when its worker closes the stream.

When one worker fails, others soon fail because of it, and may even exit first: a worker that has
raised must still leave the group, which is what the others notice. So the cause is the worker that
first showed a traceback, which `ErrorOutput` records.
"""

from __future__ import annotations

import collections
import os
import select
from collections.abc import Iterable, Mapping

__all__ = ["LONGEST_LINE", "ErrorOutput", "Lines", "Screen", "Stream", "wants_colour"]

LONGEST_LINE = 1 << 20
"""Bytes after which a line is broken, to limit its memory."""

_AT_ONCE = 1 << 16  # bytes read at a time
_MOST_LINES = 400
_MOST_BYTES = 2000  # kept of a line
_WITHOUT_TRACEBACK = 10  # lines to show if there is no traceback
_RECENT = 3.0  # seconds; the worker has survived an older traceback

_HEADERS = (b"Traceback (most recent call last):", b"Fatal Python error:")
_LINKS = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)

_COLOURS = (36, 33, 35, 32, 34, 31)  # of marks, by rank
_ALARM = 31


class Lines:
    """Cuts one stream into lines, without their ends."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []  # pieces of the line that is not complete
        self._length = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now."""
        *ended, rest = data.split(b"\n")
        lines: list[bytes] = []
        for piece in ended:
            self._extend(piece, lines)
            lines.append(self._take())
        self._extend(rest, lines)
        return lines

    def rest(self) -> list[bytes]:
        """The last line, if the stream has ended in the middle of one."""
        return [self._take()] if self._length else []

    def _extend(self, piece: bytes, lines: list[bytes]) -> None:
        while self._length + len(piece) > LONGEST_LINE:
            room = LONGEST_LINE - self._length
            self._begun.append(piece[:room])
            piece = piece[room:]
            lines.append(self._take())
        if piece:
            self._begun.append(piece)
            self._length += len(piece)

    def _take(self) -> bytes:
        line = b"".join(self._begun)
        self._begun.clear()
        self._length = 0
        return line


class Stream:
    """The launcher's end of a worker's stdout or stderr."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._is_open = True
        self._lines = Lines()
        os.set_blocking(descriptor, False)

    def read(self) -> list[bytes]:
        """The lines that are complete now. Closes the stream at its end."""
        data = self._receive()
        if data is None:
            return []
        if data:
            return self._lines.feed(data)
        self.close()
        return self._lines.rest()

    def finish(self) -> list[bytes]:
        """All that is left, and closes the stream. The worker has ended; other processes that hold
        the stream are cut off."""
        lines: list[bytes] = []
        while self._is_open and (data := self._receive()):
            lines += self._lines.feed(data)
        self.close()
        return lines + self._lines.rest()

    def _receive(self) -> bytes | None:
        """Empty at the end of the stream, None if nothing can be read now."""
        try:
            return os.read(self.descriptor, _AT_ONCE)
        except BlockingIOError:
            return None

    def has_ended(self) -> bool:
        return not self._is_open

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self.descriptor)


class ErrorOutput:
    """The end of one worker's error output, and when it showed tracebacks."""

    def __init__(self) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_MOST_LINES)
        self._tracebacks: collections.deque[float] = collections.deque(maxlen=16)

    def add(self, lines: Iterable[bytes], now: float) -> None:
        for line in lines:
            self._lines.append(line[:_MOST_BYTES])
            if line.startswith(_HEADERS):
                self._tracebacks.append(now)

    def traceback_at(self, now: float) -> float | None:
        """When the worker began to show a traceback, if recently."""
        return next((time for time in self._tracebacks if now - time < _RECENT), None)

    def lines(self) -> list[bytes]:
        """The last traceback with its causes and what follows it; or else the last lines."""
        lines = list(self._lines)
        headers = [i for i, line in enumerate(lines) if line.startswith(_HEADERS)]
        if not headers:
            return lines[-_WITHOUT_TRACEBACK:]
        begin = headers.pop()
        while headers and any(line in _LINKS for line in lines[headers[-1] : begin]):
            begin = headers.pop()
        return lines[begin:]


def wants_colour(descriptor: int, environment: Mapping[str, str]) -> bool:
    """Whether a stream is a terminal with colours, and the environment does not turn them off."""
    return (
        os.isatty(descriptor)
        and not environment.get("NO_COLOR")
        and environment.get("TERM") != "dumb"
    )


class Screen:
    """One of the launcher's own streams, to which workers' lines are written.

    Args:
        marks: whether lines are marked with their worker.
    """

    def __init__(self, descriptor: int, *, is_terminal: bool, colour: bool, marks: bool) -> None:
        self._descriptor = descriptor
        self._is_terminal = is_terminal
        self._colour = colour
        self._marks = marks

    def show(self, rank: int, lines: Iterable[bytes]) -> None:
        """
        Raises:
            BrokenPipeError: its reader is gone.
        """
        mark = self._mark(rank)
        shown = map(_what_stays, lines) if self._is_terminal else lines
        self._write(b"".join(mark + line + b"\n" for line in shown))

    def say(self, text: str) -> None:
        """Shows a message of the launcher itself."""
        self._write(f"telegrad: {text}\n".encode())

    def warn(self, text: str) -> None:
        begin, end = (f"\x1b[1;{_ALARM}m", "\x1b[0m") if self._colour else ("", "")
        self._write(f"{begin}telegrad: {text}{end}\n".encode())

    def _mark(self, rank: int) -> bytes:
        if not self._marks:
            return b""
        if not self._colour:
            return b"[%d] " % rank
        return b"\x1b[%dm[%d]\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], rank)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                # The stream was inherited as non-blocking. Ends when its reader reads on or goes
                # away.
                select.select([], [self._descriptor], [])


def _what_stays(line: bytes) -> bytes:
    """What a terminal shows of a line that was drawn several times, like a progress bar."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
