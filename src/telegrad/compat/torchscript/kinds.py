"""What TorchScript needs for the values of one type: made once per type, when it is asked for.

A value that comes from Python must become one of the interpreter's, of exactly the static type of
the place it goes to; to let torch guess from the value fails for an empty list, a None, an
interface. A **box** does it: an object of a script class whose one attribute has the type. Setting
the attribute converts the value, the operator returns the box, and the graph takes the attribute.

A **typed future** is made from one that Python completes: a forked script function waits for that
and converts what it holds. The interpreter suspends it, so no thread is blocked. Python also keeps
a failure as a plain value, which is raised here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from telegrad.compat.torchscript import at_exit
from telegrad.compat.torchscript.compiling import (
    PREFIX,
    Exactly,
    compiled,
    core,
    generating,
    module_of,
    state,
)
from telegrad.errors import RemoteError
from telegrad.rpc.calls.outcome import again

_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_place(error: BaseException) -> BaseException:
    """The exception whose text says on which worker it was raised, if that was another one."""
    return error.__cause__ if isinstance(error.__cause__, RemoteError) else error


def telling_where(operator: Callable[_P, _R]) -> Callable[_P, _R]:
    """An operator that raises what another worker has raised."""

    @functools.wraps(operator)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return operator(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - it is raised again
            raise with_place(error) from None

    return wrapper


Description = tuple[Any, ...]

_SIMPLE: dict[str, Any] = {
    "TensorType": core.TensorType,
    "IntType": core.IntType,
    "FloatType": core.FloatType,
    "ComplexType": core.ComplexType,
    "BoolType": core.BoolType,
    "StringType": core.StringType,
    "NoneType": core.NoneType,
    "AnyType": core.AnyType,
    "NumberType": core.NumberType,
    "DeviceObjType": core.DeviceObjType,
}


def describe(type_: Any) -> Description:
    """
    Raises:
        RuntimeError: there is no description of such a type.
    """
    kind = type_.kind()
    if kind in _SIMPLE:
        return (kind,)
    if kind in ("ListType", "OptionalType", "FutureType"):
        return kind, describe(type_.getElementType())
    if kind == "DictType":
        return kind, describe(type_.getKeyType()), describe(type_.getValueType())
    if kind == "TupleType":
        return kind, *(describe(element) for element in type_.elements())
    name = type_.annotation_str
    # The names of generated classes count them: on another worker they are others.
    if kind in ("ClassType", "InterfaceType") and f".{PREFIX}" not in name:
        return kind, name
    raise RuntimeError(f"a TorchScript type {type_} cannot be told to another worker")


def type_described(description: Description) -> Any:
    """
    Raises:
        RuntimeError: it is a class that this process has not compiled.
    """
    kind, *parts = description
    if kind in _SIMPLE:
        return _SIMPLE[kind].get()
    if kind == "ClassType":
        return _known(state._python_cu.get_class(parts[0]), parts[0])
    if kind == "InterfaceType":
        return _known(state._python_cu.get_interface(parts[0]), parts[0])
    inner = [type_described(part) for part in parts]
    if kind == "TupleType":
        return core.TupleType(inner)
    return getattr(core, kind)(*inner)


def _known(type_: Any, name: str) -> Any:
    if type_ is None:
        raise RuntimeError(f"this worker has no TorchScript type {name}: import its module here")
    return type_


_FUTURE = """
@torch.jit.ignore
def convert(value: Any) -> T:
    return unpack(value)

def wait_for(future: Future[Any]) -> T:
    return convert(future.wait())

def typed(future: Future[Any]) -> Future[T]:
    return torch.jit.fork(wait_for, future)
"""

_BOX = """
class Box:
    def __init__(self, value: T):
        self.value = value
"""

_kinds: dict[str, Kind] = {}


class Kind:
    """All that is made for one type.

    Attributes:
        type: torch's object for it.
        name: how it is written; the same for equal types.
        number: counts the kinds.
    """

    def __init__(self, type_: Any, name: str, number: int) -> None:
        self.type = type_
        self.name = name
        self.number = number
        # Made when they are needed.
        self._box_type: Any = None
        self._typed: Any = None
        self._typed_and_counted: Any = None

    def prepare(self) -> None:
        """Makes what calls of functions need that return this type: so that it is compiled when
        they are, and not by the thread that calls first."""
        with generating:
            if self._typed_and_counted is None:
                self._typed_and_counted = self._make_typed(at_exit.converted(unpack))

    @property
    def box_type(self) -> Any:
        if self._box_type is None:
            with generating:
                if self._box_type is None:
                    self._box_type = compiled(module_of(_BOX, T=Exactly(self.type)).Box)
        return self._box_type

    def box(self, value: Any) -> Any:
        """The value as one of TorchScript's, in a box.

        Raises:
            RuntimeError: it is of another type.
        """
        box = core._create_object_with_type(self.box_type)
        try:
            box.setattr("value", value)
        except RuntimeError:
            inferred = core._jit_try_infer_type(value)
            if not isinstance(value, bool | int | float | complex) or not inferred.success():
                raise
            # A number where a tensor is declared: torch's RPC lets it pass, too.
            return kind_of(inferred.type()).box(value)
        return box

    def _make_typed(self, unpack: Any) -> Any:
        module = module_of(_FUTURE, T=Exactly(self.type), unpack=unpack)
        module.wait_for = compiled(module.wait_for)
        return compiled(module.typed)

    def future(self, future: Any) -> Any:
        """A future of this type, which ends as the given one does."""
        if self._typed is None:
            with generating:
                self._typed = self._typed or self._make_typed(unpack)
        return self._typed(future)

    def future_of_call(self, future: Any) -> Any:
        """The same, for the future of a call: the process does not end before its conversion."""
        if self._typed_and_counted is None:
            self.prepare()
        at_exit.will_convert()
        return self._typed_and_counted(future)


def unpack(value: Any) -> Any:
    """What a future that was completed from Python holds: the value, or the failure."""
    if isinstance(value, BaseException):
        raise again(with_place(value))
    return value


def kind_of(type_: Any) -> Kind:
    name = type_.annotation_str
    kind = _kinds.get(name)
    if kind is None:
        with generating:
            kind = _kinds.setdefault(name, Kind(type_, name, len(_kinds)))
    return kind


def kind_named(name: str) -> Kind | None:
    """The kind of a type that was met before in this process."""
    return _kinds.get(name)
