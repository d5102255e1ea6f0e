"""The private and undocumented names of torch that `telegrad.autograd` uses.

No other module of the package uses one. `tests/autograd/test_torch_internals.py` holds what is
assumed about each, so a torch that changes one of them fails there, by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._C._autograd
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.distributed import distributed_c10d
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

__all__ = [
    "COUNTING_HOOK",
    "IDLE_ROOT",
    "REGISTER_HOOK",
    "AccumulateGrad",
    "CheckpointNode",
    "Future",
    "PythonNode",
    "apply_of",
    "are_transforms_active",
    "current_task",
    "delayed_error",
    "get_from_torch",
    "has_default_group",
    "has_post_accumulate_hooks",
    "has_tensor_hooks",
    "hooks_ever_registered",
    "input_metadata",
    "is_any_autocast_enabled",
    "is_dense",
    "is_in_torch",
    "is_profiler_enabled",
    "keeps_graph",
    "node_type_of",
    "post_accumulate_hooks",
    "queue_callback",
    "remove_from_torch",
    "run_backward",
    "set_grad_enabled",
    "set_sequence_number",
    "set_tensor_hooks",
    "stash_in_torch",
    "use_count",
    "will_run",
]

# Nodes

AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The type of the node that ends a graph in a leaf."""

PythonNode: type = BackwardCFunction
"""The base of all nodes of `torch.autograd.Function`."""

Future: type = torch._C.Future
"""The class of every future of torch's; `torch.futures.Future` is a subclass."""

COUNTING_HOOK = "register_multi_grad_hook.<locals>.get_inner_hook"
"""What the name of the hook begins with that `register_multi_grad_hook` puts on each tensor."""

REGISTER_HOOK = ("register_hook", "register_prehook", "_register_hook_dict")
"""The methods of a Python node that register hooks: there is no other way."""


def node_type_of(function: type[torch.autograd.Function]) -> Any:
    """The type of the nodes of a Python function."""
    return function._backward_cls


CheckpointNode: Any = node_type_of(CheckpointFunction)
"""The type of a reentrant checkpoint's node, which keeps the function as `run_function`."""


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The C++ part of `Function.apply`, without the steps before it for functorch's transforms."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


def input_metadata(node: Any) -> Sequence[Any]:
    """The shape, type and device of each gradient that the engine passes to a node."""
    metadata: Sequence[Any] = node._input_metadata
    return metadata


def set_sequence_number(node: Any, number: int) -> None:
    """Of nodes that are ready, the engine runs the one with the highest number first."""
    node._set_sequence_nr(number)


def delayed_error(message: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """An identity in C++ whose node raises the message when the engine runs it."""
    function: Callable[[torch.Tensor], torch.Tensor] = torch._C._functions.DelayedError(message, 1)
    return function


# Hooks


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks)


def set_tensor_hooks(tensor: torch.Tensor, hooks: Callable[[Any], Any]) -> None:
    """Replaces the dictionary of a tensor's hooks by what `hooks` makes of it."""
    tensor._backward_hooks = hooks(tensor._backward_hooks or ())


def post_accumulate_hooks(tensor: torch.Tensor) -> dict[int, Callable[..., Any]]:
    """The hooks of `register_post_accumulate_grad_hook`."""
    hooks: dict[int, Callable[..., Any]] | None = tensor._post_accumulate_grad_hooks
    return hooks or {}


def has_post_accumulate_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._post_accumulate_grad_hooks)


def hooks_ever_registered() -> int:
    """How many hooks of any kind Python has registered in this process."""
    return RemovableHandle.next_id


# The engine

_engine: Any = torch.autograd.Variable._execution_engine

run_backward: Callable[..., Sequence[torch.Tensor | None]] = _engine.run_backward
"""`torch.autograd.backward` without its checks: roots, their gradients, whether to keep the graph,
whether to create one, the inputs, whether a root may be unreachable, whether leaves accumulate."""

queue_callback: Callable[[Callable[[], None]], None] = _engine.queue_callback
"""Runs a function at the end of the backward pass that runs on this thread."""

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that runs on this thread, or -1."""

will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

_to_nothing: Any = torch._C._functions.UndefinedGrad()
IDLE_ROOT = GradientEdge(_to_nothing(torch.zeros((), requires_grad=True)).grad_fn, 0)
"""An edge that the engine accepts as a root and that leads to nothing."""

# Modes of a thread

is_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""`torch.set_grad_enabled` without a context manager's object."""

# Torch's thread-local objects, which follow work to the threads of its engine.

is_in_torch: Callable[[str], bool] = torch._C._is_key_in_tls
stash_in_torch: Callable[[str, Any], None] = torch._C._stash_obj_in_tls
get_from_torch: Callable[[str], Any] = torch._C._get_obj_in_tls
remove_from_torch: Callable[[str], None] = torch._C._remove_obj_from_tls

# Tensors and process groups

is_dense: Callable[[torch.Tensor], bool] = is_non_overlapping_and_dense_or_false
"""Whether a tensor's elements fill its memory, each once, in whatever order."""


def use_count(tensor: torch.Tensor) -> int:
    """How many owners in C++ the tensor has; its object in Python counts as one."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count


def has_default_group() -> bool:
    """`torch.distributed.is_initialized`, in a third of its time."""
    return distributed_c10d._world._default_pg is not None
