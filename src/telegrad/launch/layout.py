"""One memory layout for several processes.

The system loads every program that it starts to addresses of its own, which whoever attacks it has
to guess. A processor predicts branches by their addresses: workers that share one push each
other's out, although all of them run the same code. That is the likely reason for what was measured
with three trainers and a server on two processors, in one layout and in four in turn: a step takes
16 % less time at the median of ten runs, of which eight were faster and two up to 15 % slower.

It is for who starts workers to say, since it makes attacks on the memory of all of them easier.

(Rejected: to fork workers from one process. They would share its layout, which nobody knows; but
also the random numbers of libraries, and whatever is read from the environment on import.)
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

__all__ = ["one_layout"]

_WHAT_IT_IS = 0xFFFFFFFF
_NOT_RANDOM = 0x0040000  # ADDR_NO_RANDOMIZE of sys/personality.h


@contextlib.contextmanager
def one_layout() -> Iterator[bool]:
    """Programs that this thread starts in the block have one layout, and so have those that they
    start. Gives whether the system allows that: it does not in many containers."""
    personality = getattr(ctypes.CDLL(None), "personality", None)
    before = -1 if personality is None else personality(_WHAT_IT_IS)
    if personality is None or before == -1 or personality(before | _NOT_RANDOM) == -1:
        yield False
        return
    try:
        yield bool(personality(_WHAT_IT_IS) & _NOT_RANDOM)
    finally:
        personality(before)
