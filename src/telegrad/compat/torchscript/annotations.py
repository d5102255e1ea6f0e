"""Annotations and values as TorchScript types: `RRef[T]` is telegrad's."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

from telegrad.compat.torchscript.generated import Exactly
from telegrad.compat.torchscript.references import reference_type, type_of_value, worker_info_type
from telegrad.compat.torchscript.torch_jit import core, jit_annotations
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.references.rref import RRef

__all__ = ["inferring", "understanding"]


def understanding(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.jit.annotations.try_ann_to_type` that knows telegrad's references."""

    def try_ann_to_type(annotation: Any, location: Any, resolve: Any = None) -> Any:
        if isinstance(annotation, Exactly):
            return annotation.type
        if annotation is RRef:
            raise RuntimeError(
                "Attempted to use RRef without a contained type. Please add a contained type, "
                "e.g. RRef[int]"
            )
        if annotation is WorkerInfo:
            return worker_info_type()
        if typing.get_origin(annotation) is RRef:
            (inner,) = typing.get_args(annotation)
            return reference_type(jit_annotations.ann_to_type(inner, location))
        return original(annotation, location, resolve)

    return try_ann_to_type


def inferring(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`torch._C._jit_try_infer_type` that knows the types of references, also in containers."""

    def try_infer_type(value: Any) -> Any:
        type_ = _type_with_references(value)
        return original(value) if type_ is None else core.InferredType(type_)

    return try_infer_type


def _type_with_references(value: Any) -> Any:
    """None if there is no reference in the value."""
    if isinstance(value, RRef):
        return reference_type(type_of_value(value))
    if isinstance(value, list | tuple | dict) and value:
        items = list(value.values()) if isinstance(value, dict) else value
        types = [_type_with_references(item) for item in items]
        if all(type_ is None for type_ in types):
            return None
        if isinstance(value, list):
            return core.ListType(types[0])
        if isinstance(value, dict):
            keys = core._jit_try_infer_type(next(iter(value))).type()
            return core.DictType(keys, types[0])
        return core.TupleType(
            [
                core._jit_try_infer_type(item).type() if type_ is None else type_
                for item, type_ in zip(value, types, strict=True)
            ]
        )
    return None
