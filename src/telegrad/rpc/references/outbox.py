"""Control messages that are sent again until they are acknowledged.

A message is known by its kind and its fork, so its acknowledgement finds it and sending it twice
is sending it once. Waits double from `retry_first` to `retry_last`; only an acknowledgement or the
loss of the receiver ends them. The heap is cleaned lazily: an acknowledged message's entry is
dropped when it comes up.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from telegrad.ids import ForkId
from telegrad.rpc.references.events import Message, Send, Timing
from telegrad.wire.frames import Kind

__all__ = ["Outbox"]


@dataclass(slots=True)
class _Unacknowledged:
    send: Send
    wait: float
    due: float


class Outbox:
    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._waiting: dict[tuple[Kind, ForkId], _Unacknowledged] = {}
        self._heap: list[tuple[float, Kind, ForkId]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def send(self, to: int, message: Message, now: float) -> Send:
        send = Send(to=to, message=message)
        key = (message.kind, message.fork)
        wait = self._timing.retry_first
        self._waiting[key] = _Unacknowledged(send, wait, now + wait)
        heapq.heappush(self._heap, (now + wait, *key))
        return send

    def acknowledge(self, kind: Kind, fork: ForkId) -> None:
        self._waiting.pop((kind, fork), None)

    def strike_off(self, worker: int) -> None:
        """Nothing more is sent to this worker."""
        for key in [key for key, item in self._waiting.items() if item.send.to == worker]:
            del self._waiting[key]

    def due(self, now: float) -> list[Send]:
        """The messages to send again, now."""
        sends = []
        while (next_due := self.next_deadline()) is not None and next_due <= now:
            _, kind, fork = heapq.heappop(self._heap)
            item = self._waiting[kind, fork]
            item.wait = min(2 * item.wait, self._timing.retry_last)
            item.due = now + item.wait
            heapq.heappush(self._heap, (item.due, kind, fork))
            sends.append(item.send)
        return sends

    def next_deadline(self) -> float | None:
        while self._heap:
            due, kind, fork = self._heap[0]
            item = self._waiting.get((kind, fork))
            if item is not None and item.due == due:
                return due
            heapq.heappop(self._heap)
        return None
