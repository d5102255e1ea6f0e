"""`RRef[T]` in TorchScript: a script class per type, around the reference that Python has.

Its one attribute is the Python object itself, in a box; its methods are operators. A Python `RRef`
that is passed to a script function becomes an object of that class, whatever type its value has, as
with torch's RPC. An object that comes back to Python is an `RRef` again: a `_Returned`, which
shares the standing of the original and keeps it alive.

At the owner, a value that can be changed in place (a list, an object of a script class) is turned
into TorchScript's own form when a script first asks for it, and lives on in that form: what one
script function changes, all others see, and `to_here` elsewhere too.
"""

from __future__ import annotations

import functools
import pickle
import threading
import typing
from collections.abc import Callable
from typing import Any

from telegrad import rpc
from telegrad.compat.torchscript.compiling import (
    Exactly,
    compiled,
    core,
    fake_range,
    generating,
    jit_annotations,
    module_of,
    state,
)
from telegrad.compat.torchscript.kinds import Kind, describe, kind_named, kind_of, type_described
from telegrad.errors import RRefError
from telegrad.ids import RRefId
from telegrad.rpc.group.current import current_table
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.references.records import OwnerEntry
from telegrad.rpc.references.rref import RRef, rebuild_rref

_SOURCE = """
class RRef:
    def __init__(self, reference: Any):
        self._script_reference = reference

    def to_here(self, timeout: float = -1.0) -> T:
        box = torch.ops.telegrad.rref_value(self._script_reference, {name!r}, timeout, False).wait()
        if torch.jit.isinstance(box, Box):
            return box.value
        raise RuntimeError("unreachable")

    def local_value(self) -> T:
        box = torch.ops.telegrad.rref_value(self._script_reference, {name!r}, -1.0, True).wait()
        if torch.jit.isinstance(box, Box):
            return box.value
        raise RuntimeError("unreachable")

    def is_owner(self) -> bool:
        return torch.ops.telegrad.rref_is_owner(self._script_reference)

    def confirmed_by_owner(self) -> bool:
        return torch.ops.telegrad.rref_confirmed_by_owner(self._script_reference)

    def owner(self) -> WorkerInfo:
        return WorkerInfo(
            torch.ops.telegrad.rref_owner_name(self._script_reference),
            torch.ops.telegrad.rref_owner_id(self._script_reference),
        )

    def owner_name(self) -> str:
        return torch.ops.telegrad.rref_owner_name(self._script_reference)

    def __getstate__(self) -> str:
        return torch.ops.telegrad.rref_dumps(self._script_reference)

    def __setstate__(self, state: str) -> None:
        self._script_reference = torch.ops.telegrad.rref_loads(state)
"""

_WORKER_INFO = """
class WorkerInfo:
    def __init__(self, name: str, id: int):
        self.name = name
        self.id = id
"""

_IN_PLACE = {"ListType", "DictType", "ClassType", "TupleType", "OptionalType", "UnionType"}
_thread = threading.local()


class _Returned(RRef[Any]):
    """A reference that has been through TorchScript. The original is counted, not this one."""

    def __init__(self, original: RRef[Any]) -> None:
        self._original = original

    @property
    def _script_reference(self) -> Any:
        return boxed(self._original)

    @_script_reference.setter
    def _script_reference(self, box: Any) -> None:  # TorchScript does, on a bare object
        self._original = box.value

    def __del__(self) -> None:
        pass


def _shared(name: str) -> Any:
    def get(self: _Returned) -> Any:
        return getattr(self._original, name)

    def set_(self: _Returned, value: Any) -> None:
        setattr(self._original, name, value)

    return property(get, set_)


for _name in ("_table", "_record", "_type_future", "_profiling_future"):
    setattr(_Returned, _name, _shared(_name))


def boxed(rref: RRef[Any]) -> Any:
    """A reference as what TorchScript keeps of it. Its own type has no name in a saved module, so
    it is in a box, of which nothing but its being there is said."""
    return kind_of(core.PyObjectType.get()).box(rref)


