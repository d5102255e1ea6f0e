"""The names of telegrad's own, and of harmless types, that an allow-list includes.

All workers can use these names with any arguments: a function belongs here only if that does no
harm, or if it checks what it runs.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "BASE",
    "BOUND",
    "BY_VALUE",
    "DEFERRED",
    "MAY_BE_NAMED",
    "OWN_CLASSES",
    "OWN_FUNCTIONS",
    "OWN_PACKAGES",
    "Place",
]

Place = tuple[str, str]
"""A module and a qualified name in it."""

_COLLECTIONS: Final = ("OrderedDict", "deque", "defaultdict", "Counter")
_BUILTINS: Final = (
    "complex", "slice", "range", "bytearray", "bytes", "set", "frozenset", "list", "dict", "tuple",
    "int", "float", "str", "bool",
)  # fmt: skip
_DATES: Final = ("date", "datetime", "time", "timedelta", "timezone")
_REVIVAL: Final = (
    "slot", "as_class", "set_attributes", "meta", "quantized", "typed_storage", "exception",
)  # fmt: skip

BASE: Final[frozenset[Place]] = frozenset(
    (
        *(("builtins", name) for name in _BUILTINS),
        *(("collections", name) for name in _COLLECTIONS),
        *(("datetime", name) for name in _DATES),
        *(("telegrad.wire.revival", name) for name in _REVIVAL),
        ("decimal", "Decimal"),
        ("fractions", "Fraction"),
        ("uuid", "UUID"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "scalar"),
        ("numpy._core.numeric", "_frombuffer"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy.core.numeric", "_frombuffer"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch.nn.parameter", "Buffer"),
        ("torch.serialization", "_get_layout"),
        ("telegrad.rpc.references.rref", "rebuild_rref"),
        ("telegrad.nn.remote_module", "RemoteModule"),
        ("telegrad.nn.remote_module", "_rebuild"),
        ("telegrad.optim.local", "LocalOptimizer"),
        ("telegrad.optim.local", "LocalScheduler"),
    )
)
"""What every stream may name: types without side effects, and what telegrad packs with."""

OWN_FUNCTIONS: Final[frozenset[Place]] = frozenset(
    (
        ("telegrad.rpc.references.proxy", "call_owned"),
        ("telegrad.rpc.references.proxy", "call_owned_async"),
        ("telegrad.rpc.references.proxy", "_rref_typeof_on_owner"),
        ("telegrad.nn.remote_module", "_create_module"),
        ("telegrad.nn.remote_module", "_forward"),
        ("telegrad.nn.remote_module", "_parameter_rrefs"),
        ("telegrad.nn.remote_module", "_set_training"),
        ("telegrad.optim.local", "new_local_optimizer"),
        ("telegrad.optim.local", "new_local_scheduler"),
        ("telegrad.autograd.contexts.attachment", "_backward_at_owner"),
        ("telegrad.observe.context_graph", "describe_here"),
        # Backward passes of plain calls take numbers and tensors.
        ("telegrad.autograd.plain.messages", "deliver"),
        ("telegrad.autograd.plain.messages", "ask"),
        ("telegrad.autograd.plain.messages", "finish"),
        ("telegrad.observe.plain_graph", "_describe"),
        # These check the function, or the method, that they run.
        ("telegrad.remote_calls", "_run_in_modes"),
        ("telegrad.remote_calls", "_call_method"),
        ("telegrad.remote_calls", "_call_method_in_modes"),
        # The names of a remote value's methods, and the value of a future: what their user may see.
        ("telegrad.remote_calls", "_describe"),
        ("telegrad.remote_calls", "_itself"),
        ("telegrad.launch.membership", "_seed"),  # takes a number
        # A table runs a fixed set of functions and operations, which check their arguments: see
        # `telegrad.tensors.table`.
        ("telegrad.tensors.table", "open_table"),
        ("telegrad.tensors.table", "close_table"),
        ("telegrad.tensors.table", "run_batch"),
        ("telegrad.tensors.table", "run_call"),
        ("telegrad.nn.module_there", "call_method"),
        ("telegrad.nn.module_there", "submit_method"),
        # The stages of a pipeline check the `forward` that they run.
        ("telegrad.nn.pipeline_there", "begin_run"),
        ("telegrad.nn.pipeline_there", "take"),
        ("telegrad.nn.pipeline_there", "take_gradients"),
        ("telegrad.nn.pipeline_there", "take_totals"),
        ("telegrad.nn.pipeline_there", "raise_failure"),
        ("telegrad.nn.pipeline_there", "cancel_run"),
        ("telegrad.nn.pipeline_ends", "arrive_at_driver"),
        ("telegrad.nn.pipeline_ends", "gradients_at_driver"),
    )
)
"""What telegrad itself calls on other workers. Those that run a method of a remote value, or a
class that was passed to them, find only what is allowed."""

DEFERRED: Final[frozenset[Place]] = frozenset(
    (("telegrad.remote_calls", "_value_of"), ("telegrad.remote_calls", "_object_of"))
)
"""The functions that find values of this worker for a message. They run after unpacking: see
`telegrad.wire.allowed.unpickler`. With any arguments, they return a value that a call of the worker
could get as well, wait for it, or raise."""

MAY_BE_NAMED: Final = ("telegrad.wire.revival.script",)
"""Names of telegrad's own that a program may put on its list."""

BY_VALUE: Final = ("cloudpickle.", "telegrad.wire.by_value.")
BOUND: Final = ("functools.partial", "builtins.getattr")
"""What rebuilds functions that are sent by value."""

OWN_CLASSES: Final = ("telegrad.optim.local.LocalOptimizer", "telegrad.optim.local.LocalScheduler")
OWN_PACKAGES: Final = (
    "telegrad.rpc.",
    "telegrad.autograd.",
    "telegrad.optim.",
    "telegrad.tensors.",
    "telegrad.nn.",
    "telegrad.observe.",
    "telegrad.ids",
)
