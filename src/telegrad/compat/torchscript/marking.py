"""Marks telegrad's part in the syntax tree of a function that is about to be compiled.

Only functions of modules that know telegrad are looked at, and in them only

- calls of `rpc_async`, `rpc_sync` and `remote`: the called name becomes the mark of torch's
  function of that name, which the compiler knows, and the destination is marked as telegrad's. The
  result of `remote` goes through a marked function, which gives it the type that references have;
- futures that come from Python, as an argument, in a list of them, or from an ignored function:
  they go through a marked function too. What they hold is a Python object, or a failure in the
  place of a value.

A mark is a name of one character from Unicode's private use area. No program can write it, and no
position in the source moves because of it.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from telegrad.compat.torchscript.compiling import (
    PREFIX,
    Exactly,
    compiled,
    core,
    fake_range,
    generating,
    internal,
    jit_annotations,
    module_of,
)
from telegrad.compat.torchscript.kinds import Kind, kind_of
from telegrad.compat.torchscript.references import reference_type

CALLS = {"rpc_async": "\ue000", "rpc_sync": "\ue001", "remote": "\ue002"}
DESTINATION = "\ue003"
_FIRST = 0xE010
_LAST = 0xF8FE

_ROLES = {mark: role for role, mark in CALLS.items()}

_SOURCE = """
def {name}(value: Given) -> Wanted:
    raise RuntimeError("unreachable: calls of this are replaced")
"""


class Mark:
    """A function that a value is passed through, to be replaced in the graph.

    Attributes:
        name: how the function is called in the graph.
        operator: what stands there in the end.
        result: the type that the value has afterwards.
        kind: the kind of the value within.
    """

    def __init__(self, operator: str, kind: Kind, given: Any, result: Any) -> None:
        self.operator = operator
        self.kind = kind
        self.result = result
        self.name = f"telegrad_{operator}_{kind.number}"
        source = _SOURCE.format(name=self.name)
        module = module_of(source, Given=Exactly(given), Wanted=Exactly(result))
        self.function = compiled(getattr(module, self.name))


_marks: list[Mark] = []
_by_name: dict[str, tuple[int, Mark]] = {}


def mark_of_reference(value_type: Any) -> str:
    """The mark around a call of `remote` of a function that returns `value_type`."""
    kind = kind_of(value_type)
    return _mark("rpc_remote", kind, core.RRefType(value_type), reference_type(value_type))


def mark_of_entry(value_type: Any) -> str:
    """The mark around a future of `value_type` that comes from Python."""
    future = core.FutureType(value_type)
    return _mark("typed_future", kind_of(value_type), future, future)


def _mark(operator: str, kind: Kind, given: Any, result: Any) -> str:
    with generating:
        name = f"telegrad_{operator}_{kind.number}"
        if name not in _by_name:
            mark = Mark(operator, kind, given, result)
            _by_name[name] = len(_marks), mark
            _marks.append(mark)
        number = _FIRST + _by_name[name][0]
        if number > _LAST:
            raise RuntimeError("too many types are used in references and futures of TorchScript")
        return chr(number)


def mark_function_named(name: str) -> Mark | None:
    """The mark whose function has that name in a graph."""
    found = _by_name.get(name)
    return None if found is None else found[1]


def meaning(mark: str) -> Any:
    """What the compiler is to take a name for; None if it is no mark."""
    if len(mark) != 1 or not "\ue000" <= mark <= chr(_LAST):
        return None
    if mark in _ROLES:
        return getattr(sys.modules["torch.distributed.rpc"], _ROLES[mark])
    if mark == DESTINATION:
        return torch.ops.telegrad.destination
    return _marks[ord(mark) - _FIRST].function


_OURS = ("telegrad.rpc.api", "telegrad.compat.rpc.api")
_ITEM = "\uf8ff"  # a variable of its own
_MISSING: Any = object()

_marking: list[Any] = []
"""Functions that are being marked: marking one may compile another."""


def mark_calls(function: Any, tree: ast.Module) -> None:
    """Marks telegrad's part in the tree of `function`, in place."""
    if not _knows_telegrad(function):
        return
    (definition,) = tree.body
    assert isinstance(definition, ast.FunctionDef)
    marker = _Marker(function, definition)
    _marking.append(function)
    try:
        definition.body = [marker.visit(statement) for statement in definition.body]
    finally:
        _marking.remove(function)
    if not _is_declaration(definition):
        definition.body[:0] = marker.entering_arguments()


def _knows_telegrad(function: Any) -> bool:
    if str(function.__module__).startswith(PREFIX):
        return False  # written for the compiler as it is
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is not None and rpc.__name__.startswith("telegrad."):
        return True  # installed: everybody does
    known = [*getattr(function, "__globals__", {}).values(), *_cells(function)]
    return any(
        _origin(value).partition(".")[0] == "telegrad"
        for value in known
        if isinstance(value, types.ModuleType | types.FunctionType | type)
    )


