"""Which functions take less time than waking a thread.

A thread of the pool runs an asynchronous call, because the call may block. Waking that thread costs
30–40 µs, several times what a small function takes. So the thread that has read the request runs a
function itself if its last runs were quick. An occasional slow run does not matter, since other
processes may have had the processor. A run that must have blocked sends the function back to the
pool for long, unless it ran there anyway: first runs often import and compile. While a function
blocks the reading thread, another one takes over reading (see
`telegrad.rpc.connections.multiplex`), so a wrong guess costs a few hundredths of a second, once.

Measured: a burst of 200 small asynchronous calls takes 0.45 times as long as without this.
"""

from __future__ import annotations

import math

__all__ = ["QuickFunctions"]

_TRUSTED = 3
_MOST_TRUSTED = 8
_PENANCE = -1000  # so many quick runs until a function that has blocked is trusted again
_MOST_NAMES = 4096


class QuickFunctions:
    """A score by name. It needs no lock: an update lost between threads only delays a decision.

    Args:
        limit: a run below so many seconds is quick.
        blocked: a run above so many seconds must have waited for something.
        relapse: how many more quick runs it takes until a function is trusted for a second time.
    """

    def __init__(self, limit: float = 150e-6, blocked: float = 5e-3, relapse: int = 0) -> None:
        self._limit = limit
        self._blocked = blocked
        self._relapse = relapse
        self._scores: dict[bytes, int] = {}

    def is_quick(self, name: bytes) -> bool:
        return self._scores.get(name, 0) >= _TRUSTED

    def ran(self, name: bytes, seconds: float) -> None:
        """Notes how long a run took, with unpacking its arguments and answering; infinite for a
        function that is sure to block."""
        score = self._scores.get(name)
        if score is None:
            if not name or len(self._scores) >= _MOST_NAMES:
                return  # without a name it was sent by value: the next one may differ
            score = 0
        if seconds < self._limit:
            score = min(score + 1, _MOST_TRUSTED)
        elif seconds < self._blocked:
            was_trusted = score >= _TRUSTED
            score = max(score - 2, 0) if score > 0 else score
            if was_trusted and score < _TRUSTED:
                score -= self._relapse
        elif 0 <= score < _TRUSTED and seconds < math.inf:
            score = 0
        else:
            score = _PENANCE
        self._scores[name] = score
