"""Whether a silent process of this host is computing.

A long operation in C that keeps the interpreter lock, such as `sum(range(10**9))`, keeps a worker
from answering. It is alive all the same, and uses processor time; one that is stopped or waits for
nothing uses none.
"""

from __future__ import annotations

import os

__all__ = ["ProcessorTime"]

_BUSY = 0.02  # seconds of processor time in a second: others may want the processors, too


class ProcessorTime:
    """Looks at one process now and then.

    Args:
        timeout: seconds of silence that mean a loss; it is to be known several times in them.
    """

    def __init__(self, timeout: float) -> None:
        self._window = timeout / 8
        self._since = 0.0
        self._used = -1.0  # then

    def has_grown(self, process: int, now: float) -> bool:
        """Whether the process has used much processor time since a moment ago; False if that cannot
        be known, or not yet."""
        if now - self._since < self._window:
            return False
        used = _processor_seconds(process)
        elapsed, before = now - self._since, self._used
        self._since, self._used = now, used
        is_recent = elapsed < 4 * self._window
        return is_recent and before >= 0 and used - before > _BUSY * elapsed


def _processor_seconds(process: int) -> float:
    """All that a process has ever used; -1 if there is no such process here."""
    if not process:
        return -1.0
    try:
        with open(f"/proc/{process}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()  # its name may hold anything
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return -1.0
