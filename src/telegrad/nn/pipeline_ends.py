"""What stages of a pipeline send, and the driver's ends, where results and gradients come in."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from telegrad.nn.made import Changes
from telegrad.tensors.table import TableKey

__all__ = [
    "SKIPPED",
    "Address",
    "Arrival",
    "Failure",
    "Inbox",
    "Outcome",
    "arrive_at_driver",
    "gradients_at_driver",
]

StageChanges = tuple[int, Changes]
"""The position of a stage, and what has changed in its module."""


class Address(NamedTuple):
    """Where a run is found: in a caller's table on a worker; without a table, at the driver."""

    worker: int
    table: TableKey | None
    run: int


class Failure(NamedTuple):
    """An error, which waits in a run until it is asked for."""

    where: Address
    number: int
    position: int
    micro_batch: int


class Outcome(NamedTuple):
    """What has become of a micro-batch in the stages from one on.

    Args:
        is_done: it has gone through all of them.
        failure: why not; None if it was skipped after another one had failed.
        later: workers that have something left to do at the end of a backward pass.
    """

    is_done: bool
    failure: Failure | None = None
    later: tuple[int, ...] = ()


DONE = Outcome(is_done=True)
SKIPPED = Outcome(is_done=False)


class Arrival(NamedTuple):
    """What comes to a stage, or to the driver.

    Args:
        has_history: for each leaf of `value`, whether it is a tensor that gets a gradient.
        changes: in the stages so far, with the last micro-batch.
    """

    value: Any
    has_history: Sequence[bool]
    changes: Sequence[StageChanges]


_numbers = itertools.count(1)
_inboxes: weakref.WeakValueDictionary[int, Inbox] = weakref.WeakValueDictionary()


class Inbox:
    """What has come for one run of a pipeline, and has not been taken.

    Attributes:
        number: names it in messages to this process.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._changed = threading.Condition(threading.RLock())  # guards the two below
        self._things: dict[Any, Any] = {}
        self._failure: Any = None
        _inboxes[self.number] = self

    def put(self, key: Any, thing: Any) -> None:
        with self._changed:
            self._things[key] = thing
            self._changed.notify_all()

    def fail(self, failure: Any) -> None:
        """The first one counts."""
        with self._changed:
            if self._failure is None:
                self._failure = failure
            self._changed.notify_all()

    def wait_for(self, key: Any) -> tuple[Any, Any]:
        """What has come under the key, or None, and the first failure, or None. Ends by either: the
        stages push what they make before they answer, and a call that is not answered fails at the
        loss of its worker."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._things or self._failure is not None)
            return self._things.pop(key, None), self._failure

    def take(self, key: Any) -> Any:
        """What has come under the key; None if nothing has."""
        with self._changed:
            return self._things.pop(key, None)


def arrive_at_driver(number: int, position: int, micro_batch: int, result: Arrival) -> Outcome:
    """What the last of some stages has made of a micro-batch."""
    inbox = _inboxes.get(number)
    if inbox is not None:  # else the run was given up
        inbox.put((position, micro_batch), result)
    return DONE


def gradients_at_driver(
    number: int, position: int, micro_batch: int, name: Any, modes: int, gradients: Any
) -> Outcome:
    """What a pass has found for the arguments of the first of some stages."""
    inbox = _inboxes.get(number)
    if inbox is not None:
        inbox.put((position, micro_batch, name), gradients)
    return DONE
