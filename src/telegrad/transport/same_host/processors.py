"""Waiting on another processor than the one that a busy worker serves from.

For the system's load balancer, a thread that spins counts as running. With three trainers and a
server on two processors it puts two of them on each, no matter which of them have work. While a
trainer has the server's processor, the two others wait, and spin, on the other one. If the server
has one to itself and the trainers take turns on the other, both are in use nearly all the time.
Measured, with and without this in turn: a step takes 0.8 times as long (0.72 to 0.98 in two
series).

So a worker that serves many callers on one thread (`lane_server`) tells on which processor that
thread runs, and a caller that spins on the same one moves off. It stays free to run anywhere; the
system moves it back sooner or later.
"""

from __future__ import annotations

import ctypes
import os
import time

__all__ = ["UNKNOWN", "here", "leave"]

UNKNOWN = -1

_PAUSE = 0.01  # seconds between two moves: one takes up to 0.1 ms, and may not be of use
_last_move = 0.0  # of any thread of this process; an update lost between threads is no matter

# `os` does not have it. Called with the interpreter lock held, it takes 0.1 µs.
here = getattr(ctypes.PyDLL(None), "sched_getcpu", lambda: UNKNOWN)
"""The number of the processor that this thread runs on, or `UNKNOWN`."""


def leave(processor: int) -> bool:
    """Moves this thread off a processor, if it may run on others and none has moved just before.
    Where it may run stays as it is."""
    global _last_move
    now = time.monotonic()
    if now - _last_move < _PAUSE or not hasattr(os, "sched_setaffinity"):
        return False
    _last_move = now
    allowed = os.sched_getaffinity(0)
    others = allowed - {processor}
    if not others:
        return False
    try:
        try:
            os.sched_setaffinity(0, others)  # returns when it runs there
        finally:  # also after a Ctrl-C in between
            os.sched_setaffinity(0, allowed)
    except OSError:
        return False  # the system has taken processors away meanwhile
    return True
