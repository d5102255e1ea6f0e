"""Signals, for one who waits.

A signal that comes just before a system call that waits does not end it: Python has noted it, and
looks at its notes when the call returns. It does not end it either if the system has given it to
another thread. So nobody here waits for a signal in any other way than for its number in an inbox,
which is written the moment it comes.
"""

from __future__ import annotations

import select
import signal
import socket
from types import FrameType

__all__ = ["SignalInbox", "only_noted"]


class SignalInbox:
    """The numbers of all signals that have come and have a handler, while the block lasts. For the
    main thread; there is one at a time."""

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
        """The numbers of those that have come since the last time. Their handlers have run."""
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
    """The handler of a signal of which only the inbox is to hear."""
