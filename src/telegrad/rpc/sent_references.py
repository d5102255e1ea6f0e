"""References in replies, as long as it is not sure that their caller unpacks them.

A caller that Ctrl-C interrupts cannot tell how far its request or the reply to it has come. So it
names the request's number, by UNREAD, and the worker that has answered it, or is about to, ends the
references in that reply.
"""

from __future__ import annotations

import collections

from telegrad.wire.codec import References

__all__ = ["SentReferences"]

_REMEMBERED = 256  # replies, and as many numbers of requests that have not been answered


class SentReferences:
    """Those of one worker's requests. Threads may use it freely: each step on a table is atomic,
    and both sides write down first and look then."""

    def __init__(self) -> None:
        self._sent: dict[int, References] = {}
        self._unread: dict[int, None] = {}
        self._order: collections.deque[int] = collections.deque()

    def answered(self, number: int, references: References) -> None:
        """The reply to a request was sent, with references in it."""
        self._sent[number] = references
        self._remember(number)
        if number in self._unread:
            self._abandon(number)

    def unread(self, number: int) -> None:
        """The caller has not unpacked the reply to this request, and will not."""
        self._unread[number] = None
        self._remember(number)
        self._abandon(number)

    def _abandon(self, number: int) -> None:
        references = self._sent.pop(number, None)
        if references is not None:
            self._unread.pop(number, None)
            references.abandon()

    def _remember(self, number: int) -> None:
        self._order.append(number)
        if len(self._order) > _REMEMBERED:
            oldest = self._order.popleft()
            self._sent.pop(oldest, None)
            self._unread.pop(oldest, None)

    def clear(self) -> None:
        """The worker is lost: its references have ended by that, and it may count anew."""
        self._sent.clear()
        self._unread.clear()
