"""Critical sections that a destructor or a signal handler may interrupt.

Python may run a program's code between any two instructions: a `__del__`, when the garbage
collector runs or the last reference to an object goes, and a signal handler. That code may use all
of this library, on a thread that is inside one of the library's critical sections. If it waited for
the lock, the thread would wait for itself. Ctrl-C, too, may end a section at any instruction. So
these rules hold wherever such code can run:

- A lock that guards state is an `RLock`. Its section may be entered again half-way, so it changes
  its tables by single steps, each of which leaves them usable.
- If that is not enough, the inner section checks `is_held_here` and leaves its work in a queue. The
  thread that holds the lock does that work before it goes on. `Turns` does this for a state
  machine, `Multiplex.send` for messages, which must not be written into one another.
- A destructor of the library takes no lock. It puts a note into a `queue.SimpleQueue`, whose `put`
  is reentrant by design.
- What a caller needs at once (an id, a fork, a new record) is made without a lock: by
  `itertools.count`, or by one operation on a dict.
- A lock is taken by `with`, or by `held.extend(map(lock.acquire, ...))` inside the `try` whose
  `finally` releases it. After a plain call of `acquire`, Ctrl-C could come before the program has
  recorded that it holds the lock.
- No thread waits for another worker while it holds a lock.
- A destructor may run inside a critical section, or on a thread that all others depend on: one that
  reads a connection, writes the rest of a message, or is the clock. `here.must_not_wait` is set
  there. If there is no room for a message then, another thread sends it, and a wait for an answer
  is an error: see `check_wait`.
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
    """Whether this thread holds an `RLock`, and so runs inside the section that it guards."""
    is_owned: bool = lock._is_owned()  # CPython's, as `threading.Condition` uses it
    return is_owned


T = TypeVar("T")

Step = Callable[[], Callable[[], None] | None]
"""Returns what to do afterwards, outside the critical section."""


class Turns:
    """Runs steps one at a time, in the order in which they were given.

    Args:
        what: the name of what it guards, for error messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._steps: deque[Step] = deque()
        self._lock = threading.RLock()  # held while steps run

    def take(self, step: Step) -> None:
        """Runs a step, now or after those before it; perhaps on another thread."""
        self._steps.append(step)
        self._go_on()

    def leave(self, step: Step) -> None:
        """Leaves a step to the next thread that takes one. For steps that Ctrl-C, which is raised
        on the main thread, must not end half-way."""
        self._steps.append(step)

    def exclusively(self, look: Callable[[], T]) -> T:
        """Runs `look` between two steps, after all earlier ones. It waits for the steps in
        progress, which wait for nothing.

        Raises:
            TelegradError: this thread is inside a step.
        """
        if is_held_here(self._lock):
            raise TelegradError(
                f"{self._what} cannot be used by a destructor or a signal handler that has "
                "interrupted a change of it: use another thread"
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
        # Checked again after each round: steps that came meanwhile were left to the lock's holder.
        while self._steps and not is_held_here(self._lock):
            after: list[Callable[[], None]] = []
            is_held: list[bool] = []
            try:
                # One step of the interpreter takes the lock and records it: see the rules above.
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
