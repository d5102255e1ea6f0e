"""Which workers know an autograd context, and how all of them come to forget it.

A context is alive on every worker that a message of it has reached. Each worker notes its
*contacts*, the workers it exchanged messages of the context with, and notes them before a message
leaves. Leaving a context releases it here and sends the release to the contacts, which do the same,
so the release reaches every worker on which the context lives. A release is repeated until it is
acknowledged or its worker is lost. The death of the worker that made a context releases it too.

A lost worker may have been the only path between two others. So a worker that had the lost one as a
contact tells the maker of the context that it *holds* the context, until the maker is a contact or
has answered with the release.

A message of a context may arrive after the release. A worker therefore remembers the contexts it
released (the last `REMEMBERED`): such a message does not revive the context, and its sender gets
the release, in case it has not yet. The same holds for a contact made by a thread that was in a
call when its context was released.

Pure: events are methods, effects are return values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from telegrad.ids import worker_of

__all__ = ["Acknowledge", "ContextLifetimes", "Effect", "Free", "TellHeld", "TellReleased"]

REMEMBERED = 16_384


@dataclass(slots=True)
class Free:
    """Drop this worker's part of the context."""

    context_id: int


@dataclass(slots=True)
class TellReleased:
    """Send a release to a worker, which acknowledges it."""

    worker: int
    context_id: int


@dataclass(slots=True)
class TellHeld:
    """Tell a worker that the context lives here, so that its release comes here."""

    worker: int
    context_id: int


@dataclass(slots=True)
class Acknowledge:
    """Tell a worker that its release has been carried out."""

    worker: int
    context_id: int


Effect: TypeAlias = Free | TellReleased | TellHeld | Acknowledge


class ContextLifetimes:
    """All contexts that live on one worker."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._contacts: dict[int, set[int]] = {}
        self._released: OrderedDict[int, None] = OrderedDict()
        self._unacknowledged: dict[tuple[int, int], bool] = {}
        """(worker, context) → whether the next `retry` repeats the release."""
        self._cut_off: set[int] = set()
        """Contexts whose makers may not know that they live here."""
        self._lost: set[int] = set()
        """Workers that were ever lost: their messages may still be read afterwards."""

    def is_alive(self, context_id: int) -> bool:
        return context_id in self._contacts

    def is_released(self, context_id: int) -> bool:
        return context_id in self._released

    def contacts(self, context_id: int) -> set[int]:
        return set(self._contacts.get(context_id, ()))

    @property
    def has_unacknowledged(self) -> bool:
        return bool(self._unacknowledged or self._cut_off)

    def began(self, context_id: int) -> None:
        """The context was made here."""
        self._contacts[context_id] = set()

    def met(self, context_id: int, worker: int) -> list[Effect]:
        """A message of the context goes to the worker or has come from it."""
        if context_id in self._released:
            return [] if worker == self._worker else self._tell((worker,), context_id)
        self._contacts.setdefault(context_id, set()).add(worker)
        return self._tell_maker(context_id) if worker in self._lost else []

    def released(self, context_id: int, *, told_by: int | None = None) -> list[Effect]:
        """The context was left here, or another worker sent its release."""
        effects: list[Effect] = []
        contacts = self._contacts.get(context_id)
        if contacts is not None:
            effects.append(Free(context_id))
            contacts -= {self._worker, told_by}
            if contacts:
                effects += self._tell(contacts, context_id)
            self._cut_off.discard(context_id)
            del self._contacts[context_id]  # last: Ctrl-C may come before
        self._released[context_id] = None
        while len(self._released) > REMEMBERED:
            self._released.popitem(last=False)
        if told_by is not None:
            effects.append(Acknowledge(told_by, context_id))
        return effects

    def acknowledged(self, context_id: int, worker: int) -> None:
        self._unacknowledged.pop((worker, context_id), None)

    def lost(self, worker: int) -> list[Effect]:
        """The worker is gone, with the contexts it made; it needs no release."""
        self._lost.add(worker)
        for key in [key for key in self._unacknowledged if key[0] == worker]:
            del self._unacknowledged[key]
        effects: list[Effect] = []
        for context_id in [id_ for id_ in self._contacts if worker_of(id_) == worker]:
            self._contacts[context_id].discard(worker)
            effects += self.released(context_id)
        for context_id in [id_ for id_, contacts in self._contacts.items() if worker in contacts]:
            effects += self._tell_maker(context_id)
        return effects

    def held(self, context_id: int, worker: int) -> list[Effect]:
        """The context lives on another worker."""
        is_mine = worker_of(context_id) == self._worker
        if context_id in self._contacts:
            self._contacts[context_id].add(worker)
            self._cut_off.discard(context_id)
            return [TellHeld(worker, context_id)] if is_mine else []
        return self._tell((worker,), context_id) if is_mine else []

    def retry(self) -> list[Effect]:
        """Repeats what was sent before the last `retry` and is not acknowledged."""
        due = [key for key, is_due in self._unacknowledged.items() if is_due]
        self._unacknowledged = dict.fromkeys(self._unacknowledged, True)
        effects: list[Effect] = [TellReleased(worker, context_id) for worker, context_id in due]
        return effects + [TellHeld(worker_of(id_), id_) for id_ in self._cut_off]

    def _tell_maker(self, context_id: int) -> list[Effect]:
        maker = worker_of(context_id)
        if maker == self._worker or maker in self._contacts[context_id]:
            return []
        self._cut_off.add(context_id)
        return [TellHeld(maker, context_id)]

    def _tell(self, workers: Iterable[int], context_id: int) -> list[Effect]:
        effects: list[Effect] = []
        for worker in sorted(workers):
            self._unacknowledged.setdefault((worker, context_id), False)
            effects.append(TellReleased(worker, context_id))
        return effects
