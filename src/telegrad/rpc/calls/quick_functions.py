"""Which functions are done sooner than a thread is woken.

An asynchronous call is run by a thread of the pool, because it may block. Waking that thread costs
30–40 µs, several times what a small function takes. A function that has been quick a few times is
therefore run by the thread that has read the request. A slow run now and then is forgiven, since
the system may have given the processor to others; one that must have blocked sends the function
back to the pool for a long while, unless it was there anyway: first runs often import and compile.
While it blocks, the connection's clock sees it and reading goes on elsewhere (see
`telegrad.rpc.connections.multiplex`): a wrong guess costs a few hundredths of a second, once.
"""

from __future__ import annotations

__all__ = ["QuickFunctions"]

_TRUSTED = 3
_MOST_TRUSTED = 8
_PENANCE = -1000  # this many quick runs until a function that has blocked is trusted again
_MOST_NAMES = 4096


class QuickFunctions:
    """A score by name. An update lost between threads only delays a decision: no lock.

    Args:
        limit: how many seconds are quick.
        blocked: after how many a function must have waited for something.
    """

    def __init__(self, limit: float = 150e-6, blocked: float = 5e-3) -> None:
        self._limit = limit
        self._blocked = blocked
        self._scores: dict[bytes, int] = {}

    def is_quick(self, name: bytes) -> bool:
        return self._scores.get(name, 0) >= _TRUSTED

    def ran(self, name: bytes, seconds: float) -> None:
        """A function took so long, with the unpacking of its arguments and the answer."""
        score = self._scores.get(name)
        if score is None:
            if not name or len(self._scores) >= _MOST_NAMES:
                return  # without a name it came whole: it may be another one next time
            score = 0
        if seconds < self._limit:
            score = min(score + 1, _MOST_TRUSTED)
        elif seconds < self._blocked:
            score = max(score - 2, 0) if score > 0 else score
        elif 0 <= score < _TRUSTED:
            score = 0
        else:
            score = _PENANCE
        self._scores[name] = score
