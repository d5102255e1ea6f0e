"""The worker's side of modules that another process uses like its own: see `telegrad.nn.module`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from telegrad.autograd.caller_modes import CallerModes, entered
from telegrad.autograd.plain import Stays, export_leaves
from telegrad.nn.allowed_parts import (
    FORWARD,
    check_method,
    check_read,
    check_set,
    check_shown,
    part_at,
)
from telegrad.rpc.calls.outcome import describe_function, described_by_arguments
from telegrad.rpc.group import current
from telegrad.tensors.operations import Spec, spec_of
from telegrad.tensors.table import Before, Table, answer, control, export, table_before
from telegrad.wire.function_names import function_named

__all__ = [
    "FORWARD",
    "ModuleThere",
    "PartThere",
    "Reference",
    "TensorThere",
    "attribute",
    "call_method",
    "copy_module",
    "extra_representation",
    "extra_state",
    "made_in",
    "make",
    "representation",
    "set_attribute",
    "set_extra_state",
    "submit_method",
]


@dataclass(frozen=True)
class TensorThere:
    """A parameter or buffer. Those that are tied have one id."""

    id: int
    spec: Spec
    requires_grad: bool


@dataclass(frozen=True)
class PartThere:
    """
    Args:
        path: its name within the whole module; empty for that itself.
        same_as: the path under which the same part was met before.
    """

    path: str
    same_as: str | None
    cls: tuple[str, str]
    is_training: bool
    parameters: dict[str, TensorThere | None]
    buffers: dict[str, TensorThere | None]
    not_persistent: frozenset[str]


@dataclass(frozen=True)
class ModuleThere:
    id: int
    parts: list[PartThere]


@dataclass(frozen=True)
class Reference:
    """A remote tensor among the arguments of a call: it is there already."""

    id: int
    requires_grad: bool


class Made:
    """A module that a caller has here.

    Args:
        bound: the ids of its tensors by their names.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.bound: dict[str, int] = {}

    def replaced_buffers(self, table: Table, path: str) -> list[tuple[str, TensorThere]]:
        """A method of a part may have put other tensors in the places of buffers: these are what
        the caller means by their names from now on."""
        found = []
        part = part_at(self.module, path)
        for name, buffer in part.named_buffers(prefix=path, remove_duplicate=False):
            id_ = self.bound.get(name)
            if id_ in table.things and table.things[id_] is not buffer:
                self.bound[name] = new = table.keep(buffer)
                found.append((name, TensorThere(new, spec_of(buffer), buffer.requires_grad)))
        return found


@answer
def make(table: Table, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> ModuleThere:
    """
    Args:
        cls: a class or function, or its name.
    """
    allowed = current.current().allowed
    if allowed is not None:
        cls = allowed.given(cls)
    elif isinstance(cls, bytes):
        cls = function_named(cls)
    made = cls(*args, **kwargs)
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"telegrad.module() needs a function that returns an nn.Module, and "
            f"{describe_function(cls)} returned a {type(made).__name__}"
        )
    table.has_had_modules = True
    return _describe(table, made)


def _describe(table: Table, real: nn.Module) -> ModuleThere:
    made = Made(real)
    ids: dict[int, int] = {}  # by identity: tied tensors have one id

    def there(name: str, tensor: Tensor | None) -> TensorThere | None:
        if tensor is None:
            return None
        if is_lazy(tensor):
            raise TypeError(
                f"{name!r} of a {type(real).__name__} has no shape before the first forward: make "
                "the module in a function that runs it once, and returns it"
            )
        if id(tensor) not in ids:
            ids[id(tensor)] = table.keep(tensor)
        made.bound[name] = ids[id(tensor)]
        return TensorThere(ids[id(tensor)], spec_of(tensor), tensor.requires_grad)

    paths: dict[int, str] = {}
    parts: list[PartThere] = []
    for path, part in real.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        cls = type(part)
        same_as = paths.get(id(part))
        paths.setdefault(id(part), path)
        parts.append(
            PartThere(
                path=path,
                same_as=same_as,
                cls=(cls.__module__, cls.__qualname__),
                is_training=part.training,
                parameters={k: there(dot + k, p) for k, p in part._parameters.items()},
                buffers={k: there(dot + k, b) for k, b in part._buffers.items()},
                not_persistent=frozenset(part._non_persistent_buffers_set),
            )
        )
    return ModuleThere(table.keep(made), parts)


@answer
def copy_module(table: Table, key: int, path: str) -> ModuleThere:
    return _describe(table, copy.deepcopy(made_in(table, key).module))


