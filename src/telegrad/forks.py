"""What a process does not share with processes that fork from it.

A forked process inherits its parent's sockets and shared memory. Its messages would seem to be its
parent's, each would receive answers to the other, and while it held the sockets the death of its
parent would go unnoticed. So objects that hold such things are registered here, and release them in
the child before anything else runs there.

That takes no lock, because a thread that held one at the fork does not exist in the child.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol, TypeVar

__all__ = ["leave_at_fork", "renewed"]

LockT = TypeVar("LockT")


class Inherited(Protocol):
    def leave_to_parent(self) -> None:
        """Called in the child: releases everything without an effect on the parent, and without
        taking a lock."""


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()


def leave_at_fork(thing: Inherited) -> None:
    """Makes processes that fork later leave `thing` to their parent."""
    _inherited.add(thing)


def renewed(lock: LockT) -> LockT:
    """Makes a lock that lives as long as the program free in a forked process."""
    reinit: Any = lock
    os.register_at_fork(after_in_child=reinit._at_fork_reinit)  # as the standard library does
    return lock


def _leave_all() -> None:
    for thing in list(_inherited):
        thing.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all)
