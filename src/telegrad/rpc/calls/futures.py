"""Futures of calls.

They wait in Python, where Ctrl-C works; torch's own futures wait in C++. If a call fails and its
future is discarded unread, the error is logged.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from torch.futures import Future

from telegrad.locks import check_wait, here
from telegrad.rpc.calls.outcome import again, fail, without_frames

__all__ = ["CallFuture", "has_ended", "wait_for"]

_log = logging.getLogger("telegrad.rpc")

T = TypeVar("T")
S = TypeVar("S")


def wait_for(future: Future[Any]) -> Any:
    """Waits for the future; returns its value, or raises."""
    has_ended(future, None)
    return future.value()


def has_ended(future: Future[Any], timeout: float | None) -> bool:
    """Waits for a future, `timeout` seconds at most; Ctrl-C ends the wait. Returns whether the
    future is done.

    The callback is not written in Python, so Ctrl-C cannot interrupt it: torch would drop the
    KeyboardInterrupt, and the wait would never end.
    """
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    future.add_done_callback(ended.put)
    try:
        ended.get(timeout=timeout)
    except queue.Empty:
        return False
    return True


class CallFuture(Future[T]):
    """The result of a call. Ctrl-C ends a wait for it, and for a future that `then` returns."""

    _failure: _Failure | None = None

    def wait(self) -> T:
        if here.must_not_wait and not self.done():
            check_wait("the answer to a call")
        if not self.done() and threading.current_thread() is threading.main_thread():
            value: T = wait_for(self)  # signals are handled on the main thread only
            return value
        return super().wait()

    def result(self) -> T:
        """The same as `wait`, under the name that Python's own futures use."""
        return self.wait()

    def __await__(self) -> Generator[Any, None, T]:
        """`await future` waits for it in a coroutine, without blocking its event loop."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def finish(_: Future[T]) -> None:
            if done.set_running_or_notify_cancel():  # the coroutine may have been cancelled
                done.set_result(None)

        self.add_done_callback(finish)
        yield from asyncio.wrap_future(done).__await__()
        return self.value()

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        outcome: CallFuture[S] = CallFuture()

        def finish(done: Future[S]) -> None:
            try:
                outcome.set_result(done.value())
            except Exception as error:  # noqa: BLE001 - raised by the new future
                outcome.fail(error, "the callback of a call")

        super().then(callback).add_done_callback(finish)
        return outcome

    def fail(self, error: Exception, what: str = "") -> None:
        """Like `outcome.fail`.

        Args:
            what: what has failed, for the log if the future is discarded unread; empty logs
            nothing.
        """
        if not what:
            fail(self, error)
            return
        failure = _Failure(what, without_frames(error))
        self._set_unwrap_func(failure.raise_it)
        self.set_result(failure.error)  # type: ignore[arg-type]
        self._failure = failure

    def __del__(self) -> None:
        failure = self._failure
        if failure is not None and not failure.is_read:
            text, error = "%s has failed, and its result was never read", failure.error
            _log.error(text, failure.what, exc_info=(type(error), error, None))


class _Failure:
    """The error of a call, and whether it was read. torch calls `raise_it` also when it waits for
    several futures."""

    def __init__(self, what: str, error: Exception) -> None:
        self.what = what
        self.error = error
        self.is_read = False

    def raise_it(self, error: Exception) -> None:
        self.is_read = True
        raise again(error)
