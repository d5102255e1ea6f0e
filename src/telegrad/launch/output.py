"""Workers' output: whole lines, each marked with the worker it is from.

Bytes pass as they are: nothing is decoded, so nothing can be undecodable. A line is written by one
call together with its mark, so lines of two workers never mix. A line without an end is shown when
its worker closes the stream.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable, Mapping

__all__ = ["LONGEST_LINE", "Lines", "Screen", "wants_colour"]

LONGEST_LINE = 1 << 20
"""Bytes after which a line that does not end is broken: memory for it must have an end."""

_COLOURS = (36, 33, 35, 32, 34, 31)  # of marks, by rank
_ALARM = 31


class Lines:
    """Cuts one stream into lines, without their ends."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []  # pieces of the line that has not ended yet
        self._length = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that have become whole."""
        *ended, rest = data.split(b"\n")
        lines: list[bytes] = []
        for piece in ended:
            self._extend(piece, lines)
            lines.append(self._take())
        self._extend(rest, lines)
        return lines

    def rest(self) -> list[bytes]:
        """The last line, if the stream has ended within one."""
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


def wants_colour(descriptor: int, environment: Mapping[str, str]) -> bool:
    """Whether a stream is a terminal that shows colours, and nobody has asked for none."""
    return (
        os.isatty(descriptor)
        and not environment.get("NO_COLOR")
        and environment.get("TERM") != "dumb"
    )


class Screen:
    """One of the launcher's own streams, which workers' lines are written to.

    Args:
        marks: whether lines are marked with their worker; a single worker's need not be.
    """

    def __init__(self, descriptor: int, *, is_terminal: bool, colour: bool, marks: bool) -> None:
        self._descriptor = descriptor
        self._is_terminal = is_terminal
        self._colour = colour
        self._marks = marks

    def show(self, rank: int, lines: Iterable[bytes]) -> None:
        """
        Raises:
            BrokenPipeError: nobody reads it any more.
        """
        mark = self._mark(rank)
        shown = map(_what_stays, lines) if self._is_terminal else lines
        self._write(b"".join(mark + line + b"\n" for line in shown))

    def say(self, text: str) -> None:
        """A remark of the launcher itself."""
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
                # Whoever started us left the stream non-blocking. Ends when its reader reads on or
                # goes away.
                select.select([], [self._descriptor], [])


def _what_stays(line: bytes) -> bytes:
    """What a terminal shows in the end of a line that was drawn several times: a progress bar."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
