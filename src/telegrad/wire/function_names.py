"""Names of functions, which travel in place of the functions themselves.

The target of a call is nearly always something that any process finds by import: a function of a
module, a class, a static method, `torch.add`. It travels as ``b"module\\0qualified.name"``.

A function has a name only if looking it up *now* finds this very object. That is checked at each
call (one attribute lookup), because a decorator, a reload or a test may have bound the name anew.
`function_named` looks it up each time for the same reason. Only the search for the right name is
cached, by identity and with a weak reference, so the cache keeps no closure alive.

Names are not a sandbox: a peer may call any function that it can name. Peers are authenticated.
"""

from __future__ import annotations

import importlib
import struct
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from telegrad.drop_in import torch_phrase
from telegrad.errors import SerializationError

__all__ = ["function_named", "name_in", "name_of", "pack_name"]

_LENGTH = struct.Struct("<H")

# Builtins of torch have no usable name of their own; this is where programs find them.
_TORCH_PLACES = (
    "torch",
    "torch.nn.functional",
    "torch.linalg",
    "torch.special",
    "torch.fft",
    "torch.sparse",
    "torch._C._nn",
)


class _Known:
    """A function whose name was found."""

    __slots__ = ("module", "name", "path", "target")

    def __init__(self, target: Any, name: bytes, module: str, path: tuple[str, ...]) -> None:
        self.target: Callable[[], Any] = target
        self.name = name
        self.module = module
        self.path = path


_known: dict[int, _Known] = {}
_places: dict[bytes, tuple[str, tuple[str, ...]]] = {}
_PLACES_LIMIT = 65_536  # peers choose the names, so the cache must have a limit
_main_by_value = False


def set_main_by_value(is_on: bool) -> None:
    """Whether the other workers run another script, so that nothing in `__main__` has a name."""
    global _main_by_value
    _main_by_value = is_on
    _known.clear()


def name_of(func: Any) -> bytes | None:
    """The name under which any process finds `func` by import; None if it must be pickled.

    Functions of `__main__` have names, too, because workers usually run the same script. They have
    none after `set_main_by_value(True)`, and in a notebook or an interactive session, where there
    is no file that the others could run.

    >>> import operator
    >>> name_of(operator.add)
    b'_operator\\x00add'
    >>> name_of(lambda: None) is None
    True
    """
    key = id(func)
    known = _known.get(key)
    if known is not None and known.target() is func:
        found: Any = sys.modules.get(known.module)
        try:
            for attribute in known.path:
                found = getattr(found, attribute)
        except AttributeError:
            found = None
        if found is func:
            return known.name
    return _search(func)


def pack_name(name: bytes) -> bytes:
    """The beginning of a call. If the name is empty, the function is among the arguments."""
    return _LENGTH.pack(len(name)) + name


def name_in(body: bytes, offset: int) -> tuple[bytes, int]:
    """The name in the call at `offset`, and where its arguments begin.

    Raises:
        struct.error: the body is too short for one.
    """
    (length,) = _LENGTH.unpack_from(body, offset)
    start = offset + _LENGTH.size
    end = start + length
    return body[start:end], end


def function_named(name: bytes) -> Callable[..., Any]:
    """What `name` stands for in this process; imports its module if necessary.

    Raises:
        SerializationError: the module cannot be imported, or has nothing of that name.
    """
    place = _places.get(name)
    if place is None:
        place = _parse(name)
    module, path = place
    try:
        found: Any = sys.modules[module]
        for attribute in path:
            found = getattr(found, attribute)
    except (KeyError, AttributeError):
        # It is not imported yet, or another thread is importing it.
        found = _import(module, path)
    return found  # type: ignore[no-any-return]


