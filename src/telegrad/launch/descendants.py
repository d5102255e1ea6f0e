"""The processes below this one, whatever they have done to get away.

A process that becomes a *subreaper* is the new parent of every orphan among its descendants, also
of those that have made a process group or a session of their own. So whoever walks the tree below
it finds all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from telegrad.errors import LaunchError

__all__ = ["adopt_orphans", "descendants", "signal_all"]

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process a subreaper.

    Raises:
        LaunchError: the system has none (they are Linux's), or does not allow it. Who cannot adopt
            would never hear of its workers' end: they are orphans from the start.
    """
    set_option = getattr(ctypes.CDLL(None), "prctl", None)
    if set_option is None or set_option(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise LaunchError(
            "this system does not let a process adopt orphans, which the launcher needs to look "
            "after its workers: start them by torchrun"
        )


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
