"""An allow-list: which functions other workers may run here, and what their messages may build.

A pickle runs any callable that it names while it is loaded, so a list of functions protects only
together with an unpickler that finds nothing else. With an `AllowList`

- a call is refused by its function's name before its arguments are unpacked, and so is a function
  that is sent by value, which has no name;
- every stream (arguments, results, exceptions, telegrad's own messages) finds only a base set of
  types without side effects, telegrad's own data classes, and what the list names;
- a method of a remote value runs only if the class that defines it is on the list.

A name is compared before anything is imported. A prefix stands for what is *defined* below it, not
for what a module has imported, including other modules. Only classes and functions are found, never
a module's data, which a stream could change.

The functions that telegrad itself calls on other workers can be named by a message's head only, not
inside a stream. They check what they run, or `telegrad.rpc.functions.guarded` does. Values of this
worker that a message refers to are looked up after unpacking (`telegrad.wire.allowed.unpickler`).

Building is limited, too, by the standard library's unpickler in Python (some microseconds slower).
No stream sets the state (BUILD) of a class, a function or a member of an enumeration, which are not
part of it. numpy trusts what a stream says about a type or an array, and reads and writes memory by
it. So types get private copies, get their state once, and must be as numpy itself makes them; an
array is filled once.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import io
import pickle
import sys
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn

import torch

from telegrad.errors import NotAllowed, ProtocolError
from telegrad.wire.allowed.names import (
    BASE,
    BOUND,
    BY_VALUE,
    MAY_BE_NAMED,
    OWN_CLASSES,
    OWN_FUNCTIONS,
    OWN_PACKAGES,
    Place,
)
from telegrad.wire.allowed.unpickler import FOUND, AllowedUnpickler
from telegrad.wire.function_names import function_named, name_of

__all__ = ["AllowList", "Place", "loads_data"]


class AllowList:
    """
    Args:
        entries: functions, classes, modules, and dotted names or prefixes of names. A class
            includes its methods, a module or prefix everything that is defined below it.

    Raises:
        TypeError: `entries` is not a collection of these.
        ValueError: other workers cannot name an entry (a lambda, say).

    >>> allowed = AllowList([torch.add, "mypackage.remote"])
    >>> allowed.permits("torch", "add"), allowed.permits("os", "system")
    (True, False)
    """

    def __init__(self, entries: Collection[Any]) -> None:
        if isinstance(entries, str | bytes) or not isinstance(entries, Iterable):
            raise TypeError(
                "allow must be a collection of functions, classes, modules and dotted names, as "
                f"[torch.add, 'mypackage.remote'], or None; got {entries!r}"
            )
        self._functions: dict[Place, Any] = {}
        self._prefixes: set[str] = set()
        for entry in entries:
            self._add(entry)

    def _add(self, entry: Any) -> None:
        if isinstance(entry, str):
            if not entry or not all(part.isidentifier() for part in entry.split(".")):
                raise ValueError(f"allow: {entry!r} is not a dotted name")
            self._prefixes.add(entry)
        elif isinstance(entry, types.ModuleType):
            self._prefixes.add(entry.__name__)
        elif callable(entry):
            name = name_of(entry)
            if name is None:
                raise ValueError(
                    f"allow: {entry!r} has no name by which other workers could call it; define it "
                    "at the top of a module"
                )
            module, _, qualified = name.decode().partition("\0")
            if isinstance(entry, type):
                self._prefixes.add(f"{module}.{qualified}")
            else:
                self._functions[module, qualified] = entry
        else:
            raise TypeError(
                "allow takes functions, classes, modules and dotted names; got a "
                f"{type(entry).__name__}: {entry!r}"
            )

    def permits(self, module: str, qualified: str) -> bool:
        """Whether a name is on the list, whatever it stands for."""
        return (module, qualified) in self._functions or self._is_below(f"{module}.{qualified}")

    def _is_below(self, name: str) -> bool:
        while name:
            if name in self._prefixes:
                return True
            name = name.rpartition(".")[0]
        return False

    def function(self, name: bytes) -> Callable[..., Any]:
        """The function that a call names.

        Raises:
            NotAllowed: the list does not name it.
        """
        module, _, qualified = str(name, "utf-8", "replace").partition("\0")
        if (module, qualified) in OWN_FUNCTIONS:
            return function_named(name)
        found: Callable[..., Any] = self._find(module, qualified, "may not be run here")
        return found

    def given(self, func: Any) -> Callable[..., Any]:
        """A function that was passed to one of telegrad's own functions to be run: it must be one
        that a call may name, and not one of telegrad's own.

        Args:
            func: a function, or its name.

        Raises:
            NotAllowed
        """
        name = func if type(func) is bytes else name_of(func)
        if name is None:
            self.refuse_by_value()
        found: Callable[..., Any] = self.named_in_stream(name)
        return found  # and not `func`: this is what was checked

    def named_in_stream(self, name: Any) -> Any:
        """A function that a stream names instead of pickling it."""
        module, _, qualified = str(name, "utf-8", "replace").partition("\0")
        return self._find(module, qualified, "may not be run here")

    def refuse_by_value(self) -> NoReturn:
        """Refuses a function without a name."""
        _refuse_by_value()

    def check_method(self, value_type: type, name: str) -> None:
        """Checks whether others may call a method of values of a type.

        Raises:
            NotAllowed
        """
        if type(name) is not str:
            raise NotAllowed(f"a call names a method by {name!r} instead of a string")
        for cls in value_type.__mro__:
            if name in cls.__dict__:
                place = f"{cls.__module__}.{cls.__qualname__}"
                if self._is_below(place) or (place in OWN_CLASSES and not name.startswith("_")):
                    return
                _refuse(cls.__module__, f"{cls.__qualname__}.{name}", "may not be run here")
        _refuse(value_type.__module__, f"{value_type.__qualname__}.{name}", "may not be run here")

    def check_method_of(self, value: Any, name: str) -> None:
        """The same for one value, which must not have an attribute in place of the method.

        Raises:
            NotAllowed
        """
        cls = type(value)
        self.check_method(cls, name)
        if name in getattr(value, "__dict__", ()):
            raise NotAllowed(
                f"{cls.__qualname__}.{name} may not be run here: this {cls.__qualname__} has an "
                "attribute of that name in place of the method, and RpcOptions(allow=...) of this "
                "worker names methods of classes. Remove the attribute, or call a function",
                name=f"{cls.__module__}.{cls.__qualname__}.{name}",
            )

    def loads(self, stream: Any, *, buffers: Sequence[Any] = ()) -> Any:
        """`pickle.loads`, which builds only what is allowed."""
        return AllowedUnpickler(self, stream, buffers).load()

    def find_class(self, module: str, qualified: str) -> Any:
        """The class or function that a stream names."""
        plain = _plain_of_torch(module, qualified)
        if plain is not None:
            return plain
        if (module, qualified) in BASE:
            return function_named(f"{module}\0{qualified}".encode())
        if module == "builtins" or module == "telegrad.errors":
            space: Any = builtins if module == "builtins" else sys.modules[module]
            found = vars(space).get(qualified)
            if isinstance(found, type) and issubclass(found, BaseException):
                return found
        elif module.startswith(OWN_PACKAGES) and "." not in qualified and module in sys.modules:
            found = vars(sys.modules[module]).get(qualified)
            if isinstance(found, type) and found.__module__ == module and _is_data(found):
                return found
        return self._find(module, qualified, "may not be built here")

    def _find(self, module: str, qualified: str, what: str) -> Any:
        if not self.permits(module, qualified):
            _refuse(module, qualified, what)
        found: Any = function_named(f"{module}\0{qualified}".encode())
        if (module, qualified) in self._functions:
            if found is not self._functions[module, qualified]:
                _refuse(module, qualified, what)
            return found
        if not isinstance(found, FOUND) or not self._is_defined_below(found, module, qualified):
            _refuse(module, qualified, what)
        return found

    def _is_defined_below(self, found: Any, module: str, qualified: str) -> bool:
        """Whether what was found under an allowed name is defined there, and not imported."""
        place: Any = sys.modules[module]
        if isinstance(found, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return True
        for part in qualified.split(".")[:-1]:
            place = getattr(place, part)
            if not isinstance(place, type) or not self._is_below(_place_of(place)):
                return False
        if isinstance(found, torch.jit.ScriptFunction):
            return self._is_below(found.qualified_name.removeprefix("__torch__."))
        if isinstance(found, types.MethodDescriptorType):
            return True  # of a class that was checked above
        if isinstance(found, types.BuiltinFunctionType) and module.split(".")[0] == "torch":
            return str(found.__module__).split(".")[0] == "torch"
        return self._is_below(_place_of(found))


def _place_of(found: Any) -> str:
    return f"{found.__module__}.{found.__qualname__}"


def _plain_of_torch(module: str, qualified: str) -> Any:
    """A dtype, layout or memory format; None for anything else. They are pickled as "torch.float32"
    in any module that has imported torch."""
    if module != "torch" and not qualified.startswith("torch."):
        return None
    found = vars(torch).get(qualified.removeprefix("torch."))
    kinds = torch.dtype | torch.layout | torch.memory_format | torch.qscheme
    return found if isinstance(found, kinds) else None


def _is_data(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or issubclass(cls, tuple | enum.Enum)


def _refuse_by_value() -> NoReturn:
    raise NotAllowed(
        "a function that is sent by value (a lambda, a nested function, a bound method, a "
        "partial) may not be run here: with RpcOptions(allow=...), which this worker has, "
        "functions are found by their names. Define it at the top of a module, and name it in "
        "that option",
        name="",
    )


def _refuse(module: str, qualified: str, what: str) -> NoReturn:
    name = f"{module}.{qualified}"
    if name.startswith(BY_VALUE) or name in BOUND:
        _refuse_by_value()
    if module.partition(".")[0] == "telegrad" and name not in MAY_BE_NAMED:
        raise NotAllowed(
            f"{name} {what}: it is a part of telegrad that is not available on a worker with "
            "RpcOptions(allow=...). Use a function of your own that the option names",
            name=name,
        )
    package = module.partition(".")[0]
    is_public = not any(part.startswith("_") for part in name.split("."))
    if package in sys.stdlib_module_names or (package == "torch" and not is_public):
        raise NotAllowed(
            f"{name} {what}: RpcOptions(allow=...) of this worker does not name it. It is part of "
            f"{'Python' if package != 'torch' else 'torch, not of its public interface'}. Do not "
            "add it, which would let other workers use it with any arguments: name a function of "
            "your own that uses it, or send plain tensors and data",
            name=name,
        )
    if package == "torch":
        raise NotAllowed(
            f"{name} {what}: RpcOptions(allow=...) of this worker does not name it. If other "
            "workers may use it with any arguments, add this one function or class, and not all of "
            "torch, on the worker that refuses it; otherwise name a function of your own that uses "
            "it",
            name=name,
        )
    raise NotAllowed(
        f"{name} {what}: RpcOptions(allow=...) of this worker does not name it. If other workers "
        "may use it, add the function or class, its module, or a prefix of the name, on the worker "
        "that refuses it; it must be defined there, not imported",
        name=name,
    )


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ProtocolError(
            f"damaged message: it names {module}.{name}, and may hold only numbers and text"
        )


def loads_data(stream: Any) -> Any:
    """`pickle.loads` for builtin containers, numbers and text.

    Raises:
        ProtocolError: the stream holds something else.
    """
    return _DataUnpickler(io.BytesIO(stream)).load()
