"""The pickler: how values are reduced that the C pickler cannot reduce, or not well.

It is the standard library's C pickler, protocol 5, with a `reducer_override`, which is called for
instances, functions and classes but not for builtin containers and scalars. For a tensor it writes
a mark (NEXT_BUFFER) into the stream and an entry into the tensor table. For each mark the C
unpickler takes the next item of its `buffers`, whatever its type, so the receiver passes finished
tensors and needs no special unpickler.

How a type is reduced is looked up once. An object that cannot be found by import is reduced by
cloudpickle, alone and in the same stream: so a tensor in a closure is still a tensor of the
message, and no reducer runs twice.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import types
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor

from telegrad.errors import SerializationError
from telegrad.wire import by_value, revival
from telegrad.wire.function_names import function_named, name_of
from telegrad.wire.tensor_table.layout import (
    CODES,
    Entry,
    Part,
    Sparse,
    Whole,
    has_tangent,
    is_plain,
    keeps_grad,
)

__all__ = ["Reducer", "ValuePickler"]

Reducer = Callable[[Any, int], tuple[Any, ...]]
"""Reduces an object that goes to the worker of the given id, as `__reduce__` would."""

_Handler = Callable[["ValuePickler", Any], Any]

# The mark for the next entry of the table. It must be writable: behind a read-only one the pickler
# writes READONLY_BUFFER, which needs a real buffer.
_MARK = pickle.PickleBuffer(bytearray())
_strided = torch.strided
_slot = revival.slot
_TYPES_LIMIT = 4096  # some programs make classes all the time


class ValuePickler(pickle.Pickler):
    """Pickles one value at a time into `chunks` and `entries`; reusable after `reset`."""

    def __init__(self, handlers: dict[type, _Handler], reducers: Mapping[type, Reducer]) -> None:
        self.chunks: list[bytes] = []
        self.marked: list[Any] = []
        self.originals: dict[int, Tensor] = {}
        self.destination = -1
        self.probing = False
        self.by_value: Any = None
        self._handlers = handlers
        self._reducers = reducers
        sink = _Sink()
        sink.write = self.chunks.append
        super().__init__(sink, 5, buffer_callback=self.marked.append)

    def entries(self) -> list[Entry]:
        """The entries of the table in the order of the stream, each behind its parts."""
        return [entry for entry in self.marked if entry is not _MARK]

    def reset(self) -> None:
        """Forget the last value."""
        self.chunks.clear()
        self.marked.clear()
        if self.originals:
            self.originals.clear()
        self.by_value = None
        self.clear_memo()

    def reducer_override(self, obj: Any) -> Any:
        """The C pickler calls it for everything but builtin scalars and containers."""
        cls = type(obj)
        if cls is Tensor and is_plain(obj):
            self.marked.append(obj)
            # Not a constant tuple: the pickler would refer to the first one instead of writing a
            # second mark.
            return _slot, (_MARK,)
        handler = self._handlers.get(cls)
        if handler is None:
            if len(self._handlers) > _TYPES_LIMIT:
                self._handlers.clear()
            handler = self._handlers[cls] = _handler_for(cls, self._reducers)
        return handler(self, obj)


class _Sink:
    """The file that the pickler writes to: a list of chunks. Large bytes are not copied."""

    __slots__ = ("write",)
    write: Callable[[bytes], None]


def _handler_for(cls: type, reducers: Mapping[type, Reducer]) -> _Handler:
    for base in cls.__mro__:
        if base in reducers:
            return _by_reducer(reducers[base])
        if base in _HANDLERS:
            return _HANDLERS[base]
    is_known = cls in copyreg.dispatch_table
    if not is_known and cls in cloudpickle.Pickler.dispatch_table:  # code, cells, dict views ...
        return _reduce_by_value
    return _leave_to_pickle


def _leave_to_pickle(pickler: ValuePickler, obj: Any) -> Any:
    return NotImplemented


def _by_reducer(reducer: Reducer) -> _Handler:
    def reduce(pickler: ValuePickler, obj: Any) -> Any:
        if pickler.probing:
            return _slot, (None,)  # a reducer may have effects, such as the fork of an RRef
        return reducer(obj, pickler.destination)

    return reduce


def _reduce_by_value(pickler: ValuePickler, obj: Any) -> Any:
    if pickler.by_value is None:
        pickler.by_value = cloudpickle.Pickler(io.BytesIO(), 5)
    reduced: Any = None
    if isinstance(obj, types.FunctionType):
        reduced = by_value.reduce_function(obj, pickler.by_value)
    elif isinstance(obj, type):
        reduced = by_value.reduce_class(obj)
    if reduced is not None:
        return reduced
    reduced = pickler.by_value.reducer_override(obj)
    if reduced is NotImplemented:
        reduce = pickler.by_value.dispatch_table.get(type(obj))
        if reduce is not None:
            reduced = reduce(obj)
    return reduced


def _reduce_function(pickler: ValuePickler, func: Any) -> Any:
    name = name_of(func)
    if name is None:
        return _reduce_by_value(pickler, func)
    if name == f"{func.__module__}\0{func.__qualname__}".encode():
        return NotImplemented
    return function_named, (name,)


def _reduce_method(pickler: ValuePickler, method: Any) -> Any:
    name = getattr(method.__func__, "__name__", "")
    if getattr(method.__self__, name, None) == method:
        return getattr, (method.__self__, name)
    return _reduce_by_value(pickler, method)


def _reduce_class(pickler: ValuePickler, cls: type) -> Any:
    return NotImplemented if name_of(cls) is not None else _reduce_by_value(pickler, cls)


def _reduce_cached(pickler: ValuePickler, func: Any) -> Any:
    reduced = by_value.reduce_cached(func)
    return NotImplemented if reduced is None else reduced


def _reduce_operator(pickler: ValuePickler, operator: Any) -> Any:
    name = name_of(operator)
    return NotImplemented if name is None else (function_named, (name,))


def _reduce_script_function(pickler: ValuePickler, func: Any) -> Any:
    name = name_of(func)
    if name is not None:
        return function_named, (name,)
    return revival.script, (func.save_to_buffer(),)


def _reduce_script_module(pickler: ValuePickler, module: Any) -> Any:
    return revival.script, (module.save_to_buffer(),)


def _reduce_tensor(pickler: ValuePickler, tensor: Tensor) -> Any:
    """Reduces a tensor of a subclass, with attributes, or of another layout or device."""
    cls = type(tensor)
    if cls is Tensor:
        reduced = _reduce_plain(pickler, tensor)
        if tensor.__dict__ and reduced is not NotImplemented:
            return (*reduced, tensor.__dict__, None, None, revival.set_attributes)
        return reduced
    own_way = (
        cls.__reduce_ex__ not in (Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)
        or cls.__reduce__ is not Tensor.__reduce__
        or cls in copyreg.dispatch_table
    )
    is_wrapper = cls.__torch_dispatch__ is not Tensor.__torch_dispatch__
    # Torch reduces both without their history.
    if (tensor.is_nested or (is_wrapper and not own_way)) and keeps_grad(tensor):
        raise SerializationError(
            "a tensor that wraps others and requires grad cannot be sent: send the wrapped "
            "tensors, or the result of .detach()"
        )
    if own_way or is_wrapper:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach()
        pickler.originals[id(plain)] = tensor  # the pickler's memo keeps `plain` alive
        state = torch._utils._get_obj_state(tensor)  # type: ignore[no-untyped-call]
    if type(plain) is not Tensor:
        plain = plain.as_subclass(Tensor)
        pickler.originals[id(plain)] = tensor
    return revival.as_class, (plain, cls), state or None, None, None, revival.set_attributes


def _reduce_plain(pickler: ValuePickler, tensor: Tensor) -> Any:
    original = pickler.originals.get(id(tensor), tensor)
    if has_tangent(tensor):
        raise SerializationError(
            "a dual tensor of forward-mode differentiation cannot be sent, because its tangent "
            "would be lost: send the results of forward_ad.unpack_dual"
        )
    if tensor.is_meta:
        return revival.meta, (
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            keeps_grad(original),
        )
    if not tensor.is_cpu:
        raise SerializationError(
            f"a tensor on {tensor.device} cannot be sent: only CPU tensors travel; "
            f"move it with .cpu() and back with .to(...) on the other worker"
        )
    if tensor.is_nested:
        if keeps_grad(original):
            raise SerializationError("a nested tensor that requires grad cannot be sent: unbind it")
        return NotImplemented
    if tensor.is_quantized:
        return revival.quantized, _quantized_arguments(tensor)
    layout = tensor.layout
    if layout is _strided:
        if tensor.dtype not in CODES:
            raise SerializationError(f"tensors of {tensor.dtype} cannot be sent")
        pickler.marked.append(tensor)
        return _slot, (_MARK,)
    data = tensor.detach()
    if layout is torch.sparse_coo:
        parts = [data._indices(), data._values()]
    elif layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [data.crow_indices(), data.col_indices(), data.values()]
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [data.ccol_indices(), data.row_indices(), data.values()]
    else:
        raise SerializationError(f"a tensor of layout {layout} cannot be sent: use .to_dense()")
    pickler.marked.extend(Part(part) for part in parts)
    pickler.marked.append(Sparse(tensor))
    return _slot, (_MARK,)


def _quantized_arguments(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.untyped_storage().nbytes() > 2 * tensor.nbytes:
        tensor = tensor.clone()
    scheme = tensor.qscheme()
    parameters: tuple[Any, ...]
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        parameters = (torch.per_tensor_affine, tensor.q_scale(), tensor.q_zero_point())
    else:
        parameters = (
            scheme,
            tensor.q_per_channel_scales(),
            tensor.q_per_channel_zero_points(),
            tensor.q_per_channel_axis(),
        )
    return (
        tensor.untyped_storage(),
        tensor.dtype,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        parameters,
    )


def _reduce_storage(pickler: ValuePickler, storage: torch.UntypedStorage) -> Any:
    if storage.device.type != "cpu":
        raise SerializationError(
            f"a storage on {storage.device} cannot be sent: only CPU memory travels"
        )
    raw = torch.empty(0, dtype=torch.uint8, device="cpu")
    if storage.nbytes():
        raw.set_(storage, 0, (storage.nbytes(),), (1,))
    pickler.marked.append(Whole(raw))
    return _slot, (_MARK,)


def _reduce_typed_storage(pickler: ValuePickler, storage: torch.TypedStorage) -> Any:
    return revival.typed_storage, (storage._untyped_storage, storage.dtype)


def _reduce_exception(pickler: ValuePickler, error: BaseException) -> Any:
    cls = type(error)
    is_common = (
        cls.__reduce__ is BaseException.__reduce__
        and cls.__reduce_ex__ is BaseException.__reduce_ex__
        and cls not in copyreg.dispatch_table
    )
    if not is_common:
        return NotImplemented
    return revival.exception, (cls, error.args), error.__dict__ or None


def _refuse(what: str) -> _Handler:
    def refuse(pickler: ValuePickler, obj: Any) -> Any:
        raise SerializationError(what)

    return refuse


_HANDLERS: dict[type, _Handler] = {
    Tensor: _reduce_tensor,
    torch.UntypedStorage: _reduce_storage,
    torch.TypedStorage: _reduce_typed_storage,
    types.FunctionType: _reduce_function,
    types.MethodType: _reduce_method,
    types.BuiltinFunctionType: _leave_to_pickle,
    functools._lru_cache_wrapper: _reduce_cached,
    type: _reduce_class,
    torch._ops.OpOverload: _reduce_operator,
    torch._ops.OpOverloadPacket: _reduce_operator,
    torch.jit.ScriptFunction: _reduce_script_function,
    torch.jit.ScriptModule: _reduce_script_module,
    BaseException: _reduce_exception,
    io.TextIOWrapper: _refuse("an open file cannot be sent: send its path or its contents"),
    torch._C.Future: _refuse(
        "Can not pickle torch.futures.Future: wait() for it, and send its value"
    ),
    types.GeneratorType: _refuse("generators cannot be sent; send or return a list"),
    types.AsyncGeneratorType: _refuse("generators cannot be sent; send or return a list"),
    types.CoroutineType: _refuse("coroutines cannot be sent; await one, and send its value"),
}
