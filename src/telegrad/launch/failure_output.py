"""What a worker said before it failed, and when it began to.

When one worker fails, others soon fail for want of it, and may even be gone first: who has raised
must still leave the group, which is what the others notice. The cause is who complained first.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

__all__ = ["LastWords"]

_MOST_LINES = 400
_MOST_BYTES = 2000  # of a line
_WITHOUT_TRACEBACK = 10  # lines that are shown then
_RECENT = 3.0  # seconds; an older traceback has been survived

_HEADERS = (b"Traceback (most recent call last):", b"Fatal Python error:")
_LINKS = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)


class LastWords:
    """The end of one worker's error output."""

    def __init__(self) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_MOST_LINES)
        self._tracebacks: collections.deque[float] = collections.deque(maxlen=16)

    def hear(self, lines: Iterable[bytes], now: float) -> None:
        for line in lines:
            self._lines.append(line[:_MOST_BYTES])
            if line.startswith(_HEADERS):
                self._tracebacks.append(now)

    def complained_at(self, now: float) -> float | None:
        """When the worker began to show a traceback, if it did so lately."""
        return next((time for time in self._tracebacks if now - time < _RECENT), None)

    def lines(self) -> list[bytes]:
        """The last traceback with what it was caused by, and what followed; or the last lines."""
        lines = list(self._lines)
        headers = [i for i, line in enumerate(lines) if line.startswith(_HEADERS)]
        if not headers:
            return lines[-_WITHOUT_TRACEBACK:]
        begin = headers.pop()
        while headers and any(line in _LINKS for line in lines[headers[-1] : begin]):
            begin = headers.pop()
        return lines[begin:]
