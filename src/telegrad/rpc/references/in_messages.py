"""The references in a message that is packed and not sent yet.

Ctrl-C may end a call at any instruction between the two. No handler of exceptions stands at all of
these, but whatever ends the call lets go of the message. So a weak reference watches its list of
references. Its callback is the `put` of the housekeeper's queue, which is C code that no signal
interrupts, and the housekeeper abandons them. From the step that begins to send the message, its
sender answers for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from telegrad.ids import ForkId, RRefId

__all__ = ["Made", "PackedReferences", "Watch"]

Made = tuple[RRefId, ForkId]
"""A reference that was packed, by its value and its own id."""


class Watch(weakref.ref[Any]):
    """Tells that the references in a message are gone, and which these were."""

    __slots__ = ("made",)

    made: list[Made]


class PackedReferences:
    """
    Args:
        abandon: ends references that will not be unpacked.
        unsent: holds what watches this, until the message begins to leave.
        put: takes the watch if this goes before that.
    """

    __slots__ = ("__weakref__", "_abandon", "_unsent", "_watch", "made")

    def __init__(
        self,
        abandon: Callable[[Iterable[Made]], None],
        unsent: set[Watch],
        put: Callable[[Any], None],
    ) -> None:
        self.made: list[Made] = []
        self._abandon = abandon
        self._unsent = unsent
        self._watch: Watch | None = Watch(self, put)
        self._watch.made = self.made
        unsent.add(self._watch)

    def leave(self) -> None:
        """The message is about to be sent; from now on its sender calls `abandon` if it fails."""
        watch = self._watch
        if watch is not None:
            self._unsent.discard(watch)
            self._watch = None  # which calls nothing any more

    def abandon(self) -> None:
        """The message will not be unpacked."""
        self._abandon(self.made)
        self.leave()
