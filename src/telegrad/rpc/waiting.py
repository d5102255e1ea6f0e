"""Waiting for a future in Python, where Ctrl-C is heeded: torch's futures wait in C++."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.futures import Future

from telegrad.rpc.kept_errors import fail

__all__ = ["CallFuture", "wait_for"]

T = TypeVar("T")
S = TypeVar("S")


def wait_for(future: Future[Any]) -> Any:
    """Ends as the future does: returns its value, or raises."""
    gate = threading.Lock()
    gate.acquire()
    future.add_done_callback(lambda _: gate.release())
    gate.acquire()
    return future.value()


class CallFuture(Future[T]):
    """What comes of a call. Ctrl-C ends a wait for it, and for what `then` makes of it."""

    def wait(self) -> T:
        if not self.done() and threading.current_thread() is threading.main_thread():
            value: T = wait_for(self)  # only there are signals heeded
            return value
        return super().wait()

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        outcome: CallFuture[S] = CallFuture()

        def finish(done: Future[S]) -> None:
            try:
                outcome.set_result(done.value())
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
                fail(outcome, error)

        super().then(callback).add_done_callback(finish)
        return outcome
