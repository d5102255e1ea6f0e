"""Keeps `torch.compile` out of telegrad.

A compiled function may call other workers; torch's compiler then runs that call as it is, between
two compiled parts, as it does with calls of torch's own RPC. Without this it would trace calls down
to their bytes, and fail there. It is told so once it is there itself: to import it takes a second.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["keep_out"]

_RULES = "torch._dynamo.trace_rules"


@functools.cache
def keep_out() -> None:
    """To be called once."""
    rules = sys.modules.get(_RULES)
    if rules is not None:
        _tell(rules)
    else:
        sys.meta_path.insert(0, _Watcher())


def _tell(rules: Any) -> None:
    rules.add("telegrad")


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

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                _tell(module)

            loader.exec_module = execute_and_tell
        return spec
