"""Which of torch's operations others may run on tensors of a worker that has an allow-list.

They are found by name (`telegrad.tensors.operations.function`). Under ``torch.ops.aten`` there are
also functions of TorchScript's runtime, which do what Python's builtins do, save files, or run
backward passes: what is not an operation on tensors of torch's dispatcher is refused. So are those
that open files, and those that are made to leave out checks of their arguments.

This is no sandbox for memory: torch checks the arguments of its operations, but not all of them
well. Only who may make a module of an allowed class gets so far.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from telegrad.errors import NotAllowed
from telegrad.tensors.operations import function

__all__ = ["check_operation"]

_UNCHECKED = ("_unsafe_index", "_unsafe_masked_index", "_nested_")
_OUTSIDE = ("from_file", "_print")


@functools.cache
def _of_dispatcher() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


@functools.lru_cache(4096)
def check_operation(name: str) -> None:
    """
    Raises:
        NotAllowed
        NotImplementedError: there is no such operation.
    """
    schema: Any = function(name)._schema
    own = schema.name.partition("::")[2]
    full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    values = [*schema.arguments, *schema.returns]
    if (
        full not in _of_dispatcher()
        or own in _OUTSIDE
        or own.startswith(_UNCHECKED)
        or (own.startswith("_sparse") and own.endswith("_unsafe"))
        or not any("Tensor" in str(value.type) for value in values)
    ):
        raise NotAllowed(
            f"{name} may not be run on tensors of this worker: RpcOptions(allow=...), which it "
            "has, leaves out operations that reach outside of tensors, or do not check their "
            "arguments. Run it in a function or module that the option names",
            name=name,
        )
