"""What a process does not share with the processes that fork from it.

A forked process has its parent's sockets, mailboxes and shared memory. What it sent would be taken
for its parent's, each of the two would get answers to the other, and as long as it held the sockets
nobody would see its parent die. So whatever holds such a thing says so here, and lets go of it in
the child, before anything else runs there.

No lock is taken for it: a thread that holds one at the fork is not there to release it.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol, TypeVar

__all__ = ["leave_at_fork", "renewed"]

LockT = TypeVar("LockT")


class Inherited(Protocol):
    def leave_to_parent(self) -> None:
        """In the child: lets go, so that the parent notices nothing. Takes no lock."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def leave_at_fork(thing: Inherited) -> None:
    """A process that is forked from now on leaves this to its parent."""
    _inherited.add(thing)


def renewed(lock: LockT) -> LockT:
    """A lock that lives as long as the program, and is free in a forked process."""
    reinit: Any = lock
    os.register_at_fork(after_in_child=reinit._at_fork_reinit)  # as the standard library does
    return lock


def _leave_all() -> None:
    for thing in list(_inherited):
        thing.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all)
