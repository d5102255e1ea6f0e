"""In the place of `torch.distributed.rpc.internal`.

telegrad packs calls with its own codec. What is here serves programs that pickle in torch's way
themselves, register reducers, or set a pickler of their own for calls.
"""

from __future__ import annotations

import collections
import copyreg
import io
import pickle
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, cast

import torch

from telegrad.rpc.references.fetch import register_reducer
from telegrad.rpc.references.rref import RRef, rebuild_rref

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

PythonUDF = collections.namedtuple("PythonUDF", ["func", "args", "kwargs"])
RemoteException = collections.namedtuple("RemoteException", ["msg", "exception_type"])

_Reduction = tuple[Any, ...]
_thread_local_tensor_tables = threading.local()


class RPCExecMode(Enum):
    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class _InternalRPCPickler:
    """Packs a value as bytes and a list of the tensors in it."""

    def __init__(self) -> None:
        self._class_reducer_dict: dict[type, Callable[[Any], _Reduction]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], _Reduction]) -> None:
        """Says how objects of a class are packed, also in calls; the first one stands."""
        if obj_class not in self._class_reducer_dict:
            self._class_reducer_dict[obj_class] = reducer
            register_reducer(obj_class, lambda obj, _: reducer(obj))

    @classmethod
    def _tensor_receiver(cls, tensor_index: int) -> torch.Tensor:
        return cast(torch.Tensor, _thread_local_tensor_tables.received[tensor_index])

    def _tensor_reducer(self, tensor: torch.Tensor) -> _Reduction:
        _thread_local_tensor_tables.sent.append(tensor)
        return _InternalRPCPickler._tensor_receiver, (len(_thread_local_tensor_tables.sent) - 1,)

    def _rref_reducer(self, rref: RRef[Any]) -> _Reduction:
        return rebuild_rref, (rref._serialize(),)

    _py_rref_reducer = _rref_reducer

    @classmethod
    def _script_module_receiver(cls, script_module_serialized: bytes) -> Any:
        return torch.jit.load(io.BytesIO(script_module_serialized))  # type: ignore[no-untyped-call]

    def _script_module_reducer(self, script_module: Any) -> _Reduction:
        file = io.BytesIO()
        torch.jit.save(script_module, file)
        return _InternalRPCPickler._script_module_receiver, (file.getvalue(),)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Packs a value: its bytes, and its tensors."""
        file = io.BytesIO()
        pickler = pickle.Pickler(file)
        table: dict[type, Any] = copyreg.dispatch_table.copy()
        table[torch.Tensor] = self._tensor_reducer
        table[RRef] = self._rref_reducer
        if isinstance(obj, torch.jit.ScriptModule):
            table[type(obj)] = self._script_module_reducer
        table.update(self._class_reducer_dict)
        pickler.dispatch_table = table
        outer = getattr(_thread_local_tensor_tables, "sent", None)
        tensors: list[torch.Tensor] = []
        _thread_local_tensor_tables.sent = tensors
        try:
            pickler.dump(obj)
        finally:
            _thread_local_tensor_tables.sent = outer
        return file.getvalue(), tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Unpacks what `serialize` has packed."""
        outer = getattr(_thread_local_tensor_tables, "received", None)
        _thread_local_tensor_tables.received = tensor_table
        try:
            return pickle.loads(binary_data)
        except AttributeError as error:
            missing = AttributeError(
                f"{error} Default RPC pickler does not serialize\n            function code. "
                "Ensure that UDFs are defined on both caller and\n            callee modules."
            )
            missing.__cause__ = error
            return missing
        finally:
            _thread_local_tensor_tables.received = outer


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _run_pickled(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """At the callee: runs a call that came packed by a program's own pickler."""
    call = deserialize(binary_data, tensor_table)
    if isinstance(call, AttributeError):
        raise call
    return call.func(*call.args, **call.kwargs)


def builtin_name(func: object) -> str | None:
    """The name of one of torch's operators (`aten::add`); None for any other function."""
    name: str | None = torch.jit._builtins._find_builtin(func)  # type: ignore[no-untyped-call]
    return name


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
