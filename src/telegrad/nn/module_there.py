"""The worker's side of modules that another process uses like its own: see `telegrad.nn.module`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
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
from telegrad.nn.made import Changes, Made, PartThere
from telegrad.rpc.calls.outcome import describe_function, described_by_arguments
from telegrad.rpc.group import current
from telegrad.tensors.table import Before, Table, answer, control, export, table_before
from telegrad.wire.function_names import function_named

__all__ = [
    "FORWARD",
    "ModuleThere",
    "Reference",
    "attribute",
    "call_method",
    "changes_since",
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
class ModuleThere:
    id: int
    parts: Sequence[PartThere]


@dataclass(frozen=True)
class Reference:
    """A remote tensor among the arguments of a call: it is there already."""

    id: int
    requires_grad: bool


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
    made = Made(real, table)
    return ModuleThere(table.keep(made), made.describe())


@answer
def copy_module(table: Table, key: int, path: str) -> ModuleThere:
    return _describe(table, copy.deepcopy(made_in(table, key).module))


@control("bind")
def _bind(table: Table, args: tuple[Any, ...]) -> None:
    key, changes = args
    made = made_in(table, key)
    with made.changed_by_caller([id_ for id_, _ in changes.values() if id_ is not None]):
        for name, (id_, requires_grad) in changes.items():
            path, _, last = name.rpartition(".")
            part = part_at(made.module, path)
            is_parameter = last in part._parameters
            tensors: dict[str, Any] = part._parameters if is_parameter else part._buffers
            if id_ is None:
                tensors[last] = None
                continue
            tensor = table.thing(id_)
            if is_parameter and not isinstance(tensor, nn.Parameter):
                tensor = table.things[id_] = nn.Parameter(tensor, requires_grad)
            tensors[last] = tensor.requires_grad_(requires_grad)


@control("train")
def _train(table: Table, args: tuple[Any, ...]) -> None:
    key, changes = args
    made = made_in(table, key)
    with made.changed_by_caller():
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
    since: int = 0,
) -> tuple[Any, Changes | None]:
    """
    Args:
        leaf_ids: of the parameters whose gradients the caller wants. Those of remote tensors among
            the arguments follow.
        since: the version of the module that the caller knows.

    Returns:
        what the method returns, and what has changed in the module.
    """
    made, result, changes = _run_method(
        before, key, path, method, modes, leaf_ids, args, kwargs, since
    )
    return made.referred(result, with_tensors=method != FORWARD), changes


def _run_method(
    before: Before,
    key: int,
    path: str,
    method: str,
    modes: CallerModes | None,
    leaf_ids: Sequence[int],
    args: Any,
    kwargs: dict[str, Any],
    since: int = 0,
) -> tuple[Made, Any, Changes | None]:
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
    changes = made.changes(since)
    if changes is not None:
        made.check_reach(result, leaves)
    return made, result, changes


def submit_method(before: Before, *args: Any) -> Stays:
    """The same, for a result that stays here: the caller is only told what has changed.

    Raises:
        TypeError: the method returns a part of the module, which would go to the caller as a copy.
    """
    made, result, changes = _run_method(before, *args)
    if made.referred(result, with_tensors=False) is not result:
        raise TypeError(
            f"the method {args[2]!r} of a {type(made.module).__name__} returns the module or a "
            "part of it, which cannot be fetched by a future: call the method without submit"
        )
    return Stays(tree_map(_behind_a_node, result), changes)


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
    if callable(value) and hasattr(type(part), name) and not isinstance(value, nn.Module):
        return True, None
    return False, made_in(table, key).referred(value, with_tensors=True)


@answer
def set_attribute(
    table: Table, key: int, path: str, name: str, value: Any, since: int = 0
) -> Changes | None:
    part = _part(table, key, path)
    check_set(part, name, value)
    setattr(part, name, value)
    return made_in(table, key).changes(since)


@answer
def changes_since(table: Table, key: int, path: str, since: int) -> Changes | None:
    return made_in(table, key).changes(since)


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
