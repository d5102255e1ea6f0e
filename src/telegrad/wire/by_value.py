"""Functions and classes of `__main__`, sent by value between a driver and its workers.

The workers of `telegrad.workers` do not run the driver's script, so they cannot find its
definitions by name. Instead:

- cloudpickle pickles a function or class once, and the bytes are kept until it changes. Each
  message carries them; a receiver that has this version already ignores them. So there is one class
  per class of the driver, `isinstance` works, and attributes of the class and defaults of the
  function keep what the worker has put into them.
- A definition that is run again, as in a notebook's cell, is another function or class.
- A function or class that returns to where it was defined is the original.
- Global variables that a function uses, directly or through others, travel with it. A worker has
  one namespace for all of them: its own `__main__`. A variable is set there only if its value
  differs from the one that was sent before. So functions share global variables of the worker, as
  they would in a module, and a changed setting of the driver still arrives. Variables of the driver
  never change.

All this is off until `travel` turns it on: if every worker runs the same script, functions are
found by their names.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import io
import itertools
import pickle
import secrets
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch.utils.weak import WeakIdKeyDictionary

from telegrad.forks import renewed
from telegrad.wire import function_names

__all__ = ["Role", "reduce_cached", "reduce_class", "reduce_function", "travel"]

_cloudpickle: Any = cloudpickle.cloudpickle
_Cached: Any = functools._lru_cache_wrapper
_KEPT = 1024  # received definitions that are kept although they may be unused

Token = tuple[Any, ...]
"""Tells values of a global variable apart."""

Values = dict[tuple[str, str], tuple[Token, Any]]
"""Global variables: module and name, token and value."""


class Role(enum.Enum):
    """The role of this process's `__main__` for the other workers."""

    NONE = enum.auto()
    """All workers run the same script."""
    HOME = enum.auto()
    """It is sent to the other workers."""
    AWAY = enum.auto()
    """It is filled by what other workers send."""


_marking = renewed(threading.RLock())  # one thread at a time names a definition
# One thread at a time loads definitions, so that no other sees a class that is not complete. As in
# an import, code of the program runs under the lock: metaclasses, and imports of modules.
_loading = renewed(threading.RLock())

_role = Role.NONE
_process = ""  # begins the ids and versions that this process gives
_serials = itertools.count()
_identities: Any = WeakIdKeyDictionary()  # serial numbers of objects
_marks: weakref.WeakKeyDictionary[Any, _Mark] = weakref.WeakKeyDictionary()
_packed: weakref.WeakKeyDictionary[Any, _Packed] = weakref.WeakKeyDictionary()
_objects: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # by id
_recent: collections.OrderedDict[str, Any] = collections.OrderedDict()  # received, by version
_filled: dict[str, str] = {}  # the versions of classes that were received, by id
_spaces: dict[str, dict[str, Any]] = {}  # global variables, by the name of their module
_set: dict[tuple[str, str], Token] = {}  # those that were set here


def travel(role: Role) -> None:
    """Sends definitions of `__main__` by value from now on; with NONE, by name."""
    global _role, _process
    _role = role
    _process = secrets.token_hex(8)
    tables: tuple[Any, ...] = (_marks, _packed, _objects, _recent, _filled, _spaces, _set)
    for table in tables:
        table.clear()
    function_names.set_main_by_value(role is not Role.NONE)


def _is_loose(module: Any) -> bool:
    """Whether other workers cannot import the module of that name."""
    return (
        _role is not Role.NONE
        and isinstance(module, str)
        and (module == "__main__" or module not in sys.modules)
    )


# -- which version


class _Mark:
    """Tells a definition from others and from its earlier versions.

    It keeps the definition's parts by weak references where possible: methods refer to their class,
    which would otherwise never be freed.
    """

    def __init__(self, id_: str, version: str, key: Any) -> None:
        self.id = id_
        self.version = version
        self._parts = tuple(map(_weakly, _parts_of(key)))

    def fits(self, key: Any) -> bool:
        """Whether the definition is unchanged."""
        parts = _parts_of(key)
        return len(parts) == len(self._parts) and all(
            held() is part and (part is not None or not isinstance(held, weakref.ref))
            for held, part in zip(self._parts, parts, strict=True)
        )


