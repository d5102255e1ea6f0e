"""TorchScript functions as targets of calls, by their qualified names.

A script names the function it calls by a string, `__torch__.package.module.function`; so does the
wire. `target(name)` is an object that any process finds again under that name as an attribute of
this module (`telegrad.compat.torchscript.scripted.__torch__.package.module.function`), so a call of
it is packed, counted and described like that of any Python function.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from telegrad.compat.torchscript.compiling import state
from telegrad.errors import TelegradError

_ROOT = "__torch__"
_MAIN = ("__main__", "__mp_main__")  # the program itself, in processes that it has spawned
_MODULE = __name__
_importing = threading.RLock()  # importing compiles, and torch's compiler is not safe for threads
_functions: dict[str, Any] = {}


class Target:
    """A qualified name, or a part of one: its attributes are the names that begin with it."""

    def __init__(self, qualified_name: str) -> None:
        self.__module__ = _MODULE
        self.__qualname__ = qualified_name
        self.__name__ = qualified_name.rpartition(".")[2]

    def __getattr__(self, name: str) -> Target:
        is_special = name.startswith("__") and name.endswith("__") and name not in _MAIN
        if is_special or name == "_wrapped_async_rpc_function":  # what others ask a function for
            raise AttributeError(name)
        longer = Target(f"{self.__qualname__}.{name}")
        return self.__dict__.setdefault(name, longer)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return function_named(self.__qualname__)(*args, **kwargs)


_root = Target(_ROOT)
globals()[_ROOT] = _root


def target(qualified_name: str) -> Target:
    """What to call on another worker, for the function of that name there."""
    found = _root
    for part in qualified_name.split(".")[1:]:
        found = getattr(found, part)
    return found


def function_named(qualified_name: str) -> Any:
    """The TorchScript function of this process; its module is imported if need be.

    Raises:
        TelegradError: there is none.
    """
    function = _functions.get(qualified_name)
    if function is None:
        function = state._python_cu.find_function(qualified_name)
        if function is None:
            function = _import(qualified_name)
        _functions[qualified_name] = function
    return function


def _import(qualified_name: str) -> Any:
    _, _, path = qualified_name.partition(".")
    module, _, name = path.rpartition(".")
    reason = "its module has been imported, and has not compiled it"
    if module:
        try:
            with _importing:
                importlib.import_module(module)
        except ImportError as error:
            reason = f"its module {module!r} cannot be imported: {error}"
    function = state._python_cu.find_function(qualified_name)
    if function is None:
        raise TelegradError(
            f"attempted to get undefined function {name}: this worker has no TorchScript function "
            f"{qualified_name} ({reason})"
        )
    return function


def check_arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks a call before it leaves, with torch's texts.

    Raises:
        TelegradError: there are too many, too few, or one has a name that the function lacks.
    """
    arguments = schema.arguments
    if len(args) > len(arguments):
        raise TelegradError(
            f"{schema.name}() expected at most {len(arguments)} argument(s) but received "
            f"{len(args)} argument(s). Declaration: {schema}"
        )
    left = {argument.name: argument for argument in arguments[len(args) :]}
    for keyword in kwargs:
        if left.pop(keyword, None) is None:
            raise TelegradError(
                f"Unknown keyword argument '{keyword}' for operator '{schema.name}'. "
                f"Schema: {schema}"
            )
    for name, argument in left.items():
        if not argument.has_default_value():
            raise TelegradError(
                f"{schema.name}() is missing value for argument '{name}'. Declaration: {schema}"
            )
