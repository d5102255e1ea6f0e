"""What an allow-list means for a module that others use: which methods of its parts they may call,
and which attributes they may read and set. Without a list nothing is refused.

A method may run if the class that defines it is on the list, `forward` included. So a part whose
class is not on the list runs as a part of the whole only. An attribute is read without running code
of other classes, and set to nothing but plain data. So `set_attribute` cannot replace a method.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import nn

from telegrad.errors import NotAllowed
from telegrad.rpc.group import current

__all__ = ["FORWARD", "check_method", "check_read", "check_set", "check_shown", "part_at"]

FORWARD = "__call__"
"""The name of the method that runs `forward` with its hooks."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_MISSING = object()


def part_at(module: nn.Module, path: str) -> nn.Module:
    """`module.get_submodule(path)`, which with an allow-list reads no properties on its way.

    Raises:
        AttributeError: there is no such part.
    """
    if current.current().allowed is None:
        return module.get_submodule(path)
    part: Any = module
    for name in path.split(".") if path else ():
        part = part._modules.get(name)
        if not isinstance(part, nn.Module):
            raise AttributeError(f"{type(module).__qualname__} has no part {path!r}")
    found: nn.Module = part
    return found


def check_method(part: nn.Module, method: str) -> None:
    """
    Raises:
        NotAllowed: others may not call this method of a part.
    """
    allowed = current.current().allowed
    if allowed is None:
        return
    if type(method) is str and method == FORWARD and type(part).__call__ is nn.Module.__call__:
        method = "forward"  # which is what it runs
    allowed.check_method_of(part, method)


def check_read(part: nn.Module, name: str) -> None:
    """
    Raises:
        NotAllowed: others may not ask for this attribute.
    """
    allowed = current.current().allowed
    if allowed is None:
        return
    cls = type(part)
    if type(name) is not str or name.startswith("_"):
        raise _refused(part, name, "may not be read from other workers")
    found = inspect.getattr_static(cls, name, _MISSING)
    if found is _MISSING:
        if cls.__getattr__ is not nn.Module.__getattr__ and name not in part.__dict__:
            allowed.check_method(cls, "__getattr__")
    elif not isinstance(found, _PLAIN):  # a method, or a property, which runs when it is read
        allowed.check_method(cls, name)


def check_set(part: nn.Module, name: str, value: Any) -> None:
    """
    Raises:
        NotAllowed: others may not give an attribute this value.
    """
    allowed = current.current().allowed
    if allowed is None:
        return
    cls = type(part)
    what = "may not be set from other workers"
    if type(name) is not str or name.startswith("_"):
        raise _refused(part, name, what)
    if not _is_data(value):
        raise _refused(part, name, f"{what} to a {type(value).__name__}, only to plain data")
    found = inspect.getattr_static(cls, name, None)
    if isinstance(found, property):
        allowed.check_method(cls, name)
    elif not _is_data(found):
        raise _refused(part, name, f"{what}: its class has a method or attribute of that name")
    old = part.__dict__.get(name)
    if callable(old):
        raise _refused(part, name, f"{what}: it can be called")
    if cls.__setattr__ is not nn.Module.__setattr__:
        allowed.check_method(cls, "__setattr__")


def check_shown(part: nn.Module) -> None:
    """
    Raises:
        NotAllowed: others may not ask for the `repr` of a part, which runs methods of all of its
            parts.
    """
    allowed = current.current().allowed
    if allowed is None:
        return
    for each in part.modules():
        for name in ("__repr__", "extra_repr", "_get_name"):
            method = getattr(type(each), name, None)
            is_of_torch = isinstance(method, types.FunctionType) and method.__module__.startswith(
                "torch.nn.modules."
            )
            if not is_of_torch:
                allowed.check_method(type(each), name)


def _is_data(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is dict:
        return all(_is_data(k) and _is_data(v) for k, v in value.items())
    return kind in (list, tuple, set, frozenset) and all(map(_is_data, value))


def _refused(part: nn.Module, name: Any, what: str) -> NotAllowed:
    cls = type(part)
    return NotAllowed(
        f"{cls.__qualname__}.{name} {what}. Worker {current.current().info.name!r} has "
        "RpcOptions(allow=...): write a method that does it, in a class that the option names",
        name=f"{cls.__module__}.{cls.__qualname__}.{name}",
    )
