"""TorchScript's types as plain data, to be sent to another worker."""

from __future__ import annotations

from typing import Any

from telegrad.compat.torchscript.generated import PREFIX
from telegrad.compat.torchscript.torch_jit import core, state

__all__ = ["describe", "type_described"]

Description = tuple[Any, ...]

_SIMPLE: dict[str, Any] = {
    "TensorType": core.TensorType,
    "IntType": core.IntType,
    "FloatType": core.FloatType,
    "ComplexType": core.ComplexType,
    "BoolType": core.BoolType,
    "StringType": core.StringType,
    "NoneType": core.NoneType,
    "AnyType": core.AnyType,
    "NumberType": core.NumberType,
    "DeviceObjType": core.DeviceObjType,
}


def describe(type_: Any) -> Description:
    """
    Raises:
        RuntimeError: there is no description of such a type.
    """
    kind = type_.kind()
    if kind in _SIMPLE:
        return (kind,)
    if kind in ("ListType", "OptionalType", "FutureType"):
        return kind, describe(type_.getElementType())
    if kind == "DictType":
        return kind, describe(type_.getKeyType()), describe(type_.getValueType())
    if kind == "TupleType":
        return kind, *(describe(element) for element in type_.elements())
    name = type_.annotation_str
    # The names of generated classes count them: on another worker they are others.
    if kind in ("ClassType", "InterfaceType") and f".{PREFIX}" not in name:
        return kind, name
    raise RuntimeError(f"a TorchScript type {type_} cannot be told to another worker")


def type_described(description: Description) -> Any:
    """
    Raises:
        RuntimeError: it is a class that this process has not compiled.
    """
    kind, *parts = description
    if kind in _SIMPLE:
        return _SIMPLE[kind].get()
    if kind == "ClassType":
        return _known(state._python_cu.get_class(parts[0]), parts[0])
    if kind == "InterfaceType":
        return _known(state._python_cu.get_interface(parts[0]), parts[0])
    inner = [type_described(part) for part in parts]
    if kind == "TupleType":
        return core.TupleType(inner)
    return getattr(core, kind)(*inner)


def _known(type_: Any, name: str) -> Any:
    if type_ is None:
        raise RuntimeError(f"this worker has no TorchScript type {name}: import its module here")
    return type_
