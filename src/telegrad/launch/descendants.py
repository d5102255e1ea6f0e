"""The processes below this one, whatever they have done to get away.

A process that becomes a *subreaper* is the new parent of every orphan among its descendants, also
of those that have made a process group or a session of their own. So whoever walks the tree below
it finds all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

__all__ = ["adopt_orphans", "descendants", "signal_all"]

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process a subreaper. Where the system has none (it is Linux's), orphans stay
    unknown."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """All living processes below this one, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # pid (command) state parent ...; a command may hold anything, also brackets
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue  # it has ended meanwhile
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    ahead = [os.getpid()]
    while ahead:
        below = children.get(ahead.pop(0), [])
        found += below
        ahead += below
    return found


def signal_all(number: int) -> None:
    """Sends a signal to all processes below this one."""
    for process in descendants():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(process, number)
