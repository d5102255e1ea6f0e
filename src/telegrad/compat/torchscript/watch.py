"""Loads the bridge when something is first compiled, and not before.

Three functions are looked up by torch whenever it compiles: the one that parses a function, the
ones that turn an annotation, or a value, into a type. Until one of them is called, a stand-in is
all there is.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.jit.annotations
import torch.jit.frontend

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
