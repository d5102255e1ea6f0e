"""Whether another worker is alive: a state machine without sockets, threads or clocks.

::

    state     Connected   Heard              TimePassed                  Ended
    APART     PRESENT     -                  -                           LOST, DeclareLost
    PRESENT   PRESENT     PRESENT            SendPing when one is due;   LOST, DeclareLost
                                             LOST, DeclareLost when it
                                             has been silent too long
    LOST      PRESENT     -                  -                           -

The rules it lives by:

- A loss is declared once, however many connections tell of it, and again only after a return.
- A peer counts as silent only while this process was able to read from it. If this process was
  stopped, or its interpreter was held, what the peer sent meanwhile is still unread; such a gap
  does not count.
- A worker that was never connected to is not watched: nothing depends on it yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

__all__ = [
    "Connected",
    "DeclareLost",
    "Effect",
    "Ended",
    "Event",
    "Heard",
    "Liveness",
    "SendPing",
    "State",
    "TimePassed",
]


class State(Enum):
    APART = auto()
    PRESENT = auto()
    LOST = auto()


@dataclass(frozen=True)
class Connected:
    """A connection was made, in either direction."""


@dataclass(frozen=True)
class Heard:
    """The worker sent something."""


@dataclass(frozen=True)
class TimePassed:
    """The clock ticked."""


@dataclass(frozen=True)
class Ended:
    """A connection broke, the worker said goodbye, or another one took its place."""

    reason: str
    is_break: bool = False
    """Its connection broke. After a silence that proves no more than the silence itself: the
    network gives up a connection at about the time when the heartbeat does."""


@dataclass(frozen=True)
class SendPing:
    """Ask the worker for a sign of life."""


@dataclass(frozen=True)
class DeclareLost:
    """End every wait for the worker, and tell the watchers."""

    reason: str
    by_silence: bool = False
    """Only its silence says so: the worker may still be alive."""


Event = Connected | Heard | TimePassed | Ended
Effect = SendPing | DeclareLost


class Liveness:
    """
    Args:
        interval: seconds between pings.
        timeout: seconds of silence that mean a loss.
        now: the current time; each event comes with its own.
    """

    def __init__(self, interval: float, timeout: float, now: float) -> None:
        self._interval = interval
        self._timeout = timeout
        self.state = State.APART
        self._reason = ""
        self._heard_at = self._looked_at = self._pinged_at = now

    @property
    def reason(self) -> str:
        """Why it is lost; empty if it is not."""
        return self._reason

    def is_quiet(self, now: float) -> bool:
        """Whether the silence has lasted for half of the time that means a loss."""
        return self.state is State.PRESENT and now - self._heard_at > self._timeout / 2

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Ended):
            if self.state is State.LOST:
                return []
            silence = min(now, self._looked_at + self._interval) - self._heard_at
            if event.is_break and self.state is State.PRESENT and silence > self._timeout / 2:
                reason = f"{event.reason}, after {silence:.1f} seconds without a sign of life"
                return self._lose(reason, by_silence=True)
            return self._lose(event.reason)
        if isinstance(event, Connected):
            self.state = State.PRESENT
            self._reason = ""
            self._heard_at = self._looked_at = now
            return []
        if self.state is not State.PRESENT:
            return []
        if isinstance(event, Heard):
            self._heard_at = max(self._heard_at, now)
            return []
        return self._look(now)

    def _look(self, now: float) -> list[Effect]:
        gap = now - self._looked_at
        self._looked_at = now
        if gap > self._interval:
            self._heard_at = min(now, self._heard_at + gap)
        silence = now - self._heard_at
        if silence > self._timeout:
            reason = f"no sign of life for {silence:.1f} seconds"
            return self._lose(reason, by_silence=True)
        if now - self._pinged_at < self._interval:
            return []
        self._pinged_at = now
        return [SendPing()]

    def _lose(self, reason: str, *, by_silence: bool = False) -> list[Effect]:
        self.state = State.LOST
        self._reason = reason
        return [DeclareLost(reason, by_silence)]
