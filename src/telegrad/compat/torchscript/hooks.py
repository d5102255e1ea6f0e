"""The places in torch's compiler where the bridge takes part, and what it does to a finished graph.

A graph is rewritten before its function first runs: a plan that the interpreter has made is not
made again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from telegrad.compat.compilers import PLACES
from telegrad.compat.torchscript import operators
from telegrad.compat.torchscript.compiling import (
    builtins,
    core,
    frontend,
    generating,
    jit_annotations,
    recursive,
    state,
)
from telegrad.compat.torchscript.kinds import kind_of
from telegrad.compat.torchscript.marking import Mark, mark_calls, mark_function_named, meaning
from telegrad.compat.torchscript.operators import MARK
from telegrad.compat.torchscript.references import inferring, understanding
from telegrad.compat.torchscript.threads import carrying

_CALLS = ("prim::rpc_async", "prim::rpc_sync", "prim::rpc_remote")


def rewrite(graph: Any) -> None:
    """Replaces what is marked in a graph, in its blocks and in the graphs of its forks."""
    for inner in (graph, *_inner_graphs(graph.block())):
        for kind in _CALLS:
            for node in inner.findAllNodes(kind):  # looks into blocks
                if node.inputsAt(0).node().kind() == MARK:
                    _replace_call(inner, node)
        for node in inner.findAllNodes("prim::CallFunction"):
            mark = _mark_of(node)
            if mark is not None:
                _replace_entry(inner, node, mark)


def rewrite_methods(type_: Any) -> None:
    """The same for the methods of a class or module."""
    unit = state._python_cu
    for method in type_.method_names():
        function = unit.find_function(f"{type_.qualified_name()}.{method}")
        if function is not None:
            rewrite(function.graph)


def _inner_graphs(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        for attribute in node.attributeNames():
            if node.kindOf(attribute) == "g":
                graph = node.g(attribute)
                yield graph
                yield from _inner_graphs(graph.block())
        for inner in node.blocks():
            yield from _inner_graphs(inner)


def _mark_of(call: Any) -> Mark | None:
    constant = call.inputsAt(0).node()
    if constant.kind() != "prim::Constant" or not constant.hasAttribute("name"):
        return None
    return mark_function_named(constant.s("name"))


def _replace_call(graph: Any, node: Any) -> None:
    destination, *rest = node.inputs()
    mark = destination.node()
    output, kind = node.output(), node.kind()
    with graph.insert_point_guard(node):
        inputs = [mark.inputsAt(0), *rest]
        if len(inputs) < 3:
            inputs.append(_inserted(graph, "prim::TupleConstruct", [], core.TupleType([])))
        if len(inputs) < 4:
            none = core.DictType(core.StringType.get(), core.AnyType.get())
            inputs.append(_inserted(graph, "prim::DictConstruct", [], none))
        if len(inputs) < 5:
            inputs.append(graph.insertConstant(-1.0))
        operator = kind.replace("prim::", "telegrad::")
        if kind == "prim::rpc_async":
            kind_of(output.type().getElementType()).prepare()
            result = core.FutureType(core.AnyType.get())
            value = _cast(graph, _inserted(graph, operator, inputs, result, node), output.type())
        elif kind == "prim::rpc_sync":
            box_type = kind_of(output.type()).box_type
            kind_of(box_type).prepare()
            future = _inserted(graph, operator, inputs, core.FutureType(core.AnyType.get()), node)
            box = _inserted(graph, "aten::wait", [future], core.AnyType.get(), node)
            value = _cast(graph, box, box_type)
            value = _inserted(graph, "prim::GetAttr", [value], output.type(), name="value")
        else:
            value = _inserted(graph, operator, inputs, core.AnyType.get(), node)
    if kind == "prim::rpc_remote":
        (use,) = output.uses()  # the marked function that the parser has put around it
        call = use.user
        found = _mark_of(call)
        assert found is not None
        with graph.insert_point_guard(call):
            value = _cast(graph, value, found.result)
        output, outer = call.output(), call
        output.replaceAllUsesWith(value)
        _destroy_call(outer)
    else:
        output.replaceAllUsesWith(value)
    node.destroy()
    mark.destroy()


def _replace_entry(graph: Any, call: Any, mark: Mark) -> None:
    with graph.insert_point_guard(call):
        name = graph.insertConstant(mark.kind.name)
        inputs = [call.inputsAt(1), name]
        any_future = core.FutureType(core.AnyType.get())
        value = _inserted(graph, f"telegrad::{mark.operator}", inputs, any_future, call)
        value = _cast(graph, value, mark.result)
    call.output().replaceAllUsesWith(value)
    _destroy_call(call)


def _destroy_call(call: Any) -> None:
    function = call.inputsAt(0)
    call.destroy()
    if not function.uses():
        function.node().destroy()


def _cast(graph: Any, value: Any, type_: Any) -> Any:
    return _inserted(graph, "prim::unchecked_cast", [value], type_)


def _inserted(
    graph: Any, kind: str, inputs: list[Any], type_: Any, like: Any = None, name: str | None = None
) -> Any:
    """The output of a new node, at the place where the graph is being written."""
    node = graph.create(kind, inputs, 1)
    if name is not None:
        node.s_("name", name)
    if like is not None:
        node.copyMetadata(like)
    return graph.insertNode(node).output().setType(type_)


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


def _compiling(resolver_at: int, finish: Callable[[Any], None]) -> Callable[[Function], Function]:
    """
    Args:
        resolver_at: which argument of torch's function looks names up.
        finish: rewrites what was compiled.
    """

    def around(original: Function) -> Function:
        def compile_(*args: Any) -> Any:
            given = list(args)
            given[resolver_at] = _understanding_marks(given[resolver_at])
            with generating:
                compiled = original(*given)
                finish(compiled)
            return compiled

        return compile_

    return around


def _compiling_stubs(original: Function) -> Function:
    def create(concrete_type: Any, *lists_of_stubs: Any) -> None:
        marked = [
            [
                stub._replace(resolution_callback=_understanding_marks(stub.resolution_callback))
                for stub in stubs
            ]
            for stubs in lists_of_stubs
        ]
        with generating:
            original(concrete_type, *marked)
            rewrite_methods(concrete_type.jit_type)

    return create


def _rewrite_function(function: Any) -> None:
    rewrite(function.graph)


_HOOKS: tuple[tuple[Any, str, Callable[[Function], Function]], ...] = (
    (frontend, "parse_def", _parsing),
    (jit_annotations, "try_ann_to_type", understanding),
    (core, "_jit_try_infer_type", inferring),
    (core, "_jit_script_compile", _compiling(2, _rewrite_function)),
    (core, "_jit_script_compile_overload", _compiling(3, _rewrite_function)),
    (core, "_jit_script_class_compile", _compiling(3, rewrite_methods)),
    (recursive, "create_methods_and_properties_from_stubs", _compiling_stubs),
    (recursive, "create_hooks_from_stubs", _compiling_stubs),
    (core.ScriptFunction, "__call__", carrying),
    (core.ScriptMethod, "__call__", carrying),
)
