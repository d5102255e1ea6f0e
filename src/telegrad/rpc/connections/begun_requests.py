"""Which requests of another worker have begun here, so that none runs twice.

If a lane breaks before the answer has come, the sender does not know whether its request has begun.
It sends a copy on another lane, marked and with the same number. A lane carries one request at a
time, so a request that has begun is the last one of its lane, and one number per lane is enough.

The first copy may still be unread in the socket of the broken lane when the second one arrives.
Each copy then claims the number, in one atomic step, and the first one to do so runs.
"""

from __future__ import annotations

import collections
import threading

from telegrad.wire.frames import Flags, Frame

__all__ = ["BegunRequests"]

_REMEMBERED = 1024  # lanes that have ended
_TELLING_SECONDS = 5.0


class BegunRequests:
    """The requests of one worker. Thread-safe.

    Attributes:
        last: lane → the number of the last request that began on it.
        resent: numbers whose second copy has come.
        loss_told: set when all watchers have handled the worker's latest loss; None if there was
            none. Requests that the worker makes after its return, and new connections to it, wait
            for this, so that they are not mixed up with earlier ones.
    """

    def __init__(self) -> None:
        self.last: dict[object, int] = {}
        self.resent: set[int] = set()
        self.loss_told: threading.Event | None = None
        self._ended: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        self._claims: dict[int, object] = {}  # by number, the lane whose copy runs

    def may_begin(self, lane: object, frame: Frame) -> bool:
        """Whether to run a request of which another copy exists. `last` must hold it already."""
        number = frame.call_id
        if not frame.flags & Flags.RESENT:
            return self._claims.setdefault(number, lane) is lane
        frame.flags &= ~Flags.RESENT
        self.resent.add(number)  # before `last` is read: the others write `last` and then read this
        begun_on: object = None if number in self._ended else lane
        for other, last in list(self.last.items()):
            if last == number and other is not lane:
                begun_on = other  # or is about to begin, and will find that it has the claim
        return self._claims.setdefault(number, begun_on) is lane

    def wait_until_told(self) -> None:
        """Ends when all watchers have handled the latest loss. They wait for no worker, so that is
        soon; if one is stuck, after a few seconds."""
        told = self.loss_told
        if told is not None:
            told.wait(_TELLING_SECONDS)
            if self.loss_told is told:
                self.loss_told = None

    def ended(self, lane: object) -> None:
        """A lane has ended."""
        number = self.last.pop(lane, None)
        if number is not None:
            self._ended.append(number)