def _weakly(part: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(part)
    except TypeError:
        return lambda: part


def _mark(key: Any) -> _Mark:
    mark = _marks.get(key)
    if mark is None or not mark.fits(key):
        new = _Mark(_new_name(), _new_name(), key)
        with _marking:
            mark = _marks.get(key)
            if mark is None or not mark.fits(key):
                new.id = new.id if mark is None else mark.id
                mark = _marks[key] = new
    return mark


def _new_name() -> str:
    return f"{_process}/{next(_serials)}"


def _key_of(definition: Any) -> Any:
    """The key of a definition in tables. Lambdas that the same line makes have one key."""
    if isinstance(definition, type):
        return definition
    is_bare = not (definition.__defaults__ or definition.__kwdefaults__ or definition.__dict__)
    return definition.__code__ if is_bare else definition


def _parts_of(key: Any) -> tuple[Any, ...]:
    """The objects by which a change of a definition is noticed."""
    if isinstance(key, type):
        # The descriptors of __dict__ and __weakref__ never change, and refer to the class.
        return tuple(p for p in vars(key).values() if type(p) is not types.GetSetDescriptorType)
    if isinstance(key, types.CodeType):
        return ()
    return (key.__code__, key.__defaults__, key.__kwdefaults__, *key.__dict__.values())


# -- sending


class _Packed(NamedTuple):
    """A definition as it travels.

    Args:
        version: names this payload.
        payload: the pickled definition.
        variables: the names of the global variables that it uses, with their namespaces.
        marks: the marks of all definitions in the payload, which are held weakly.
    """

    version: str
    payload: bytes
    variables: tuple[tuple[dict[str, Any], str], ...]
    marks: tuple[tuple[weakref.ref[Any], _Mark], ...]

    def holds(self) -> bool:
        return all(
            (key := held()) is not None and _marks.get(key) is mark and mark.fits(key)
            for held, mark in self.marks
        )


def reduce_class(cls: type) -> tuple[Any, ...] | None:
    """Reduces a class that other workers cannot import; None leaves it to cloudpickle."""
    return _reduce(cls) if _is_loose(cls.__module__) else None


def reduce_function(func: types.FunctionType, pickler: Any) -> tuple[Any, ...] | None:
    """Reduces a function that other workers cannot import; None leaves it to cloudpickle.

    Args:
        pickler: cloudpickle's.
    """
    if not _is_loose(func.__globals__.get("__name__")):
        return None
    if func.__closure__ is None:
        return _reduce(func)
    # The contents of a closure, including tensors and references, are part of the message.
    variables = [(func.__globals__, name) for name in _names(func.__code__)]
    make, arguments, state, *_ = _without_variables(func, pickler)
    return make, arguments, (state, _values(variables)), None, None, _set_closure


def reduce_cached(func: Any) -> tuple[Any, ...] | None:
    """Reduces a function of `functools.lru_cache`; None leaves it to pickle, which names it."""
    if function_names.name_of(func) is not None or not _is_loose(func.__module__):
        return None
    return _make_cached, (func.__wrapped__, func.cache_parameters())


def _reduce(definition: Any) -> tuple[Any, ...]:
    key = _key_of(definition)
    packed = _packed.get(key)
    if packed is None or not packed.holds():
        file = io.BytesIO()
        pickler = _DefinitionPickler(file)
        if not isinstance(definition, type):
            pickler.marks.append((weakref.ref(key), _mark(key)))
        pickler.dump(definition)
        packed = _packed[key] = _Packed(
            _new_name(), file.getvalue(), tuple(pickler.variables), tuple(pickler.marks)
        )
    id_ = _mark(key).id
    _objects.setdefault(id_, definition)
    values = _values(packed.variables)
    return _receive, (id_, packed.version, packed.payload), values or None, None, None, _set_values


class _DefinitionPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a definition with its base classes and the like, without global variables."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.variables: list[tuple[dict[str, Any], str]] = []
        self.marks: list[tuple[weakref.ref[Any], _Mark]] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and _is_loose(obj.__globals__.get("__name__")):
            self.variables += [(obj.__globals__, name) for name in _names(obj.__code__)]
            return _without_variables(obj, self)
        if isinstance(obj, type) and _is_loose(obj.__module__):
            mark = _mark(obj)
            _objects.setdefault(mark.id, obj)
            self.marks.append((weakref.ref(obj), mark))
            make, arguments, state, *_ = _cloudpickle._dynamic_class_reduce(obj)
            filling = (mark.id, mark.version, state)
            return _make_class, (mark.id, make, arguments), filling, None, None, _fill_class
        if isinstance(obj, _Cached):
            return reduce_cached(obj) or NotImplemented
        return super().reducer_override(obj)


def _without_variables(func: types.FunctionType, pickler: Any) -> tuple[Any, ...]:
    """Reduces like cloudpickle, with the receiver's namespace in place of copied variables."""
    _, arguments, (state, slots), *rest = pickler._dynamic_function_reduce(func)
    code, _, *others = arguments
    slots["__globals__"] = {}
    module = func.__globals__["__name__"]
    if _role is Role.HOME:
        _spaces[module] = func.__globals__
    return _make_function, (code, module, *others), (state, slots), *rest


def _names(code: types.CodeType) -> Iterable[str]:
    names: Iterable[str] = _cloudpickle._extract_code_globals(code)
    return names


def _values(variables: Iterable[tuple[dict[str, Any], str]]) -> Values:
    return {
        (space["__name__"], name): (_token(space[name]), space[name])
        for space, name in variables
        if name in space
    }


def _token(value: Any) -> Token:
    if value is None or type(value) in (int, float, bool, str, bytes):
        return type(value).__name__, value
    if isinstance(value, _ATOMS) or _is_of_telegrad(value):
        return "identity", _identity(value)
    file = io.BytesIO()
    try:
        _Fingerprint(file, 5).dump(value)
    except Exception:  # noqa: BLE001 - a reducer of the program failed: packing reports it
        return "identity", _identity(value)
    return "content", hashlib.blake2b(file.getvalue(), digest_size=16).digest()


_ATOMS = (type, types.FunctionType, types.ModuleType, torch.Tensor)


class _Fingerprint(pickle.Pickler):
    """Pickles enough of a value to see whether it has changed."""

    def persistent_id(self, obj: Any) -> str | None:
        # telegrad's own objects (references, say) are not pickled here: that may have effects.
        is_atom = isinstance(obj, _ATOMS) or _is_of_telegrad(obj)
        return _identity(obj) if is_atom else None


def _is_of_telegrad(obj: Any) -> bool:
    return type(obj).__module__.startswith("telegrad.")


def _identity(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, type) and _is_loose(value.__module__):
        return _mark(value).version
    if isinstance(value, types.FunctionType) and value.__closure__ is None:
        return _mark(_key_of(value)).version
    try:
        serial = _identities.get(value)
        if serial is None:
            serial = _identities[value] = next(_serials)
    except TypeError:  # without weak references it counts as a new object each time
        serial = next(_serials)
    version = 0
    if isinstance(value, torch.Tensor) and not _is_of_telegrad(value) and not value.is_inference():
        version = value._version
    return f"{_process}/{serial}/{version}"


# -- receiving


def _receive(id_: str, version: str, payload: bytes) -> Any:
    found = _objects.get(id_)
    if found is not None and (_is_own(id_) or _recent.get(version) is found):
        return found
    with _loading:
        found = _recent.get(version)
        if found is not None:
            return found
        found = pickle.loads(payload)
        if not isinstance(found, type):
            key = _key_of(found)
            _marks[key] = _Mark(id_, version, key)
            _objects[id_] = found
        _recent[version] = found
        while len(_recent) > _KEPT:
            _recent.popitem(last=False)
        return found


def _is_own(id_: str) -> bool:
    return id_.startswith(_process)


def _make_function(code: Any, module: str, *rest: Any) -> Any:
    return _cloudpickle._make_function(code, _space(module), *rest)


def _make_cached(func: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(func)


def _space(module: str) -> dict[str, Any]:
    space = _spaces.get(module)
    if space is None:
        space = vars(sys.modules[module]) if module == "__main__" else {"__name__": module}
        _spaces[module] = space
    return space


def _make_class(id_: str, make: Any, arguments: tuple[Any, ...]) -> Any:
    found = _objects.get(id_)
    if found is None:
        found = _objects[id_] = make(*arguments)
    return found


def _fill_class(cls: type, filling: tuple[str, str, Any]) -> None:
    id_, version, state = filling
    if _is_own(id_) or _filled.get(id_) == version:
        return
    _cloudpickle._class_setstate(cls, state)
    _marks[cls] = _Mark(id_, version, cls)
    is_new = id_ not in _filled
    _filled[id_] = version
    name, space = cls.__qualname__, _space(cls.__module__)
    if is_new and _role is Role.AWAY and isinstance(space.get(name, type), type):
        space[name] = cls  # so that it can be pickled there by its name, by `torch.save` say


def _set_values(_: Any, values: Values) -> None:
    if _role is not Role.AWAY:
        return
    for place, (token, value) in values.items():
        if _set.get(place) != token:
            module, name = place
            _space(module)[name] = value
            _set[place] = token


def _set_closure(func: Any, state: tuple[Any, Values]) -> None:
    own, values = state
    _cloudpickle._function_setstate(func, own)
    _set_values(func, values)
