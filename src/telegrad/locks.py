"""Critical sections that a destructor or a signal handler may interrupt.

Python may run a program's code between any two of our instructions: a `__del__`, when the garbage
collector runs or the last reference to something goes, and a signal handler. That code may use all
of this library, on the very thread that is inside one of its critical sections. If it then waited
for the lock, it would wait for itself. Ctrl-C may end a section at any instruction, too. So these
rules hold where such code can get to:

- A lock that guards state is an `RLock`. A section of it may be entered again half-way, so it
  changes its tables by single steps, each of which leaves them usable.
- Where that is not enough, the inner section asks `is_held_here` and leaves its work in a queue.
  The thread that holds the lock does that work before it goes on. `Turns` is that for a state
  machine, `Multiplex.send` for messages, which must not be written into one another.
- A destructor of ours takes no lock. It puts a note into a `queue.SimpleQueue`, whose `put` is
  reentrant by design.
- What a caller needs at once (an id, a fork, a new record) comes without a lock: from
  `itertools.count`, or by one operation on a dict.
- A lock is taken by `with`, or by `held.extend(map(lock.acquire, ...))` inside the `try` whose
  `finally` releases it. Ctrl-C is raised between two instructions: after a plain call of `acquire`
  it would come before anything knows that the lock is held.
- Under no lock does anything wait for another worker.
- A destructor may run inside a critical section, or on a thread that all others depend on: one
  that reads a connection, writes the rest of a message, or is the clock. `here.must_not_wait` is
  set there. What is sent then is left to others if there is no room, and a wait for an answer is an
  error: see `check_wait`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from telegrad.errors import TelegradError

__all__ = ["Turns", "check_wait", "here", "is_held_here"]


class _Here(threading.local):
    must_not_wait = False


here = _Here()
"""What there is to know of this thread."""


def check_wait(what: str) -> None:
    """
    Raises:
        TelegradError: a destructor has interrupted what has to go on before this can come.
    """
    if here.must_not_wait:
        raise TelegradError(
            f"a destructor cannot wait for {what} here: the garbage collector runs it in the "
            "middle of sending or receiving, which has to go on first. Send without waiting, or "
            "put the work into a queue for a thread of your own"
        )


def is_held_here(lock: Any) -> bool:
    """Whether this thread holds an `RLock`: what asks runs inside the section that it guards."""
    is_owned: bool = lock._is_owned()  # CPython's, as `threading.Condition` uses it
    return is_owned


T = TypeVar("T")

Step = Callable[[], Callable[[], None] | None]
"""Returns what is to be done after it, outside of the critical section."""


class Turns:
    """Runs steps one at a time, in the order in which they came.

    Args:
        what: is guarded, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._steps: deque[Step] = deque()
        self._lock = threading.RLock()  # held while steps run

    def take(self, step: Step) -> None:
        """Runs a step, now or as soon as those before it are done; perhaps on another thread."""
        self._steps.append(step)
        self._go_on()

    def leave(self, step: Step) -> None:
        """Leaves a step to whoever comes next with one of his. Ctrl-C is raised on the main thread
        only: what it must not end half-way is run by another one."""
        self._steps.append(step)

    def exclusively(self, look: Callable[[], T]) -> T:
        """Runs `look` between two steps, after all that were taken before. Ends when the steps do
        that are under way: they wait for nothing.

        Raises:
            TelegradError: this thread is inside of a step.
        """
        if is_held_here(self._lock):
            raise TelegradError(
                f"{self._what} cannot be asked by a destructor or a signal handler that has "
                "interrupted a change of it: do this on another thread"
            )
        after: list[Callable[[], None]] = []
        with self._lock:
            self._run(after)
            outcome = look()
        for callback in after:
            callback()
        self._go_on()
        return outcome

    def _go_on(self) -> None:
        # Asked again after each round: what came while the lock was held was left to its holder.
        while self._steps and not is_held_here(self._lock):
            after: list[Callable[[], None]] = []
            is_held: list[bool] = []
            try:
                # Noted in the step of the interpreter that takes it, for Ctrl-C between two.
                is_held.extend(map(self._lock.acquire, (False,)))
                if not is_held[0]:
                    return
                self._run(after)
            finally:
                if is_held and is_held[0]:
                    self._lock.release()
            for callback in after:
                callback()

    def _run(self, after: list[Callable[[], None]]) -> None:
        could_not_wait, here.must_not_wait = here.must_not_wait, True
        try:
            while True:
                try:
                    step = self._steps.popleft()
                except IndexError:
                    return
                callback = step()
                if callback is not None:
                    after.append(callback)
        finally:
            here.must_not_wait = could_not_wait
