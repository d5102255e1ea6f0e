"""Notes of what has died here, for the workers that keep the other end of it.

Destructors leave them, so nothing here takes a lock: what they use is changed in one step. Python
drops a Ctrl-C that comes in a destructor, and with it what the destructor had to do. So whether a
note lives is asked of the note itself.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Iterable

__all__ = ["Note", "Notes"]

_MOST = 0xFFFF  # that one message takes along


class Note:
    """Puts a call's id into a queue when it dies. What the other end has to outlive keeps it.

    Attributes:
        has_exports: the other end brings gradients of the call's residents.
    """

    __slots__ = ("__weakref__", "_call", "_queue", "has_exports")

    def __init__(self, call: int, waiting: queue.SimpleQueue[int]) -> None:
        self._call = call
        self._queue = waiting
        self.has_exports = False

    def __del__(self) -> None:
        self._queue.put(self._call)


class Notes:
    """Of one kind, by the worker that is to hear. There is one note for a call at most."""

    def __init__(self) -> None:
        self._waiting: dict[int, queue.SimpleQueue[int]] = {}
        self._made: dict[int, weakref.ref[Note]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def has_any(self) -> bool:
        """Whether there is something to tell, or will be. Forgets the notes that have died."""
        for call, note in list(self._made.items()):
            if note() is None:
                self._made.pop(call, None)
        if self._made:
            return True
        return any(waiting.qsize() for waiting in list(self._waiting.values()))

    def is_living(self, call: int) -> bool:
        """Whether a note of that call has not died."""
        note = self._made.get(call)
        return note is not None and note() is not None

    def with_exports(self, calls: Iterable[int]) -> list[Note]:
        """The notes of these calls that live and have exports."""
        notes = [made() for call in calls if (made := self._made.get(call)) is not None]
        return [note for note in notes if note is not None and note.has_exports]

    def note(self, call: int, worker: int) -> Note:
        """To be kept until the other end is no longer needed."""
        note = Note(call, self._of(worker))
        self._made[call] = weakref.ref(note)
        return note

    def leave(self, call: int, worker: int) -> None:
        """What a note's death does."""
        self._of(worker).put(call)

    def _of(self, worker: int) -> queue.SimpleQueue[int]:
        found = self._waiting.get(worker)
        return self._waiting.setdefault(worker, queue.SimpleQueue()) if found is None else found

    def take(self, worker: int, *, at_least: int = 1) -> list[int]:
        """Those for a worker; none if there are fewer than `at_least`."""
        notes: list[int] = []
        waiting = self._waiting.get(worker)
        if waiting is None or waiting.qsize() < at_least:
            return notes
        try:
            while len(notes) < _MOST:
                notes.append(waiting.get_nowait())
        except queue.Empty:
            pass
        return notes

    def workers(self) -> list[int]:
        return list(self._waiting)

    def forget(self, worker: int) -> None:
        """The worker is lost: there is nobody to tell."""
        self._waiting.pop(worker, None)
