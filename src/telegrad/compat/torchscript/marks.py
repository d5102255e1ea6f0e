"""The names that mark telegrad's part in a function, and what they stand for."""

from __future__ import annotations

import sys
from typing import Any

import torch

from telegrad.compat.torchscript.generated import Exactly, compiled, generating, module_of
from telegrad.compat.torchscript.kinds import Kind, kind_of
from telegrad.compat.torchscript.references import reference_type
from telegrad.compat.torchscript.torch_jit import core

__all__ = [
    "CALLS",
    "DESTINATION",
    "Mark",
    "mark_function_named",
    "mark_of_entry",
    "mark_of_reference",
    "meaning",
]

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
