"""Finding out, after a failure, what it was in the value that failed.

Encoding does no bookkeeping for error messages. When it fails, the value is walked and its parts
are tried one by one until the smallest one that fails is found; that costs time only then.
"""

from __future__ import annotations

import functools
import importlib
import pickletools
import reprlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["describe_type", "locate", "missing_global"]

_DEPTH = 64

Probe = Callable[[Any], Exception | None]


def locate(
    value: Any, probe: Probe, root: str, labels: Sequence[str] | None
) -> tuple[str, Any, Exception | None]:
    """The path to the innermost part of `value` that `probe` fails on, the part and the failure."""
    seen: set[int] = set()
    path, part = root, value
    failure: Exception | None = None
    children = _labelled(value, labels) if labels is not None else _children(root, value)
    for _ in range(_DEPTH):
        seen.add(id(part))
        for child_path, child in children:
            if id(child) in seen or isinstance(child, int | float | str | bytes | None):
                continue
            child_failure = probe(child)
            if child_failure is not None:
                path, part, failure = child_path, child, child_failure
                children = _children(path, part)
                break
        else:
            break
    return path, part, failure


def describe_type(value: Any) -> str:
    """The name of a value's type, as one would write it."""
    cls = type(value)
    if cls.__module__ in ("builtins", "__main__"):
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def _labelled(value: Any, labels: Sequence[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple) and len(value) == len(labels):
        return iter(list(zip(labels, value, strict=True)))
    return _children("value", value)


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in value:
            yield f"{path} key {reprlib.repr(key)}", key
        for key, item in value.items():
            yield f"{path}[{reprlib.repr(key)}]", item
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field, item in zip(value._fields, value, strict=False):
            yield f"{path}.{field}", item
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item
    elif isinstance(value, set | frozenset):
        for item in value:
            yield f"{path} element {reprlib.repr(item)}", item
    elif isinstance(value, functools.partial):
        yield f"{path}.func", value.func
        yield from _children(f"{path}.args", value.args)
        yield from _children(f"{path}.keywords", value.keywords)
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _captured(path, value)
        return
    elif isinstance(value, type | torch.jit.ScriptModule):
        return  # a class goes by its name, a script module is saved as a whole
    if isinstance(value, BaseException):
        for index, item in enumerate(value.args):
            yield f"{path}.args[{index}]", item
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for name, item in list(attributes.items()):
            yield f"{path}.{name}", item
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield f"{path}.{name}", getattr(value, name)


def _captured(path: str, func: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function that is sent by value takes along."""
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=False):
        try:
            yield f"{path} variable {name!r}", cell.cell_contents
        except ValueError:
            continue  # not bound yet
    for index, item in enumerate(func.__defaults__ or ()):
        yield f"{path} default {index}", item
    for name in func.__code__.co_names:
        if name in func.__globals__:
            yield f"{path} global {name!r}", func.__globals__[name]


def missing_global(stream: bytes) -> tuple[str, str, Exception] | None:
    """The first module and name in a pickle stream that this process does not have."""
    for module, name in _globals(stream):
        try:
            found: Any = importlib.import_module(module)
            for attribute in name.split("."):
                found = getattr(found, attribute)
        except (ImportError, AttributeError) as error:
            return module, name, error
    return None


def _globals(stream: bytes) -> Iterator[tuple[str, str]]:
    """All that a stream names, found without running it."""
    memo: list[Any] = []
    pushed: list[Any] = [None, None]  # the last two pushes: what STACK_GLOBAL takes
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name == "MEMOIZE":
            memo.append(pushed[-1])
            continue
        if name in ("FRAME", "PROTO", "MARK"):
            continue
        if name == "STACK_GLOBAL":
            module, qualified = pushed
            if isinstance(module, str) and isinstance(qualified, str):
                yield module, qualified
            argument = None
        elif name in ("BINGET", "LONG_BINGET"):
            index = int(argument or 0)
            argument = memo[index] if index < len(memo) else None
        pushed = [pushed[-1], argument]
