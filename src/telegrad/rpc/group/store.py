"""torch's stores: requests that end, and the part of a store that a group uses.

torch's TCP store waits for answers without a limit. Even after the timeout for a key it withdraws
the request, and waits for the confirmation of that: a quarter of an hour if its host has vanished,
and forever if the process that hosts it is stopped. So `PatientStore` makes each request on a
thread of its own, which is abandoned if the request does not end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

__all__ = ["Part", "PatientStore"]

_T = TypeVar("_T")

_GRACE = 2.0  # seconds beyond the store's own timeout, for it to report that

_starts: dict[str, int] = {}  # the number of this process's next start, by meeting place
_open_groups: dict[str, int] = {}  # that of its last start there, if the group was open


class PatientStore:
    """A store whose requests all end. They raise `DistNetworkError` if it does not answer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._has_vanished = False

    @property
    def timeout(self) -> float:
        """Seconds that the store waits for a key."""
        timeout: timedelta = self._store.timeout  # type: ignore[attr-defined]
        return timeout.total_seconds()

    def get(self, key: str) -> bytes:
        return self._ask(lambda: bytes(self._store.get(key)))

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: self._store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._ask(lambda: bytes(self._store.compare_set(key, expected, desired)))

    def wait(self, keys: list[str], seconds: float) -> bool:
        """Waits until all keys exist; False if that takes longer."""

        def wait() -> bool:
            try:
                self._store.wait(keys, timedelta(seconds=seconds))
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # only some stores raise a more precise type
                return self._store.check(keys)
            return True

        return self._ask(wait)

    def _ask(self, question: Callable[[], _T]) -> _T:
        seconds = self.timeout + _GRACE
        answers: list[_T] = []
        errors: list[Exception] = []

        def ask() -> None:
            try:
                answers.append(question())
            except Exception as error:  # noqa: BLE001 - raised on the asking thread
                errors.append(error)

        if not self._has_vanished:
            thread = threading.Thread(target=ask, name="telegrad-store", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                ask()  # no thread can be started: wait here, without a limit
            else:
                thread.join(seconds)
        if errors:
            raise errors.pop()
        if not answers:
            self._has_vanished = True  # its last request still occupies it
            raise _not_answered(seconds)
        return answers.pop()


def _not_answered(seconds: float) -> Exception:
    error: Any = dist.DistNetworkError
    made: Exception = error(f"the store has not answered for {seconds:g} seconds")
    return made


class Part(PrefixStore):
    """The part of a store that belongs to one start of a group, identified by its number.

    A process that starts again at the same meeting place uses fresh keys, and so do the others, in
    step with it. A process that left an open group rejoins it, since others may still be there. A
    process that replaces a crashed one uses that one's part.
    """

    def __init__(
        self,
        store: Store,
        place: str,
        rank: int,
        *,
        is_open: bool,
        is_private: bool = False,
        is_local: bool = False,
    ) -> None:
        self.is_private = is_private
        """No other user can read or change it."""
        self.is_local = is_local
        """No other machine can reach it."""
        self._place = place
        self._is_open = is_open
        self._number = self._find_number(PatientStore(store), rank)
        super().__init__(f"telegrad/{self._number}", store)

    def _find_number(self, store: PatientStore, rank: int) -> int:
        place = self._place
        if self._is_open and place in _open_groups:
            return _open_groups[place]
        last = f"telegrad/generation/{rank}"
        if place not in _starts and store.check([last]):
            return int(store.get(last))
        number = _starts.get(place, 0)
        store.set(last, str(number))
        return number

    def use_up(self) -> None:
        """Call this when others can see this worker. If it fails before that, a second try is the
        same start: the others may be waiting for it."""
        _starts[self._place] = self._number + 1
        _open_groups.pop(self._place, None)
        if self._is_open:
            _open_groups[self._place] = self._number
