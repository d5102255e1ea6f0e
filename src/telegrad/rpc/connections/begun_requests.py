"""Which requests of another worker have begun here, so that none begins twice.

A worker whose lane breaks before the answer has come does not know how far its request got. It
sends it again on another lane, marked and with the same number. A lane carries one request at a
time: if the request has begun, it is the last that its lane has begun. So one number a lane is all
there is to remember.

The first copy may still lie unread in the socket of the broken lane while the second one is looked
at. Both then claim the number, in one step of the interpreter, and the first to do so runs.
"""

from __future__ import annotations

import collections
import threading

from telegrad.wire.frames import Flags, Frame

__all__ = ["BegunRequests"]

_REMEMBERED = 1024  # lanes that have ended
_TELLING_SECONDS = 5.0


class BegunRequests:
    """Those of one worker. Threads may use it freely.

    Attributes:
        last: by lane, the number of the request that it has begun last.
        resent: numbers of which a second copy has come.
        loss_told: set when all have heard of the worker's latest loss; None if it has none. What
            the worker does after its return must not be taken for what it did before: its requests
            wait until then, and so do new connections to it.
    """

    def __init__(self) -> None:
        self.last: dict[object, int] = {}
        self.resent: set[int] = set()
        self.loss_told: threading.Event | None = None
        self._ended: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        self._claims: dict[int, object] = {}  # by number, the lane whose copy runs

    def may_begin(self, lane: object, frame: Frame) -> bool:
        """Whether a request is to be run that has come on a lane. `last` has it by now, and it is
        a second copy, or one of its number has come."""
        number = frame.call_id
        if not frame.flags & Flags.RESENT:
            return self._claims.setdefault(number, lane) is lane
        frame.flags &= ~Flags.RESENT
        self.resent.add(number)  # before the look at the others: those look here after `last`
        begun_on: object = None if number in self._ended else lane
        for other, last in list(self.last.items()):
            if last == number and other is not lane:
                begun_on = other  # or about to: then it finds that it has the claim
        return self._claims.setdefault(number, begun_on) is lane

    def wait_until_told(self) -> None:
        """Ends when all have heard of the latest loss. They wait for no worker, so that is soon; at
        the latest after some seconds, should one of them be stuck."""
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
