"""References in replies that their callers may not unpack.

A caller that Ctrl-C interrupts does not know how far its request or the reply has come. So it sends
the request's number in UNREAD, and the callee abandons the references in that reply, whether it has
sent it or does so later.
"""

from __future__ import annotations

import collections

from telegrad.wire.codec import References

__all__ = ["SentReferences"]

_REMEMBERED = 256  # replies, and as many numbers of unanswered requests


class SentReferences:
    """The references in replies to one worker. Safe to use from any thread: each step on a dict is
    atomic, and both sides write before they read."""

    def __init__(self) -> None:
        self._sent: dict[int, References] = {}
        self._unread: dict[int, None] = {}
        self._order: collections.deque[int] = collections.deque()

    def answered(self, number: int, references: References) -> None:
        """The reply to a request was sent with these references."""
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
        """The worker is lost, which ends its references; its numbers may begin again."""
        self._sent.clear()
        self._unread.clear()