@control("bind")
def _bind(table: Table, args: tuple[Any, ...]) -> None:
    key, changes = args
    made = made_in(table, key)
    for name, (id_, requires_grad) in changes.items():
        path, _, last = name.rpartition(".")
        part = part_at(made.module, path)
        tensors: dict[str, Any] = part._parameters if last in part._parameters else part._buffers
        if id_ is None:
            tensors[last] = None
            made.bound.pop(name, None)
            continue
        tensor = table.thing(id_)
        if tensors is part._parameters and not isinstance(tensor, nn.Parameter):
            tensor = table.things[id_] = nn.Parameter(tensor, requires_grad)
        tensors[last] = tensor.requires_grad_(requires_grad)
        made.bound[name] = id_


@control("train")
def _train(table: Table, args: tuple[Any, ...]) -> None:
    key, changes = args
    made = made_in(table, key)
    for path, is_training in changes.items():
        part_at(made.module, path).training = bool(is_training)


def made_in(table: Table, key: int) -> Made:
    made = table.thing(key)
    if not isinstance(made, Made):
        raise TypeError(f"a module was expected, and not a {type(made).__name__}")
    return made


def call_method(
    before: Before,
    key: int,
    path: str,
    method: str,
    modes: CallerModes | None,
    leaf_ids: Sequence[int],
    args: Any,
    kwargs: dict[str, Any],
) -> tuple[Any, list[tuple[str, TensorThere]]]:
    """
    Args:
        leaf_ids: of the parameters whose gradients the caller wants. Those of remote tensors among
            the arguments follow.

    Returns:
        what the method returns, and the buffers that it has replaced.
    """
    table = table_before(before)
    made = made_in(table, key)
    part = part_at(made.module, path)
    leaves: list[Tensor] = [table.thing(each) for each in leaf_ids]

    def resolve(value: Any) -> Any:
        if not isinstance(value, Reference):
            return value
        tensor = table.thing(value.id).detach()
        if value.requires_grad:
            leaves.append(tensor.requires_grad_())
        return tensor

    args, kwargs = tree_map(resolve, args), tree_map(resolve, kwargs)
    if leaves:
        export_leaves(leaves, partial(export, table))
    check_method(part, method)
    with entered(modes):
        result = getattr(part, method)(*args, **kwargs)
    return result, made.replaced_buffers(table, path)


def submit_method(before: Before, *args: Any) -> Stays:
    """`call_method`, whose result stays here: the caller is only told which buffers are new."""
    result, replaced = call_method(before, *args)
    return Stays(tree_map(_behind_a_node, result), replaced)


def _behind_a_node(value: Any) -> Any:
    """A parameter that is returned as it is would get its gradient from every fetch of the result
    by itself, not in the pass of the call."""
    if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
        return value.view_as(value)
    return value


def _part(table: Table, key: int, path: str) -> nn.Module:
    return part_at(made_in(table, key).module, path)


@answer
def attribute(table: Table, key: int, path: str, name: str) -> tuple[bool, Any]:
    """Whether it is a method, or else its value."""
    part = _part(table, key, path)
    check_read(part, name)
    if not hasattr(part, name):
        raise AttributeError(f"{type(part).__name__!r} object has no attribute {name!r}")
    value = getattr(part, name)
    if callable(value) and hasattr(type(part), name):
        return True, None
    return False, value


@answer
def set_attribute(table: Table, key: int, path: str, name: str, value: Any) -> None:
    part = _part(table, key, path)
    check_set(part, name, value)
    setattr(part, name, value)


@answer
def extra_state(table: Table, key: int, path: str) -> Any:
    part = _part(table, key, path)
    check_method(part, "get_extra_state")
    return part.get_extra_state()


@answer
def set_extra_state(table: Table, key: int, path: str, state: Any) -> None:
    part = _part(table, key, path)
    check_method(part, "set_extra_state")
    part.set_extra_state(state)


@answer
def representation(table: Table, key: int, path: str) -> str:
    part = _part(table, key, path)
    check_shown(part)
    return repr(part)


@answer
def extra_representation(table: Table, key: int, path: str) -> str:
    part = _part(table, key, path)
    check_shown(part)
    return part.extra_repr()


def _described(args: Sequence[Any]) -> str:
    path, method = args[2], args[3]
    what = "a remote module" if not path else f"{path!r} of a remote module"
    return f"the call of {what if method == FORWARD else f'method {method!r} of {what}'}"


described_by_arguments(call_method, _described)
