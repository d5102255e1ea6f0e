"""What torch's two compilers are told of telegrad, once they are used and so imported.

`torch.compile` is kept out of telegrad. A compiled function may call other workers; the compiler
then runs that call as it is, between two compiled parts, as it does with calls of torch's own RPC.
Otherwise it would trace calls down to their bytes, and fail there.

TorchScript gets the bridge, when something is first compiled or loaded. Until one of the functions
that torch looks up for that is called, a stand-in is all there is.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
import torch.jit.annotations
import torch.jit.frontend

__all__ = ["PLACES", "keep_out", "watch"]

_RULES = "torch._dynamo.trace_rules"


@functools.cache
def keep_out() -> None:
    """To be called once."""
    rules = sys.modules.get(_RULES)
    if rules is not None:
        rules.add("telegrad")
    else:
        sys.meta_path.insert(0, _Watcher())


class _Watcher(MetaPathFinder):
    """Waits for the compiler to be imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _RULES:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_tell(module: Any) -> None:
                execute(module)
                module.add("telegrad")

            loader.exec_module = execute_and_tell
        return spec


PLACES: tuple[tuple[Any, str], ...] = (
    (torch.jit.frontend, "parse_def"),
    (torch.jit.annotations, "try_ann_to_type"),
    (torch._C, "_jit_try_infer_type"),
    (torch._C, "import_ir_module"),
    (torch._C, "import_ir_module_from_buffer"),
)
"""Where torch looks up what it calls first, to compile or to load."""

_BRIDGE = "telegrad.compat.torchscript.hooks"


@functools.cache
def watch() -> None:
    """To be called once, before a worker can have been started: what is to run at exit runs after
    the worker was closed."""
    for place, name in PLACES:
        setattr(place, name, _loading(place, name, getattr(place, name)))
    atexit.register(_finish)


def _loading(place: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_first(*args: Any, **kwargs: Any) -> Any:
        from telegrad.compat.torchscript import hooks

        hooks.set_hooks()
        return getattr(place, name)(*args, **kwargs)

    load_first.__telegrad_original__ = original  # type: ignore[attr-defined]
    return load_first


def _finish() -> None:
    if _BRIDGE in sys.modules:
        from telegrad.compat.torchscript import at_exit

        at_exit.finish()