def _cells(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not bound yet


def _origin(value: Any) -> str:
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return name if isinstance(name, str) else ""


def _is_declaration(definition: ast.FunctionDef) -> bool:
    """Whether it has no body: methods of an interface."""
    return all(
        isinstance(statement, ast.Pass)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in definition.body
    )


class _Marker(ast.NodeTransformer):
    def __init__(self, function: Any, definition: ast.FunctionDef) -> None:
        self._function = function
        self._definition = definition
        self._resolve: Callable[[str], Any] = internal.createResolutionCallbackFromClosure(function)
        self._local_names = {
            argument.arg for argument in ast.walk(definition.args) if isinstance(argument, ast.arg)
        }
        self._local_names |= {
            node.id
            for node in ast.walk(definition)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }

    def visit_Call(self, call: ast.Call) -> ast.expr:
        self.generic_visit(call)
        function = self._named(call.func)
        if function is _MISSING:
            return call
        role = _role_of(function)
        if role is not None:
            return self._marked_call(role, call)
        entry = _returned_future(function)
        return call if entry is None else _called(mark_of_entry(entry), call)

    def _marked_call(self, role: str, call: ast.Call) -> ast.expr:
        call.func = _name(CALLS[role], call.func)
        if call.args:
            call.args[0] = _called(DESTINATION, call.args[0])
        if role != "remote" or len(call.args) < 2:
            return call
        type_ = _result_type(self._named(call.args[1]))
        return call if type_ is None else _called(mark_of_reference(type_), call)

    def _named(self, expression: ast.expr) -> Any:
        """What a dotted name stands for outside of the function."""
        base = expression
        while isinstance(base, ast.Attribute):
            base = base.value
        if not isinstance(base, ast.Name) or base.id in self._local_names:
            return _MISSING
        try:
            found = self._resolve(ast.unparse(expression))
        except Exception:  # noqa: BLE001 - the compiler will say what is wrong with it
            return _MISSING
        return _MISSING if found is None else found

    def entering_arguments(self) -> Iterator[ast.stmt]:
        """Statements that take futures among the arguments in."""
        for argument in (*self._definition.args.args, *self._definition.args.kwonlyargs):
            if argument.annotation is None:
                continue
            type_ = self._annotated(argument.annotation)
            given: ast.expr = _name(argument.arg, argument)
            if _is_future(type_):
                entered: ast.expr = _called(mark_of_entry(type_.getElementType()), given)
            elif _is_list_of_futures(type_):
                mark = mark_of_entry(type_.getElementType().getElementType())
                item = ast.comprehension(ast.Name(_ITEM, ast.Store()), given, [], 0)
                entered = ast.ListComp(_called(mark, _name(_ITEM, argument)), [item])
            else:
                continue
            statement = ast.Assign([ast.Name(argument.arg, ast.Store())], entered)
            yield ast.fix_missing_locations(ast.copy_location(statement, argument))

    def _annotated(self, annotation: ast.expr) -> Any:
        try:
            return _type_of(self._resolve(ast.unparse(annotation)))
        except Exception:  # noqa: BLE001 - the compiler will say what is wrong with it
            return None


def _is_future(type_: Any) -> bool:
    return type_ is not None and type_.kind() == "FutureType"


def _is_list_of_futures(type_: Any) -> bool:
    return type_ is not None and type_.kind() == "ListType" and _is_future(type_.getElementType())


def _name(identifier: str, where: ast.AST) -> ast.Name:
    return ast.copy_location(ast.Name(identifier, ast.Load()), where)


def _called(mark: str, argument: ast.expr) -> ast.Call:
    return ast.copy_location(ast.Call(_name(mark, argument), [argument], []), argument)


def _role_of(function: Any) -> str | None:
    if getattr(function, "__module__", None) in _OURS and function.__name__ in CALLS:
        return str(function.__name__)
    return None


def _type_of(annotation: Any) -> Any:
    if annotation is None or isinstance(annotation, str):
        return None
    try:
        return jit_annotations.try_ann_to_type(annotation, fake_range())
    except Exception:  # noqa: BLE001 - the compiler will say what is wrong with it
        return None


def _returned_future(function: Any) -> Any:
    """The type in the future that an ignored Python function returns; None if it does not."""
    if not isinstance(function, types.FunctionType) or not internal.is_ignored_fn(function):
        return None
    type_ = _type_of(function.__annotations__.get("return"))
    return type_.getElementType() if _is_future(type_) else None


def _result_type(function: Any) -> Any:
    """The type that a function returns; one that is not compiled yet is, as the compiler does."""
    if isinstance(function, types.FunctionType):
        if function in _marking:
            raise RuntimeError(
                f"function {function.__name__!r} is called recursively, by way of another worker: "
                "TorchScript cannot compile that"
            )
        function = compiled(function)
    if not isinstance(function, torch.jit.ScriptFunction):
        return None
    schema: Any = function.schema
    return schema.returns[0].type