# Under this name TorchScript asks a Python object for the attribute of its class.
RRef._script_reference = property(boxed)  # type: ignore[attr-defined]


class _ArrivingInfo(WorkerInfo):
    """What TorchScript makes to return a `WorkerInfo`: it sets the fields, and then is one."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "id":
            object.__setattr__(self, "__class__", WorkerInfo)


@functools.cache
def _scripted_worker_info() -> Any:
    """The class as it is called in scripts."""
    with generating:
        script_class = module_of(_WORKER_INFO).WorkerInfo
        type_ = compiled(script_class)
        for python_class in (WorkerInfo, _ArrivingInfo):  # the last one is what Python gets
            state._add_script_class(python_class, type_)
        return script_class


def worker_info_type() -> Any:
    return state._get_script_class(_scripted_worker_info())


_classes: dict[Kind, tuple[Any, type[_Returned]]] = {}
_reference_names: set[str] = set()


def _classes_of(kind: Kind) -> tuple[Any, type[_Returned]]:
    found = _classes.get(kind)
    if found is not None:
        return found
    with generating:
        if kind not in _classes:
            type_ = _compile(kind)
            python_class = type("RRef", (_Returned,), {"__module__": __name__})
            state._add_script_class(python_class, type_)
            _reference_names.add(type_.qualified_name())
            _classes[kind] = type_, python_class
        return _classes[kind]


def _compile(kind: Kind) -> Any:
    module = module_of(
        _SOURCE.format(name=kind.name),
        T=Exactly(kind.type),
        Box=Exactly(kind.box_type),
        WorkerInfo=_scripted_worker_info(),
    )
    type_ = compiled(module.RRef)
    for method in ("to_here", "local_value"):
        # The checks only tell the compiler what it may assume.
        name = f"{type_.qualified_name()}.{method}"
        graph = state._python_cu.find_function(name).graph
        for node in graph.findAllNodes("prim::isinstance"):
            with graph.insert_point_guard(node):
                node.output().replaceAllUsesWith(graph.insertConstant(True))
            node.destroy()
    return type_


def reference_type(value_type: Any) -> Any:
    """The script class of `RRef[value_type]`."""
    return _classes_of(kind_of(value_type))[0]


def is_reference_type(type_: Any) -> bool:
    return type_.kind() == "ClassType" and type_.qualified_name() in _reference_names


def returned(rref: RRef[Any], kind: Kind) -> RRef[Any]:
    """The reference as one that TorchScript knows the type of."""
    return _classes_of(kind)[1](rref._original if isinstance(rref, _Returned) else rref)


# -- values


class _InScript:
    """Where a value lives that a script function may have changed."""

    def __init__(self, kind: Kind, box: Any) -> None:
        self.kind = kind
        self.box = box

    def __call__(self) -> Any:
        return self.box.getattr("value")


def value_in_box(rref: RRef[Any], name: str, timeout: float, is_local: bool) -> Any:
    """What `to_here` and `local_value` give, as a box of the kind of that name."""
    kind = kind_named(name)
    is_module = kind is not None and kind.type.kind() == "InterfaceType"
    if is_module and not is_local and not rref.is_owner():
        raise RRefError(
            f"{rref} is an RRef to a ScriptModule. It can't be sent through RPC from owner, "
            f"{rref.owner()}, to here: call a function there that takes the reference"
        )
    value = rref.local_value() if is_local else rref.to_here(timeout)
    if kind is None:  # the function was compiled elsewhere, and loaded here
        kind = kind_of(_inferred(value))
    record = rref._record
    can_change = kind.type.kind() in _IN_PLACE and not is_reference_type(kind.type)
    if can_change and isinstance(record, OwnerEntry):
        return _box_of_owner(record, kind, value)
    return kind.box(value)


def is_here(rref: RRef[Any]) -> bool:
    """Whether the value is there without a wait; or the error."""
    record = rref._record
    return isinstance(record, OwnerEntry) and record.is_done


def _box_of_owner(entry: OwnerEntry, kind: Kind, value: Any) -> Any:
    with generating:  # two threads must not make two
        reader = entry.reader
        if not isinstance(reader, _InScript) or reader.kind is not kind:
            reader = entry.reader = _InScript(kind, kind.box(value))
        return reader.box


# -- types of references that Python made


def type_of_value(rref: RRef[Any]) -> Any:
    """The script type of the value behind a reference; asks its owner.

    Raises:
        RRefError: there is none.
    """
    if isinstance(rref, _Returned) and type(rref) is not _Returned:
        return next(kind.type for kind, (_, cls) in list(_classes.items()) if cls is type(rref))
    if rref.is_owner():
        description = _describe_owned(rref.rref_id)
    else:
        description = rpc.rpc_sync(rref.owner().id, _describe_owned, (rref.rref_id,))
    depth, inner = description
    type_ = type_described(inner)
    for _ in range(depth):
        type_ = reference_type(type_)
    return type_


def _describe_owned(rref_id: tuple[int, int]) -> tuple[int, Any]:
    """How often the value is a reference to a reference, and the type of what is behind that."""
    entry = current_table().entry(RRefId(*rref_id))
    value = entry.wait()  # ends as the function does that makes it
    if entry.type_hint is not None:
        return 0, describe(jit_annotations.ann_to_type(entry.type_hint, fake_range()))
    if not isinstance(value, RRef):
        return 0, describe(_inferred(value))
    if value.is_owner():
        depth, inner = _describe_owned(value.rref_id)
    else:
        depth, inner = rpc.rpc_sync(value.owner().id, _describe_owned, (value.rref_id,))
    return depth + 1, inner


def _inferred(value: Any) -> Any:
    inferred = core._jit_try_infer_type(value)
    if not inferred.success():
        raise RRefError(
            f"the type that a value of {type(value).__name__} has in TorchScript cannot be told "
            f"({inferred.reason()}); annotate the reference: RRef[...]"
        )
    return inferred.type()


# -- references in saved modules


def allow_pickling(is_allowed: bool) -> None:
    """Whether this thread may save modules that hold references."""
    _thread.may_pickle = is_allowed


def dumps(rref: RRef[Any]) -> str:
    if not getattr(_thread, "may_pickle", False):
        raise RRefError("RRef jit pickling is only allowed inside RPC calls")
    return pickle.dumps(rref._serialize()).hex()


def loads(state: str) -> Any:
    return boxed(rebuild_rref(pickle.loads(bytes.fromhex(state))))


def understanding(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.jit.annotations.try_ann_to_type` that knows telegrad's references."""

    def try_ann_to_type(annotation: Any, location: Any, resolve: Any = None) -> Any:
        if isinstance(annotation, Exactly):
            return annotation.type
        if annotation is RRef:
            raise RuntimeError(
                "Attempted to use RRef without a contained type. Please add a contained type, "
                "e.g. RRef[int]"
            )
        if annotation is WorkerInfo:
            return worker_info_type()
        if typing.get_origin(annotation) is RRef:
            (inner,) = typing.get_args(annotation)
            return reference_type(jit_annotations.ann_to_type(inner, location))
        return original(annotation, location, resolve)

    return try_ann_to_type


def inferring(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`torch._C._jit_try_infer_type` that knows the types of references, also in containers."""

    def try_infer_type(value: Any) -> Any:
        type_ = _type_with_references(value)
        return original(value) if type_ is None else core.InferredType(type_)

    return try_infer_type


def _type_with_references(value: Any) -> Any:
    """None if there is no reference in the value."""
    if isinstance(value, RRef):
        return reference_type(type_of_value(value))
    if isinstance(value, list | tuple | dict) and value:
        items = list(value.values()) if isinstance(value, dict) else value
        types = [_type_with_references(item) for item in items]
        if all(type_ is None for type_ in types):
            return None
        if isinstance(value, list):
            return core.ListType(types[0])
        if isinstance(value, dict):
            keys = core._jit_try_infer_type(next(iter(value))).type()
            return core.DictType(keys, types[0])
        return core.TupleType(
            [
                core._jit_try_infer_type(item).type() if type_ is None else type_
                for item, type_ in zip(value, types, strict=True)
            ]
        )
    return None
