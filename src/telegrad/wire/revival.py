"""The functions that a pickle stream calls to rebuild values on the receiving worker.

Their names are part of the wire format.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from telegrad.drop_in import is_drop_in

__all__ = [
    "as_class",
    "exception",
    "meta",
    "quantized",
    "script",
    "set_attributes",
    "slot",
    "typed_storage",
]


def slot(entry: Any) -> Any:
    """The next entry of the message's tensor table, which the unpickler passes in."""
    return entry


def as_class(tensor: Tensor, cls: type[Tensor]) -> Tensor:
    """`tensor` as an instance of a subclass.

    A Parameter that arrives with a history becomes a plain tensor that still passes
    `isinstance(..., Parameter)`, because its gradient must flow back to its origin.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"not a tensor: {type(tensor).__name__}")
    if tensor.grad_fn is None and not tensor._is_view():
        # Not a new tensor on its memory: the message may hold views of this one.
        tensor.__class__ = cls
        return tensor
    if issubclass(cls, torch.nn.Parameter):
        tensor._is_param = True
        return tensor
    return tensor.as_subclass(cls)


def set_attributes(tensor: Tensor, state: Any) -> None:
    """Sets the attributes that the sender's program had set on a tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"not a tensor: {type(tensor).__name__}")
    with torch._C.DisableTorchFunctionSubclass():
        torch._utils._set_obj_state(tensor, state)  # type: ignore[no-untyped-call]


def meta(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> Tensor:
    """A tensor without data."""
    return torch.empty_strided(
        shape, strides, dtype=dtype, device="meta", requires_grad=requires_grad
    )


def quantized(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    parameters: tuple[Any, ...],
) -> Tensor:
    """A quantized tensor over `storage`."""
    typed = torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated; the sender has seen that
        return torch._utils._rebuild_qtensor(  # type: ignore[no-any-return,no-untyped-call]
            typed, offset, shape, strides, parameters, False, {}
        )


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """A typed storage over an untyped one."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def exception(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An exception. If its constructor does not take its `args`, it is made without calling the
    constructor; its attributes are set later in any case. Under the drop-in such an exception
    raises here, because programs for torch's RPC expect a `RuntimeError`."""
    if not issubclass(cls, BaseException):
        raise TypeError(f"{cls!r} is not a class of exceptions")
    try:
        error = cls(*args)
    except Exception:
        if is_drop_in():
            raise
        error = cls.__new__(cls, *args)
    error.args = args
    return error


def script(saved: bytes) -> Any:
    """A TorchScript module, or a function as the module that it was saved as."""
    # torch.jit.load does the same, and warns each time that it is deprecated.
    unit = torch._C.CompilationUnit()
    module = torch._C.import_ir_module_from_buffer(unit, saved, None, {}, False)  # type: ignore[call-arg,arg-type]
    return torch.jit._recursive.wrap_cpp_module(module)  # type: ignore[no-untyped-call]
