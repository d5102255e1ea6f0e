"""Ids for other workers, sent together a moment later.

The end of a context is no urgent news, and training loops end one with every step. A message for
each would take a peer's time from the next step's call. So they ride along with that call. What
keeps much memory alive is freed before the call runs, or else a worker would have the graph or the
gradients of one step beside the activations of the next; all else once it has been answered, while
its caller goes on. What has found no call within a few milliseconds is sent by itself.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence

from telegrad.errors import TelegradError
from telegrad.rpc.seams import Messenger, Timer
from telegrad.wire.frames import Kind

__all__ = ["Gathered", "ids_in"]


def ids_in(message: bytes) -> Sequence[int]:
    """The ids that were gathered into a message."""
    return array("Q", message)


class Gathered:
    """
    Args:
        messenger: None for a worker without an agent: then nothing is ever sent.
        seconds: how long ids may be kept.
        on_unsent: hears of ids whose worker could not be told, because it is gone.
    """

    def __init__(
        self,
        messenger: Messenger | None,
        kind: Kind,
        seconds: float,
        on_unsent: Callable[[int, Sequence[int]], None],
    ) -> None:
        self._messenger = messenger
        self._kind = kind
        self._seconds = seconds
        self._on_unsent = on_unsent
        self._lock = threading.RLock()  # guards the two below
        self._ids: dict[int, array[int]] = {}
        self._timer: Timer | None = None

    def add(self, worker: int, id_: int) -> None:
        messenger = self._messenger
        if messenger is None:
            return
        with self._lock:
            ids = self._ids.get(worker)
            if ids is None:
                ids = self._ids[worker] = array("Q")
            ids.append(id_)
            if self._timer is None:
                self._timer = messenger.call_later(self._seconds, self._time_is_up)

    def take(self, worker: int) -> bytes | None:
        """What is there for a worker, to be sent by who takes it."""
        if worker not in self._ids:
            return None
        with self._lock:
            ids = self._ids.pop(worker, None)
        return None if ids is None else ids.tobytes()

    def _time_is_up(self) -> None:
        with self._lock:
            if not self._ids:
                self._timer = None
                return
        assert self._messenger is not None  # else nothing was gathered
        self._messenger.run_aside(self.send)

    def send(self) -> None:
        """Sends what is there now."""
        with self._lock:
            gathered, self._ids = self._ids, {}
            self._timer = None
        for worker, ids in gathered.items():
            try:
                assert self._messenger is not None  # else nothing was gathered
                self._messenger.post(worker, self._kind, ids.tobytes())
            except TelegradError:
                self._on_unsent(worker, ids)

    def close(self) -> None:
        """Forgets what was not sent."""
        with self._lock:
            self._ids = {}
            if self._timer is not None:
                self._timer.cancel()
