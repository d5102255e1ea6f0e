"""The unpickler of a worker with an allow-list: it finds what the list lets it find, and builds
nothing that others rely on. See `telegrad.wire.allowed.allow_list`."""

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
from telegrad.wire.deferred import Deferred
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
        self._deferred = Deferred()
        self._unstated: list[Any] = []
        """Types of numpy's that were made and not given their state yet."""

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
                f"a value changes {target!r}, which is not its own: "
                "RpcOptions(allow=...) of this worker forbids that",
            )
        if isinstance(target, np.ndarray) and target.size:
            raise NotAllowed("a value fills a numpy array that is in use already")
        if isinstance(target, np.dtype):
            self._state_dtype(target)
        else:
            super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def _new_dtype(self, name: str, align: bool = False, copy: bool = True) -> np.dtype[Any]:
        if type(name) is not str:
            raise NotAllowed(f"a type of numpy's is made of {name!r}, and not of its name")
        made: np.dtype[Any] = np.dtype(name, align, True)  # a copy: the others are shared by all
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
            raise NotAllowed("a value holds a type of numpy's that numpy would not make")

    def _is_natural(self, dtype: np.dtype[Any]) -> bool:
        """Whether it is what numpy makes of its parts, all of which have their state."""
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
