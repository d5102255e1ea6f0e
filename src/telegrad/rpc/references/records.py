"""What the RRef table keeps behind a reference: an owner's value, or a user's standing.

Several `RRef` objects may share one record; a record never points back at them, so their death is
noticed by counting alone.
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
from telegrad.rpc.calls.kept_errors import again, fail, without_frames
from telegrad.rpc.references.texts import text_of_id

__all__ = ["Creation", "OwnerEntry", "UserRecord"]

_PENDING: Any = object()


class Creation:
    """The outcome of a `remote()` call, which becomes a torch future only if somebody asks."""

    __slots__ = ("_future", "_lock", "_outcome")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards the two below; a destructor may come in between
        self._outcome: Exception | None = _PENDING
        self._future: torch.futures.Future[None] | None = None

    def settle(self, error: Exception | None) -> None:
        """The first outcome stands. Runs the future's callbacks: not to be called under a lock."""
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
    """A value that this worker owns, or the place where it will be.

    The wait for it ends when the function that makes it returns or raises, or when the protocol
    finds that it will never be run.
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
        """The interface of a TorchScript module, if its maker has told."""
        self.reader: Callable[[], Any] | None = None
        """Set when the value has gone to live in another form: gives it as it is now."""
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
        """A `remote()` to oneself timed out: the value may still come, but users were told."""
        self.creation_error = error
        self.creation.settle(error)

    def add_done_callback(self, callback: Callable[[OwnerEntry], None]) -> None:
        """Runs `callback(entry)` when the value or the error is there; at once if it is."""
        with self._lock:
            if not self.is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def wait(self, timeout: float | None = None) -> Any:
        """The value.

        Args:
            timeout: seconds; None, zero and less mean no limit.

        Raises:
            RpcTimeout: it was not there in time.
            Exception: what the function raised that should have made the value.
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
        """The value, once `is_done`; raises the error if there is one."""
        if self._error is not None:
            raise again(self._error)
        return self._value if self.reader is None else self.reader()

    def value_to_send(self) -> Any:
        """Like `result`, for a value that is about to leave this worker."""
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
    """A user's fork. Its fields are written under the table's lock only."""

    __slots__ = ("callbacks", "creation", "error", "fork_id", "is_confirmed", "owner", "rref_id")

    def __init__(self, rref_id: RRefId, fork_id: ForkId, owner: int) -> None:
        self.rref_id = rref_id
        self.fork_id = fork_id
        self.owner = owner
        self.is_confirmed = False
        # Makes what a use raises, given what was tried: one exception object must not be raised by
        # several threads, its traceback would grow.
        self.error: Callable[[str], Exception] | None = None
        self.creation: Creation | None = None
        self.callbacks: list[Callable[[], None]] = []

    @property
    def is_settled(self) -> bool:
        return self.is_confirmed or self.error is not None

    def check(self, attempt: str) -> None:
        """Raises if the reference is no longer good for `attempt`."""
        if self.error is not None:
            raise self.error(attempt)
