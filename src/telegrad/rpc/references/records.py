"""What the RRef table keeps for a reference: an owner's value, or the state of a user's fork.

Several `RRef` objects may share one record. A record never refers back to them, so that their
deaths are noticed by counting alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from telegrad.errors import RpcTimeout, RRefError
from telegrad.ids import ForkId, RRefId
from telegrad.locks import check_wait
from telegrad.rpc.calls.futures import CallFuture
from telegrad.rpc.calls.outcome import again, fail, without_frames
from telegrad.rpc.references.texts import text_of_id

__all__ = ["Creation", "OwnerEntry", "UserRecord"]

_PENDING: Any = object()


class Creation:
    """The outcome of a `remote()` call; makes a torch future of it only on request."""

    __slots__ = ("_future", "_lock", "_outcome")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards the two below; a destructor may come in between
        self._outcome: Exception | None = _PENDING
        self._future: torch.futures.Future[None] | None = None

    def settle(self, error: Exception | None) -> None:
        """Sets the outcome; the first one stands. Runs the future's callbacks, so call it under no
        lock."""
        with self._lock:
            if self._outcome is not _PENDING:
                return
            self._outcome = error
            future = self._future
        if future is not None:
            _complete(future, error)

    def future(self) -> torch.futures.Future[None]:
        future: CallFuture[None] = CallFuture()
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = future
            outcome = self._outcome
        if outcome is not _PENDING:
            _complete(future, outcome)
        return future


def _complete(future: torch.futures.Future[None], error: Exception | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        fail(future, error)


class OwnerEntry:
    """A value that this worker owns, or a place for it until it is made.

    A wait for it ends when the function that makes it returns or raises, or when the protocol finds
    that it will never run.
    """

    __slots__ = (
        "_callbacks",
        "_error",
        "_lock",
        "_value",
        "creation",
        "creation_error",
        "reader",
        "rref_id",
        "type_hint",
    )

    def __init__(self, rref_id: RRefId, value: Any = _PENDING, type_hint: Any = None) -> None:
        self.rref_id = rref_id
        self.type_hint = type_hint
        """The interface of a TorchScript module, if given."""
        self.reader: Callable[[], Any] | None = None
        """Set if the value is kept in another form: returns its current value."""
        self.creation = Creation()
        self.creation_error: BaseException | None = None
        self._lock = threading.RLock()  # guards the three below; a destructor may come in between
        self._value = value
        self._error: Exception | None = None
        self._callbacks: list[Callable[[OwnerEntry], None]] = []

    @property
    def is_done(self) -> bool:
        return self._value is not _PENDING or self._error is not None

    def set_value(self, value: Any) -> None:
        self._settle(value, None)

    def set_error(self, error: Exception) -> None:
        without_frames(error)
        self._settle(_PENDING, error)

    def creation_failed(self, error: Exception) -> None:
        """A `remote()` to this worker itself timed out. The value may still come, but uses
        raise."""
        self.creation_error = error
        self.creation.settle(error)

    def add_done_callback(self, callback: Callable[[OwnerEntry], None]) -> None:
        """Runs `callback(entry)` once the value or the error is set; at once if it is."""
        with self._lock:
            if not self.is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def wait(self, timeout: float | None = None) -> Any:
        """The value.

        Args:
            timeout: seconds; None, zero or less means no limit.

        Raises:
            RpcTimeout: it was not made in time.
            Exception: raised by the function that makes the value.
        """
        if not self.is_done:
            check_wait("the value of a reference")
            done = threading.Event()
            self.add_done_callback(lambda _: done.set())
            if not done.wait(timeout if timeout is not None and timeout > 0 else None):
                raise RpcTimeout(
                    f"RPC ran for more than {timeout} s: the value of the RRef "
                    f"{text_of_id(self.rref_id)} is still being made",
                    seconds=timeout or 0.0,
                )
        return self.result()

    def result(self) -> Any:
        """The value, once `is_done`; raises the error if one is set."""
        if self._error is not None:
            raise again(self._error)
        return self._value if self.reader is None else self.reader()

    def value_to_send(self) -> Any:
        """Like `result`, for a value that is sent to another worker."""
        value = self.result()
        if self.type_hint is not None:
            raise RRefError(
                f"RRef {text_of_id(self.rref_id)} is an RRef to a ScriptModule. It can't be sent "
                "through RPC from owner, call its methods there: rref.rpc_sync().forward(...)"
            )
        return value

    def _settle(self, value: Any, error: Exception | None) -> None:
        with self._lock:
            if self.is_done:
                return
            self._value, self._error = value, error
            callbacks, self._callbacks = self._callbacks, []
        self.creation.settle(error)
        for callback in callbacks:
            callback(self)


class UserRecord:
    """A user's fork. Only steps of the table write its fields."""

    __slots__ = ("callbacks", "creation", "error", "fork_id", "is_confirmed", "owner", "rref_id")

    def __init__(self, rref_id: RRefId, fork_id: ForkId, owner: int) -> None:
        self.rref_id = rref_id
        self.fork_id = fork_id
        self.owner = owner
        self.is_confirmed = False
        # Makes the exception of a use, given a description of that. Each use needs its own: if
        # several threads raised one object, its traceback would grow.
        self.error: Callable[[str], Exception] | None = None
        self.creation: Creation | None = None
        self.callbacks: list[Callable[[], None]] = []

    @property
    def is_settled(self) -> bool:
        return self.is_confirmed or self.error is not None

    def check(self, attempt: str) -> None:
        """Raises if the reference is no longer usable for `attempt`."""
        if self.error is not None:
            raise self.error(attempt)
