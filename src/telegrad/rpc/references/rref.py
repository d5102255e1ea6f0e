"""`RRef`: a reference to a value on a worker.

The object is thin: it holds its table and a record, and reports its death. `protocol` decides how
long the value lives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import torch

from telegrad.errors import RRefError
from telegrad.ids import ForkId, RRefId
from telegrad.rpc.group.current import current_table
from telegrad.rpc.group.options import UNSET_RPC_TIMEOUT, checked_timeout
from telegrad.rpc.references.proxy import RRefProxy, type_of_owned
from telegrad.rpc.references.records import OwnerEntry, UserRecord
from telegrad.rpc.references.texts import (
    creation_error,
    no_attribute,
    not_callable,
    not_owner,
    text_of_id,
)

if TYPE_CHECKING:
    from telegrad.rpc.group.worker_info import WorkerInfo
    from telegrad.rpc.references.table import RRefTable

__all__ = ["RRef", "rebuild_rref", "set_rref_backward"]

T = TypeVar("T")

RRefBackward = Callable[["RRef[Any]", int, bool], None]
_backward: RRefBackward | None = None


def set_rref_backward(function: RRefBackward | None) -> RRefBackward | None:
    """Sets how `rref.backward(context_id)` works: autograd does, which this layer may not import.

    Args:
        function: takes the reference, the context's id, and whether to retain the graph.

    Returns:
        The function that was set before.
    """
    global _backward
    before, _backward = _backward, function
    return before


def rebuild_rref(fields: tuple[Any, ...]) -> RRef[Any]:
    """Unpacks a reference; the inverse of `RRefTable.reduce`."""
    return current_table().rebuild(fields)


class RRef(Generic[T]):
    """A reference to a value of type `T` on a worker.

    Args:
        value: this worker owns it.
        type_hint: the interface of a `ScriptModule`; required for one, an error otherwise.

    Example:
        >>> rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 3))  # doctest: +SKIP
        >>> rref.to_here()  # doctest: +SKIP
        tensor([4., 4.])
    """

    def __init__(self, value: T, type_hint: Any = None) -> None:
        is_script_module = isinstance(value, torch.jit.ScriptModule)
        if is_script_module and type_hint is None:
            raise RRefError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface "
                "type hint. "
            )
        if type_hint is not None and not is_script_module:
            raise RRefError(
                "type_hint should only be specified when the RRef being created contains a "
                "ScriptModule."
            )
        table = current_table()
        self._bind(table, table.new_entry(value, type_hint))
        table.adopt(self)

    @classmethod
    def _of(cls, table: RRefTable, record: OwnerEntry | UserRecord) -> RRef[Any]:
        rref: RRef[Any] = object.__new__(cls)
        rref._bind(table, record)
        return rref

    def _bind(self, table: RRefTable, record: OwnerEntry | UserRecord) -> None:
        self._table = table
        self._record = record
        self._type_future: torch.futures.Future[type] | None = None
        self._profiling_future: torch.futures.Future[Any] | None = None
        self._handle = table.watch(self, record)

    def __del__(self) -> None:
        # May run on any thread, between any two instructions; see `housekeeper`.
        handle = getattr(self, "_handle", None)
        if handle is not None:
            self._table.note_death(handle)

    # --- Who and where ---------------------------------------------------------------------------

    @property
    def rref_id(self) -> RRefId:
        return self._record.rref_id

    @property
    def fork_id(self) -> ForkId | None:
        """The fork; None at the owner."""
        return self._record.fork_id if isinstance(self._record, UserRecord) else None

    @property
    def _owner_id(self) -> int:
        record = self._record
        return record.owner if isinstance(record, UserRecord) else self._table.worker_id

    def is_owner(self) -> bool:
        return isinstance(self._record, OwnerEntry)

    def confirmed_by_owner(self) -> bool:
        """Whether the owner counts this reference; always true at the owner."""
        return isinstance(self._record, OwnerEntry) or self._record.is_confirmed

    def owner(self) -> WorkerInfo:
        return self._table.worker_info(self._owner_id)

    def owner_name(self) -> str:
        return self.owner().name

    def __str__(self) -> str:
        if isinstance(self._record, OwnerEntry):
            return f"OwnerRRef({text_of_id(self._record.rref_id)})"
        return (
            f"UserRRef(RRefId = {text_of_id(self._record.rref_id)}, "
            f"ForkId = {text_of_id(self._record.fork_id)})"
        )

    __repr__ = __str__

    # --- The value -------------------------------------------------------------------------------

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """A copy of the value; at the owner, the value itself. Waits until it is made.

        Raises:
            RpcTimeout: it did not come in time.
            WorkerLost: the owner, or the worker that was creating the value, is lost.
            RRefError: the value could not be created, or is gone.
            Exception: raised by the function that makes the value.
        """
        value: T
        if timeout != UNSET_RPC_TIMEOUT:
            timeout = checked_timeout(timeout)
        if isinstance(self._record, OwnerEntry):
            value = self._owned(self._record, timeout)
        else:
            record = self._record
            record.check("to_here()")
            value = self._table.remote.fetch(record.owner, record.rref_id, timeout)
            if not record.is_confirmed and record.creation is not None:
                # The owner has registered the reference with the value. Its confirmation uses
                # another connection, and may come later.
                self._table.creation_confirmed(record.fork_id)
        return value

    def local_value(self) -> T:
        """The value itself, at its owner.

        Raises:
            RRefError: this worker is not the owner.
        """
        if isinstance(self._record, OwnerEntry):
            value: T = self._owned(self._record)
            return value
        here = self._table.worker_info(self._table.worker_id)
        raise not_owner(self._record.rref_id, self._record.fork_id, here, self.owner())

    def _check_creation(self) -> None:
        if isinstance(self._record, OwnerEntry) and self._record.creation_error is not None:
            raise creation_error(self._record.creation_error)

    def _owned(self, entry: OwnerEntry, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        self._check_creation()
        if not entry.is_done:
            self._table.refuse_if_forked()
        return entry.wait(timeout)

    # --- Calls -----------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute(name)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise not_callable("rpc_sync")

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """`rref.rpc_sync().method(...)` calls the value's method at its owner and waits."""
        return RRefProxy(self, "sync", timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """`rref.rpc_async().method(...)` returns a future of the result."""
        return RRefProxy(self, "async", timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """`rref.remote().method(...)` returns a reference to the result, which stays there."""
        return RRefProxy(self, "remote", timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs the backward pass from the value, a scalar tensor, as the root.

        Args:
            dist_autograd_ctx_id: the context to run in. Without one, which only the owner may omit,
                this is plain local autograd.
        """
        if isinstance(self._record, OwnerEntry):
            value = self.local_value()
            if not isinstance(value, torch.Tensor):
                raise RRefError("RRef should contain a tensor for .backward()")
            if dist_autograd_ctx_id == -1:
                torch.autograd.backward(value, retain_graph=retain_graph)
                return
        elif dist_autograd_ctx_id == -1:
            raise RRefError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        if _backward is None:
            raise RRefError(
                "rref.backward() needs telegrad.autograd, which is not loaded: import it"
            )
        _backward(self, dist_autograd_ctx_id, retain_graph)

    # --- For upstream's own code and suites -------------------------------------------

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The value's type, or a future of it. Fetched once; a failed fetch is repeated."""
        future = self._type_future
        if future is None:
            if isinstance(self._record, OwnerEntry):
                future = torch.futures.Future()
                future.set_result(type(self.local_value()))
            else:
                self._record.check("_get_type()")
                args = (self._record.rref_id,)
                future = self._table.remote.call(
                    "async", self._owner_id, type_of_owned, args, {}, timeout
                )
            self._type_future = future
            future.add_done_callback(self._forget_failed_type)
        if not blocking:
            return future
        if not future.done():
            self._table.refuse_if_forked()
        return future.wait()

    def _forget_failed_type(self, future: torch.futures.Future[type]) -> None:
        try:
            future.value()
        except Exception:  # noqa: BLE001 - raised by the future
            self._type_future = None

    def _get_future(self) -> torch.futures.Future[None]:
        """A future of the end of the `remote()` call that made this reference."""
        self._table.refuse_if_forked()
        if self._record.creation is None:
            raise RRefError(f"{self} was not made by remote() on this worker: it has no future")
        return self._record.creation.future()

    def _set_profiling_future(self, future: torch.futures.Future[Any]) -> None:
        self._profiling_future = future

    def _get_profiling_future(self) -> torch.futures.Future[Any]:
        if self._profiling_future is None:
            raise RRefError(f"no profiling future was set on {self}")
        return self._profiling_future

    def _serialize(self) -> tuple[Any, ...]:
        """The reference as plain data, for an unknown receiver."""
        self._table.refuse_if_forked()
        return self._table.fork(self, None)

    @staticmethod
    def _deserialize(fields: tuple[Any, ...]) -> RRef[Any]:
        return rebuild_rref(fields)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RRefError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
        )
