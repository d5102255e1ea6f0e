"""What an operation of torch takes and gives, and the shapes of its results.

An operation on a remote tensor runs later, on the tensor's worker. The program that asked for it
goes on with results whose sizes, strides and dtypes come from torch's meta kernels, here. They are
the same for the same kinds of arguments, so they are inferred once and looked up afterwards.

Some sizes depend on numbers (`nonzero`): `infer` returns None, and the worker has to be asked.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Gives",
    "Operation",
    "Plan",
    "Spec",
    "function",
    "infer",
    "kind_of",
    "meta_of",
    "plan_of",
    "spec_of",
    "tensors_in",
    "written_by",
]

Operation = tuple[
    str, "int | tuple[int, ...] | None", tuple[Any, ...], tuple[int, ...], dict[str, Any]
]
"""The name of an operation, the ids of its results, its arguments, which of those are references,
and its named arguments. A plain tuple: hundreds of them may travel in a training step.

A reference is an id, a list of references, None, a pair (number, dtype) for a tensor without
dimensions, or a tensor. A named argument that is a reference stands in a list of its own."""

_NAMESPACES = ("aten", "prims")
_MOST_INFERRED = 20_000  # kinds of calls; a program that indexes with ever new numbers has many


class Spec(NamedTuple):
    """What is known here of a tensor that is elsewhere. A sparse one has no strides."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    layout: torch.layout = torch.strided


@functools.lru_cache(8192)
def _one(spec: Spec) -> Spec:
    """Equal specs as one object, so that keys made of them compare fast."""
    return spec


def spec_of(tensor: Tensor) -> Spec:
    if tensor.layout is not torch.strided:
        return _one(Spec(tuple(tensor.shape), (), tensor.dtype, 0, tensor.layout))
    return _one(
        Spec(
            tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, int(tensor.storage_offset())
        )
    )


def meta_of(spec: Spec) -> Tensor:
    """A tensor without memory that has this spec.

    Raises:
        NotImplementedError: it is sparse. The shapes of its parts depend on numbers.
    """
    if spec.layout is not torch.strided:
        raise NotImplementedError("sparse tensors are not inferred")
    extent = sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
    size = 0 if 0 in spec.shape else spec.offset + 1 + extent
    memory = torch.empty(max(size, spec.offset), dtype=spec.dtype, device="meta")
    return memory.as_strided(spec.shape, spec.stride, spec.offset)


class Gives(enum.Enum):
    """What an operation returns."""

    NUMBERS = enum.auto()  # also booleans: no tensors
    NOTHING = enum.auto()
    WRITTEN = enum.auto()  # the arguments that it has written to
    ONE = enum.auto()
    LIST = enum.auto()
    TUPLE = enum.auto()


@dataclass(frozen=True)
class Plan:
    """
    Args:
        written: the places of arguments that it writes to: positions, or names of named ones.
        results: how many there are, if that does not depend on the arguments.
    """

    func: Any
    name: str
    gives: Gives
    written: tuple[int | str, ...]
    results: int
    takes_local_tensors: bool
    draws_numbers: bool


_aten = torch.ops.aten
_TAKE_LOCAL_TENSORS = {
    _aten.copy_.default,
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
"""Indices are often made here."""


@functools.cache
def plan_of(func: Any) -> Plan:
    """
    Raises:
        NotImplementedError: the operation cannot be run on a remote tensor.
    """
    name = str(func)
    if func.namespace not in _NAMESPACES:
        raise NotImplementedError(
            f"{name} does not work on remote tensors, which know torch's own operations only: "
            "use .cpu() first, or run it on the worker with a function or module of your own"
        )
    if torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(
            f"{name} would change the shape of a remote tensor in place: use the operation that "
            "returns a new tensor, or do it in a method of the module's class (also to register "
            "parametrizations)"
        )
    returns = func._schema.returns
    written = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if not returns:
        gives = Gives.NOTHING
    elif any("Tensor" not in str(r.type) for r in returns):
        gives = Gives.NUMBERS
    elif all(r.alias_info is not None and r.alias_info.is_write for r in returns):
        gives = Gives.WRITTEN
    elif len(returns) == 1:
        gives = Gives.LIST if "List" in str(returns[0].type) else Gives.ONE
    else:
        gives = Gives.TUPLE
    takes_local_tensors = gives is Gives.NUMBERS or func in _TAKE_LOCAL_TENSORS
    draws_numbers = torch.Tag.nondeterministic_seeded in func.tags
    return Plan(func, name, gives, written, len(returns), takes_local_tensors, draws_numbers)


_inferred: dict[tuple[Any, ...], tuple[Spec, ...] | None] = {}


def infer(
    key: tuple[Any, ...], plan: Plan, arguments: Callable[[], tuple[Sequence[Any], dict[str, Any]]]
) -> tuple[Spec, ...] | None:
    """The results' specs, or None if they depend on numbers.

    Args:
        key: what they may depend on.
        arguments: gives them, with meta tensors.

    Raises:
        RuntimeError: torch's own, for arguments that do not fit.
    """
    found = _inferred.get(key, ...)
    if found is not ...:
        return found
    if len(_inferred) >= _MOST_INFERRED:
        _inferred.clear()
    found = _inferred[key] = _infer(plan, arguments)
    return found


def _infer(
    plan: Plan, arguments: Callable[[], tuple[Sequence[Any], dict[str, Any]]]
) -> tuple[Spec, ...] | None:
    try:
        args, kwargs = arguments()
        results = plan.func(*args, **kwargs)
    except NotImplementedError:  # there is no meta kernel, or there can be none
        return None
    except RuntimeError as error:
        if "meta" in str(error):  # one that wanted numbers
            return None
        raise
    if isinstance(results, Tensor):
        results = (results,)
    return tuple(spec_of(result) for result in results or ())


@functools.lru_cache(4096)
def function(name: str) -> Any:
    """The operation of this name.

    Raises:
        NotImplementedError: it is none of torch's own.
    """
    namespace, _, rest = name.partition(".")
    found: Any = None
    if namespace in _NAMESPACES and rest.count(".") == 1:
        found = functools.reduce(getattr, rest.split("."), getattr(torch.ops, namespace))
    if not isinstance(found, torch._ops.OpOverload):
        raise NotImplementedError(f"{name} is not an operation of torch")
    return found


def kind_of(value: Any) -> Any:
    """What shapes may depend on. A number may decide about the dtype, but seldom by its value."""
    kind = type(value)
    if kind is float or kind is complex:
        return kind
    if kind is bool:  # equal to an int, and another dtype
        return kind, value
    return tuple(value) if kind is list else value


def written_by(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes to: tensors, or lists of them."""
    return [
        kwargs.get(place) if isinstance(place, str) else args[place]
        for place in plan.written
        if isinstance(place, str) or place < len(args)
    ]


def tensors_in(arguments: Sequence[Any]) -> Iterator[Tensor]:
    for each in arguments:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from tensors_in(each)
