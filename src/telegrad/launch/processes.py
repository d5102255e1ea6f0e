"""Waiting for signals, and the processes below this one.

Python notes a signal that comes just before a waiting system call, but the call does not end; nor
does it if the system gives the signal to another thread. So the launcher waits for a signal's
number in an inbox, which is written the moment the signal comes.

A process that becomes a *subreaper* is the new parent of every orphan among its descendants, even
of those that have made a process group or a session of their own. So the process tree below it
contains all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
from types import FrameType

from telegrad.errors import LaunchError

__all__ = ["SignalInbox", "adopt_orphans", "descendants", "only_noted", "signal_all"]

_PR_SET_CHILD_SUBREAPER = 36


class SignalInbox:
    """Receives the numbers of all signals that have a handler, while the block lasts. For the main
    thread; one at a time."""

    def __enter__(self) -> SignalInbox:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(-1)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        return self._reader.fileno()

    def read(self) -> bytes:
        """The numbers of the signals since the last call. Their handlers have run."""
        try:
            return self._reader.recv(1 << 12)
        except BlockingIOError:
            return b""

    def wait(self) -> None:
        """Ends when there is something to read."""
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        poller.poll()


def only_noted(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing: the signal is only put into the inbox."""


def adopt_orphans() -> None:
    """Makes this process a subreaper.

    Raises:
        LaunchError: the system has no subreapers (they are Linux's), or does not allow it. The
            workers are orphans from the start, so without this their ends would go unnoticed.
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
                    # pid (command) state parent ...; a command may contain brackets
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