def _parse(name: bytes) -> tuple[str, tuple[str, ...]]:
    try:
        module, _, qualified = str(name, "utf-8").partition("\0")
    except UnicodeDecodeError as error:
        raise SerializationError(f"not the name of a function: {name[:80]!r}") from error
    path = tuple(qualified.split("."))
    if not module or not all(path):
        raise SerializationError(f"not the name of a function: {name[:80]!r}")
    if len(_places) >= _PLACES_LIMIT:
        _places.clear()
    place = _places[bytes(name)] = (module, path)
    return place


def _import(module: str, path: tuple[str, ...]) -> Any:
    qualified = ".".join(path)
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise SerializationError(
            f"module {module!r} cannot be imported on the worker that is called "
            f"({type(error).__name__}: {error}), so {module}.{qualified} cannot run there. Make "
            "the module importable on that worker, too (installed, or on PYTHONPATH)"
        ) from error
    for attribute in path:
        try:
            found = getattr(found, attribute)
        except AttributeError as error:
            raise SerializationError(
                f"the worker that is called has no {qualified!r} in {module}. Functions and "
                "classes are sent by name: define it at the top level of a file that all workers "
                'run or import, in the same version (not under "if rank == 0" or in a notebook '
                "cell), or pass a lambda" + torch_phrase("RPC pickler does not serialize its code")
            ) from error
    return found


def _search(func: Any) -> bytes | None:
    if isinstance(func, types.MethodType):
        return _name_of_class_method(func)
    for module, qualified in _candidates(func):
        path = tuple(qualified.split("."))
        if "<locals>" in path or "<lambda>" in path:
            continue
        found: Any = sys.modules.get(module)
        if module == "__main__" and (_main_by_value or not hasattr(found, "__file__")):
            continue  # other workers do not run this script, or there is none
        for attribute in path:
            found = getattr(found, attribute, None)
        if found is func:
            name = f"{module}\0{qualified}".encode()
            _remember(func, name, module, path)
            return name
    return None


def _name_of_class_method(method: types.MethodType) -> bytes | None:
    # A bound method is a new object at each access, so the class is cached instead.
    owner = method.__self__
    if not isinstance(owner, type):
        return None
    name = getattr(method.__func__, "__name__", "")
    prefix = name_of(owner)
    if prefix is None or not name or getattr(owner, name, None) != method:
        return None
    return prefix + b"." + name.encode()


def _candidates(func: Any) -> Iterator[tuple[str, str]]:
    """Where `func` may be found, most likely places first; the caller checks each."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        # Its text is "aten.add" or "aten.add.Tensor", which is its name under torch.ops.
        yield "torch", f"ops.{func}"
        return
    if isinstance(func, torch.jit.ScriptFunction):
        qualified = func.qualified_name.removeprefix("__torch__.")
        place, _, last = qualified.rpartition(".")
        yield place or "__main__", last
        return
    name: Any = getattr(func, "__name__", None)
    if not isinstance(name, str):
        return
    qualified = getattr(func, "__qualname__", name)
    if not isinstance(qualified, str):
        return
    module: Any = getattr(func, "__module__", None)
    if not isinstance(module, str):
        module = getattr(getattr(func, "__objclass__", None), "__module__", None)
    if isinstance(module, str):
        yield module, qualified
        if name != qualified:
            yield module, name  # functions of torch's boolean_dispatch have a wrong qualname
    if isinstance(func, types.BuiltinFunctionType):
        for place in _TORCH_PLACES:
            yield place, name
        yield "torch", f"Tensor.{name}"


def _remember(func: Any, name: bytes, module: str, path: tuple[str, ...]) -> None:
    key = id(func)
    target: Any

    def forget(reference: object) -> None:
        known = _known.get(key)
        if known is not None and known.target is reference:
            del _known[key]

    try:
        target = weakref.ref(func, forget)
    except TypeError:
        if not isinstance(func, types.MethodDescriptorType | types.WrapperDescriptorType):
            return

        # Methods of C types have no weak references, and live as long as their types.
        def target() -> Any:
            return func

    _known[key] = _Known(target, name, module, path)
