"""Decorators for functions that are called remotely."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["async_execution"]

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Marks a function whose result is a `torch.futures.Future` of the real result.

    The worker that runs it does not wait: the caller gets the reply when the future is done, and
    no thread is parked meanwhile. Put it *below* `staticmethod` and `classmethod`::

        @rpc.functions.async_execution
        def relay(to, x):
            return rpc.rpc_async(to, torch.add, args=(x, 1)).then(lambda f: f.wait() * 2)

        assert rpc.rpc_sync("worker1", relay, args=("worker2", x)) ...
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    if isinstance(fn, torch.jit.ScriptFunction):
        # Others find it by its name, which a script function does not tell in the usual way.
        path = fn.qualified_name.removeprefix("__torch__.")
        module, _, wrapper.__qualname__ = path.rpartition(".")
        wrapper.__module__ = module or "__main__"
        wrapper.__name__ = wrapper.__qualname__
    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]
