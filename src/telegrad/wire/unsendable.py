"""What is found out about a value after it could not be packed or unpacked.

Packing does no bookkeeping for error messages. When it fails, `locate` tries the parts of the value
one by one until it finds the smallest one that fails. When unpacking fails, `missing_global` finds
a name that this process does not have, and `arguments_in` the references in the stream.
"""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import pickle
import pickletools
import reprlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["arguments_in", "describe_type", "locate", "missing_global"]

_DEPTH = 64

Probe = Callable[[Any], Exception | None]


def locate(
    value: Any, probe: Probe, root: str, labels: Sequence[str] | None
) -> tuple[str, Any, Exception | None]:
    """The path of the innermost part of `value` for which `probe` fails, the part, the failure."""
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
    """The name of a value's type as a program writes it."""
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
        return  # a class is sent by its name, a script module as a whole
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
    """What is sent along with a function that is sent by value."""
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
    """The names in a stream, found without running it."""
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


class _Nothing:
    """Accepts everything that a pickle does with an object, and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    append = extend = __setitem__ = __setstate__ = __call__


class _CallFinder(pickle.Unpickler):
    def __init__(self, stream: bytes, place: tuple[str, str], found: Callable[..., Any]) -> None:
        super().__init__(io.BytesIO(stream), buffers=itertools.repeat(b""))
        self._place = place
        self._found = found

    def find_class(self, module: str, name: str) -> Any:
        return self._found if (module, name) == self._place else _Nothing


def arguments_in(stream: bytes | bytearray | memoryview, function: Any) -> list[tuple[Any, ...]]:
    """The arguments of all calls of `function` in a pickle, found without importing or running
    anything.

    It serves references in a message that cannot be loaded (a class is missing here, or its
    constructor raises): they must be ended all the same.
    """
    calls: list[tuple[Any, ...]] = []

    def found(*args: Any) -> _Nothing:
        calls.append(args)
        return _Nothing()

    place = (function.__module__, function.__qualname__)
    try:
        _CallFinder(bytes(stream), place, found).load()
    except Exception:  # noqa: BLE001 - it is damaged: this is what precedes the damage
        return calls
    return calls
