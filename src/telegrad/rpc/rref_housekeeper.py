"""Notes for later: how the RRef table hears of the death of a handle, and of time.

The death of a handle may be noticed on any thread at any moment, also by a garbage collection that
an allocation under the table's own lock sets off. So `RRef.__del__` takes no lock and makes no
call that might: it puts a note into a `queue.SimpleQueue`, whose `put` is made for that (it is
reentrant, the standard library says so), and a thread of the table's own reads the notes. A timer
leaves a note, too: the agent's clock thread must not block, and messages sent again may.

(Rejected: a plain deque drained by the next operation, which may never come; `call_later` from a
destructor, since the collection may have struck inside the clock's own lock.)
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from telegrad.ids import ForkId, RRefId

__all__ = ["Housekeeper"]

_log = logging.getLogger(__name__)

_REST = 0.005

Death = tuple[RRefId, ForkId | None]


class Housekeeper:
    """Collects notes from anywhere and has them heeded on one thread.

    Args:
        heed: takes the handles that died and the deadlines that have come.
    """

    def __init__(self, name: str, heed: Callable[[list[Death], list[float]], None]) -> None:
        self._name = name
        self._heed = heed
        self._notes: queue.SimpleQueue[Death | float | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """What is still noted is not heeded any more."""
        thread, self._thread = self._thread, None
        self._notes.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def note(self, note: Death | float) -> None:
        """Safe on any thread, in destructors, and under any lock."""
        self._notes.put(note)

    def drain(self) -> None:
        """Heeds what is noted now, on the calling thread, without waiting for more."""
        notes: list[Death | float | None] = []
        while True:
            try:
                notes.append(self._notes.get_nowait())
            except queue.Empty:
                break
        self._pass_on(notes)
        if None in notes:
            self._notes.put(None)  # it is meant for the thread

    def _run(self) -> None:
        while (note := self._notes.get()) is not None:  # `stop` ends the wait
            # Nothing here is urgent, and references often die in swarms: one message for all.
            time.sleep(_REST)
            try:
                self._pass_on([note])
                self.drain()
            except Exception:  # noqa: BLE001 the thread must live
                # Without it nothing would ever be dropped.
                _log.exception("%s failed to tidy up", self._name)

    def _pass_on(self, notes: list[Death | float | None]) -> None:
        deaths = [note for note in notes if isinstance(note, tuple)]
        deadlines = [note for note in notes if isinstance(note, float)]
        if deaths or deadlines:
            self._heed(deaths, deadlines)
