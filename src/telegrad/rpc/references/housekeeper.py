"""The thread of the RRef table that handles the deaths of handles, and timers.

A destructor may run on any thread at any moment; see `telegrad.locks`. So `RRef.__del__` puts a
note into a `queue.SimpleQueue`, and this thread reads the notes. Timers put notes, too, since
repeated messages may block and the agent's clock thread must not.

Ctrl-C may interrupt `__del__` before it puts its note. So each handle also has a weak reference, a
`Handle`, whose callback is the queue's `put` itself: C code, which no signal interrupts. But the
garbage collector calls it before the destructors of the objects that it frees, and one of these may
still use the reference. So a handle known dead only by its weak reference is dropped after a delay.

(Rejected: a plain deque drained by the next operation, which may never come; `call_later` from a
destructor, since the collection may come while the clock's own lock is held.)
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
    """Identifies one `RRef` object, even after its death.

    Args:
        rref: the object.
        put: is called with this handle when the object dies.
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
"""In this order: a dead handle; one whose weak reference has died; references whose message was not
sent; a deadline; a step that waits in the table; the end."""


class Housekeeper:
    """Collects notes from any thread, and handles them on its own.

    Args:
        heed: handles dead handles, references that were packed and not sent, and past deadlines.
            Gets each handle once.
    """

    def __init__(
        self, name: str, heed: Callable[[list[Handle], list[Made], list[float]], None]
    ) -> None:
        self._name = name
        self._heed = heed
        self._notes: queue.SimpleQueue[Note] = queue.SimpleQueue()
        self.note: Callable[[Note], None] = self._notes.put
        """Safe on any thread, in destructors, and under any lock."""
        self._handles: set[Handle] = set()  # whose deaths were not handled yet
        self._suspects: list[tuple[float, Handle]] = []
        self.unsent: set[Watch] = set()
        """Watches the references in messages whose sending has not started."""
        self._thread: threading.Thread | None = None

    def watch(self, rref: Any, rref_id: RRefId, fork_id: ForkId | None) -> Handle:
        """Makes the handle of an object, whose destructor must `note` it."""
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
        """Ends the thread; drops the remaining notes."""
        thread, self._thread = self._thread, None
        self._notes.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def drain(self) -> None:
        """Handles the present notes on the calling thread."""
        notes: list[Note] = []
        while True:
            try:
                notes.append(self._notes.get_nowait())
            except queue.Empty:
                break
        self._pass_on(notes)
        if None in notes:
            self._notes.put(None)  # for the thread

    def _run(self) -> None:
        while True:
            try:
                note = self._notes.get(timeout=_GRACE if self._suspects else None)
            except queue.Empty:
                note = ()
            if note is None:  # by `stop`
                return
            # Nothing is urgent, and many references often die at once: send one message for all.
            time.sleep(_REST)
            try:
                self._pass_on([note])
                self.drain()
            except Exception:  # noqa: BLE001 the thread must live
                # Without it, no value would ever be dropped.
                _log.exception("%s could not handle the end of references", self._name)

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
