"""The places in torch's compiler where the bridge takes part."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from telegrad.compat.torchscript import operators
from telegrad.compat.torchscript.annotations import inferring, understanding
from telegrad.compat.torchscript.context_carrier import carrying
from telegrad.compat.torchscript.generated import generating
from telegrad.compat.torchscript.marks import meaning
from telegrad.compat.torchscript.parsing import mark_calls
from telegrad.compat.torchscript.rewriting import rewrite, rewrite_methods
from telegrad.compat.torchscript.torch_jit import (
    builtins,
    core,
    frontend,
    jit_annotations,
    recursive,
)
from telegrad.compat.torchscript.watch import PLACES

__all__ = ["set_hooks"]

_lock = threading.Lock()  # one thread sets them
_are_set = False

Function = Callable[..., Any]


def set_hooks() -> None:
    """Sets them, in the place of the watchers. Once is enough."""
    global _are_set
    with _lock:
        if _are_set:
            return
        operators.define()
        for name, function in operators.BUILTINS.items():
            builtins._register_builtin(function, name)
        for place, name, around in _HOOKS:
            original = _without_watcher(getattr(place, name))
            setattr(place, name, functools.wraps(original)(around(original)))
        for place, name in PLACES:
            setattr(place, name, _without_watcher(getattr(place, name)))
        _are_set = True


def _without_watcher(function: Function) -> Function:
    return getattr(function, "__telegrad_original__", function)


def _parsing(original: Function) -> Function:
    def parse_def(function: Any) -> Any:
        parsed = original(function)
        mark_calls(function, parsed.ast)
        return parsed

    return parse_def


def _understanding_marks(resolve: Function) -> Function:
    """Looks a name up: a mark, or whatever it is outside of the function."""

    def look_up(name: str) -> Any:
        found = meaning(name)
        return resolve(name) if found is None else found

    return look_up


def _compiling_function(original: Function) -> Function:
    def compile_(qualified_name: str, definition: Any, resolve: Function, defaults: Any) -> Any:
        with generating:
            function = original(qualified_name, definition, _understanding_marks(resolve), defaults)
            rewrite(function.graph)
        return function

    return compile_


def _compiling_overload(original: Function) -> Function:
    def compile_(
        qualified_name: str, declaration: Any, definition: Any, resolve: Function, *rest: Any
    ) -> Any:
        with generating:
            function = original(
                qualified_name, declaration, definition, _understanding_marks(resolve), *rest
            )
            rewrite(function.graph)
        return function

    return compile_


def _compiling_class(original: Function) -> Function:
    def compile_(qualified_name: str, definition: Any, defaults: Any, resolve: Function) -> Any:
        with generating:
            type_ = original(qualified_name, definition, defaults, _understanding_marks(resolve))
            rewrite_methods(type_)
        return type_

    return compile_


def _compiling_methods(original: Function) -> Function:
    def create(concrete_type: Any, method_stubs: Any, property_stubs: Any) -> None:
        with generating:
            original(concrete_type, _with_marks(method_stubs), _with_marks(property_stubs))
            rewrite_methods(concrete_type.jit_type)

    return create


def _compiling_hooks(original: Function) -> Function:
    def create(concrete_type: Any, hook_stubs: Any, pre_hook_stubs: Any) -> None:
        with generating:
            original(concrete_type, _with_marks(hook_stubs), _with_marks(pre_hook_stubs))
            rewrite_methods(concrete_type.jit_type)

    return create


def _with_marks(stubs: Any) -> list[Any]:
    return [
        stub._replace(resolution_callback=_understanding_marks(stub.resolution_callback))
        for stub in stubs
    ]


_HOOKS: tuple[tuple[Any, str, Callable[[Function], Function]], ...] = (
    (frontend, "parse_def", _parsing),
    (jit_annotations, "try_ann_to_type", understanding),
    (core, "_jit_try_infer_type", inferring),
    (core, "_jit_script_compile", _compiling_function),
    (core, "_jit_script_compile_overload", _compiling_overload),
    (core, "_jit_script_class_compile", _compiling_class),
    (recursive, "create_methods_and_properties_from_stubs", _compiling_methods),
    (recursive, "create_hooks_from_stubs", _compiling_hooks),
    (core.ScriptFunction, "__call__", carrying),
    (core.ScriptMethod, "__call__", carrying),
)
