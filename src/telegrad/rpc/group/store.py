"""A store of torch's, of which every question ends.

A TCP store waits for its answers without a limit; even when the time for a key is over, for then it
takes its question back, and waits until that is confirmed. If its host has vanished without a word
that is a quarter of an hour, and if the process that keeps it has stopped, for ever. So each
question is asked on a thread of its own, which is left behind if it does not end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

__all__ = ["PatientStore"]

_T = TypeVar("_T")

_GRACE = 2.0  # seconds beyond the store's own timeout, in which it says that this is over


class PatientStore:
    """What workers ask of a store; see there.

    All of it raises `DistNetworkError` if the store does not answer.
    """

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
        """Waits until all keys are there; False if that takes longer."""

        def wait() -> bool:
            try:
                self._store.wait(keys, timedelta(seconds=seconds))
            except dist.DistNetworkError:
                raise
            except RuntimeError:  # some stores say what kind of error it is, and some do not
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
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the asker's
                errors.append(error)

        if not self._has_vanished:
            thread = threading.Thread(target=ask, name="telegrad-store", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                ask()  # no thread to be had: then this one has to wait for as long as it takes
            else:
                thread.join(seconds)
        if errors:
            raise errors.pop()
        if not answers:
            self._has_vanished = True  # what it was asked last still keeps it busy
            raise _not_answered(seconds)
        return answers.pop()


def _not_answered(seconds: float) -> Exception:
    error: Any = dist.DistNetworkError
    made: Exception = error(f"the store has not answered for {seconds:g} seconds")
    return made
