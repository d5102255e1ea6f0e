"""Notes for later: how the RRef table hears of the death of a handle, and of time.

The death of a handle may be noticed on any thread at any moment, see `telegrad.locks`. So
`RRef.__del__` puts a note into a `queue.SimpleQueue`, and a thread of the table's own reads the
notes. A timer leaves a note, too: the agent's clock thread must not block, and messages sent again
may.

Ctrl-C may strike inside of `__del__`, before it has left its note, and Python drops both. So each
handle is also watched by a weak reference, a `Handle`, whose callback is the queue's `put` itself:
C code, which no signal interrupts. But the collector calls it before the destructors of what it is
about to free, and one of these may still use the reference. A handle that only its weak reference
has told of is therefore given up after a while.

(Rejected: a plain deque drained by the next operation, which may never come; `call_later` from a
destructor, since the collection may have struck inside the clock's own lock.)
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from telegrad.ids import ForkId, RRefId
from telegrad.rpc.references.in_messages import Made, Watch

__all__ = ["Handle", "Housekeeper"]

_log = logging.getLogger(__name__)

_REST = 0.005
_GRACE = 10.0  # seconds for the destructors of one garbage collection


class Handle(weakref.ref[Any]):
    """Stands for one `RRef` object, also after its end.

    Args:
        rref: the object.
        put: takes this when the object is gone.
    """

    __slots__ = ("fork_id", "rref_id")

    rref_id: RRefId
    fork_id: ForkId | None

    def __new__(
        cls, rref: Any, put: Callable[[Any], None], rref_id: RRefId, fork_id: ForkId | None
    ) -> Handle:
        self = super().__new__(cls, rref, put)
        self.rref_id = rref_id
        self.fork_id = fork_id
        return self

    def __init__(self, rref: Any, put: Callable[[Any], None], *ids: object) -> None:
        super().__init__(rref, put)  # type: ignore[call-arg]


Note = tuple[Handle] | Handle | Watch | float | tuple[()] | None
"""A handle that died, one that its weak reference has told of, references whose message was not
sent, a deadline, a step that waits in the table, or the end."""


class Housekeeper:
    """Collects notes from anywhere and has them heeded on one thread.

    Args:
        heed: takes the handles that died, the references that were packed and not sent, and the
            deadlines that have come. Each handle comes once.
    """

    def __init__(
        self, name: str, heed: Callable[[list[Handle], list[Made], list[float]], None]
    ) -> None:
        self._name = name
        self._heed = heed
        self._notes: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self.note: Callable[[Note], None] = self._notes.put
        """Safe on any thread, in destructors, and under any lock."""
        self._handles: set[Handle] = set()  # of those whose death has not been heeded
        self._suspects: list[tuple[float, Handle]] = []
        self.unsent: set[Watch] = set()
        """What watches the references in messages that have not begun to leave."""
        self._thread: threading.Thread | None = None

    def watch(self, rref: Any, rref_id: RRefId, fork_id: ForkId | None) -> Handle:
        """The handle of an object; its destructor is to `note` it."""
        handle = Handle(rref, self._notes.put, rref_id, fork_id)
        self._handles.add(handle)
        return handle

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def take_unsent(self) -> list[Made]:
        """The references in messages that are packed and not sent."""
        taken: list[Made] = []
        while True:
            try:
                taken += self.unsent.pop().made
            except KeyError:
                return taken

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """What is still noted is not heeded any more."""
        thread, self._thread = self._thread, None
        self._notes.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def drain(self) -> None:
        """Heeds what is noted now, on the calling thread, without waiting for more."""
        notes: list[Note] = []
        while True:
            try:
                notes.append(self._notes.get_nowait())
            except queue.Empty:
                break
        self._pass_on(notes)
        if None in notes:
            self._notes.put(None)  # it is meant for the thread

    def _run(self) -> None:
        while True:
            try:
                note = self._notes.get(timeout=_GRACE if self._suspects else None)
            except queue.Empty:
                note = ()
            if note is None:  # by `stop`
                return
            # Nothing here is urgent, and references often die in swarms: one message for all.
            time.sleep(_REST)
            try:
                self._pass_on([note])
                self.drain()
            except Exception:  # noqa: BLE001 the thread must live
                # Without it nothing would ever be dropped.
                _log.exception("%s failed to tidy up", self._name)

    def _pass_on(self, notes: list[Note]) -> None:
        now = time.monotonic()
        deaths = [note[0] for note in notes if isinstance(note, tuple) and note]
        deadlines = [note for note in notes if isinstance(note, float)]
        unsent = [note for note in notes if isinstance(note, Watch) and note in self.unsent]
        self.unsent.difference_update(unsent)
        suspects, self._suspects = self._suspects, []
        suspects += [(now + _GRACE, note) for note in notes if isinstance(note, Handle)]
        deaths += [handle for due, handle in suspects if due <= now]
        deaths = [handle for handle in deaths if self._is_news(handle)]
        self._suspects += [item for item in suspects if item[1] in self._handles]
        if notes or deaths:
            self._heed(deaths, [made for watch in unsent for made in watch.made], deadlines)

    def _is_news(self, handle: Handle) -> bool:
        try:
            self._handles.remove(handle)
        except KeyError:
            return False
        return True
