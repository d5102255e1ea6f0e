"""Calls of a worker to itself that have not been answered yet.

No connection could end under them, so nobody would hear of a worker that closes before a thread has
run them. Whoever takes one out of the table settles it: the answer, the deadline, or the end of the
worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from telegrad.rpc.calls.async_call import AsyncCall

__all__ = ["OwnCalls"]


class OwnCalls:
    """Threads may use it freely."""

    def __init__(self) -> None:
        self._calls: dict[int, AsyncCall] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call_id: int, call: AsyncCall) -> bool:
        """False if it is too late for that."""
        self._calls[call_id] = call
        return not self._is_closed or self.take(call_id) is None  # or else `close` has taken it

    def take(self, call_id: int) -> AsyncCall | None:
        """None if somebody else settles it."""
        return self._calls.pop(call_id, None)

    def close(self) -> list[AsyncCall]:
        """Those that are open, for the caller to settle; no more are added."""
        self._is_closed = True
        return [call for call_id in list(self._calls) if (call := self.take(call_id)) is not None]
