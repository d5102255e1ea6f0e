"""Tells a silent process of this host that computes from one that hangs.

A worker cannot answer during a long operation in C that keeps the interpreter lock, such as
`sum(range(10**9))`. It is alive, and uses processor time; a stopped process uses none.
"""

from __future__ import annotations

import os

__all__ = ["ProcessorTime"]

_BUSY = 0.02  # seconds of processor time per second: it may share the processors


class ProcessorTime:
    """Samples one process.

    Args:
        timeout: seconds of silence that mean a loss; several samples are taken in that time.
    """

    def __init__(self, timeout: float) -> None:
        self._window = timeout / 8
        self._since = 0.0
        self._used = -1.0  # then

    def has_grown(self, process: int, now: float) -> bool:
        """Whether the process has used much processor time since the last sample; False if that is
        not known."""
        if now - self._since < self._window:
            return False
        used = _processor_seconds(process)
        elapsed, before = now - self._since, self._used
        self._since, self._used = now, used
        is_recent = elapsed < 4 * self._window
        return is_recent and before >= 0 and used - before > _BUSY * elapsed


def _processor_seconds(process: int) -> float:
    """The processor time that a process has used in all; -1 if there is no such process here."""
    if not process:
        return -1.0
    try:
        with open(f"/proc/{process}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()  # its name may hold anything
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return -1.0
