"""The unpickler of a worker with an allow-list: see `telegrad.wire.allowed.allow_list`.

A message may refer to values of this worker: a future or a stand-in among the arguments of a call.
A stream must not get hold of such a value while it is loaded, because a pickle can call it, set its
state, add to it and iterate over it, and so run methods of classes that are not on the list. So the
stream gets a mark without methods. After loading, marks in lists, tuples and dictionaries are
replaced; a mark anywhere else is refused.
"""

from __future__ import annotations

import enum
import functools
import io
import pickle
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import torch

from telegrad.errors import NotAllowed
from telegrad.wire.allowed.names import DEFERRED
from telegrad.wire.function_names import function_named

if TYPE_CHECKING:
    from telegrad.wire.allowed.allow_list import AllowList

__all__ = ["FOUND", "AllowedUnpickler"]

FOUND: Final = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,  # of a class
    types.MethodDescriptorType,
    torch.jit.ScriptFunction,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
_NEVER_BUILT: Final = (*FOUND, types.ModuleType, functools.partial, enum.Enum)

_InPython: Any = pickle._Unpickler


class AllowedUnpickler(_InPython):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

    def __init__(self, allowed: AllowList, stream: Any, buffers: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(stream), buffers=buffers)
        self._allowed = allowed
        self._deferred = _Deferred()
        self._unstated: list[Any] = []
        """The numpy types that were made and have no state yet."""

    def find_class(self, module: str, qualified: str) -> Any:
        if (module, qualified) == ("numpy", "dtype"):
            return self._new_dtype
        if (module, qualified) == ("telegrad.wire.function_names", "function_named"):
            return self._named
        if (module, qualified) in DEFERRED:
            return self._later(f"{module}\0{qualified}".encode())
        return self._allowed.find_class(module, qualified)

    def load(self) -> Any:
        return self._deferred.resolved(super().load())

    def _named(self, name: bytes) -> Any:
        module, _, qualified = str(name, "utf-8", "replace").partition("\0")
        if (module, qualified) in DEFERRED:
            return self._later(name)
        return self._allowed.named_in_stream(name)

    def _later(self, name: bytes) -> Callable[..., object]:
        return functools.partial(self._deferred.later, function_named(name))

    def load_build(self) -> None:
        target = self.stack[-2]
        if isinstance(target, _NEVER_BUILT):
            raise NotAllowed(
                f"a value changes {target!r}, which is not part of it: RpcOptions(allow=...) of "
                "this worker forbids that",
            )
        if isinstance(target, np.ndarray) and target.size:
            raise NotAllowed("a value fills a numpy array that has its contents already")
        if isinstance(target, np.dtype):
            self._state_dtype(target)
        else:
            super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def _new_dtype(self, name: str, align: bool = False, copy: bool = True) -> np.dtype[Any]:
        if type(name) is not str:
            raise NotAllowed(f"a numpy type is made from {name!r} instead of its name")
        made: np.dtype[Any] = np.dtype(name, align, True)  # a copy: without it the type is shared
        self._unstated.append(made)
        return made

    def _state_dtype(self, dtype: np.dtype[Any]) -> None:
        if not any(dtype is each for each in self._unstated):
            raise NotAllowed(f"a value changes numpy's {dtype!r}, which has its state already")
        super().load_build()
        self._unstated = [each for each in self._unstated if each is not dtype]
        try:
            is_natural = self._is_natural(dtype)
        except (TypeError, ValueError, KeyError):
            is_natural = False
        if not is_natural:
            raise NotAllowed("a value holds a numpy type that numpy itself would not make")

    def _is_natural(self, dtype: np.dtype[Any]) -> bool:
        """Whether numpy makes the same type from its parts, all of which have their state."""
        natural: np.dtype[Any]
        if dtype.subdtype is not None:
            natural = np.dtype(dtype.subdtype)
            parts = [dtype.subdtype[0]]
        elif dtype.names is not None and dtype.fields is not None:
            fields = [dtype.fields[name] for name in dtype.names]
            parts = [field[0] for field in fields]
            named = {"names": list(dtype.names), "formats": parts}
            places = {"offsets": [field[1] for field in fields], "itemsize": dtype.itemsize}
            natural = np.dtype({**named, **places}, align=dtype.isalignedstruct)  # type: ignore[call-overload]
            if len(dtype.fields) != len(fields):
                return False
        else:
            natural, parts = np.dtype(dtype.str), []
        return (
            natural == dtype
            and natural.flags == dtype.flags
            and natural.itemsize == dtype.itemsize
            and natural.alignment == dtype.alignment
            and not any(part is each for part in parts for each in self._unstated)
        )


class _Mark:
    """Recognised by its identity, so a stream cannot change what it stands for."""

    __slots__ = ()


class _Deferred:
    """The marks in one stream, and what they stand for."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[_Mark, Callable[..., Any], tuple[Any, ...]]] = {}
        self._values: dict[int, Any] = {}

    def later(self, function: Callable[..., Any], *args: Any) -> object:
        """A mark for `function(*args)`."""
        mark = _Mark()
        self._calls[id(mark)] = mark, function, args
        return mark

    def resolved(self, value: Any) -> Any:
        """The value of the stream, with each mark replaced by what it stands for.

        Raises:
            NotAllowed: a mark is neither in a list, tuple or dictionary nor the value itself.
            Exception: what finding a value raises.
        """
        if not self._calls:
            return value
        found = self._replaced(value, {})
        if len(self._values) < len(self._calls):
            raise NotAllowed(
                "a future of telegrad.submit or a stand-in of telegrad.object is inside a value "
                "that is not a list, tuple or dictionary, which RpcOptions(allow=...) of this "
                "worker forbids. Pass it as an argument of its own"
            )
        return found

    def _replaced(self, value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
        """
        Args:
            seen: by id, the containers that were visited, and what replaces them. It keeps them
                alive, so that their ids are not used again.
        """
        key = id(value)
        if key in self._calls:
            if key not in self._values:
                _, function, args = self._calls[key]
                self._values[key] = function(*args)
            return self._values[key]
        kind = type(value)
        if kind is not list and kind is not dict and not isinstance(value, tuple):
            return value
        if key in seen:
            return seen[key][1]
        if kind is list:
            seen[key] = value, value
            value[:] = [self._replaced(each, seen) for each in list(value)]
            return value
        if kind is dict:
            seen[key] = value, value
            for name, each in list(value.items()):
                new = self._replaced(each, seen)
                if new is not each:
                    value[name] = new
            return value
        items = list(tuple.__iter__(value))
        new_items = [self._replaced(each, seen) for each in items]
        if any(new is not old for new, old in zip(new_items, items, strict=True)):
            new = tuple.__new__(kind, new_items)
        else:
            new = value
        seen[key] = value, new
        return new
