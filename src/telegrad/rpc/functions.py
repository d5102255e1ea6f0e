"""Decorators for functions that are called remotely."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.futures import Future

from telegrad.errors import NotAllowed, TelegradError
from telegrad.ids import RRefId
from telegrad.rpc.calls.outcome import describe_function
from telegrad.rpc.group.current import current_table
from telegrad.rpc.references.records import OwnerEntry
from telegrad.wire.allowed.allow_list import AllowList

__all__ = ["async_execution", "checked_future", "guarded"]

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Marks a function that returns a `torch.futures.Future` of its result.

    The worker that runs it does not wait: the caller gets the reply when the future is done, and
    no thread is blocked meanwhile. Put it *below* `staticmethod` and `classmethod`::

        @rpc.functions.async_execution
        def relay(to, x):
            return rpc.rpc_async(to, torch.add, args=(x, 1)).then(lambda f: f.wait() * 2)

        assert rpc.rpc_sync("worker1", relay, args=("worker2", x)) ...
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    if isinstance(fn, torch.jit.ScriptFunction):
        # Others find it by its name, which a script function keeps elsewhere.
        path = fn.qualified_name.removeprefix("__torch__.")
        module, _, wrapper.__qualname__ = path.rpartition(".")
        wrapper.__module__ = module or "__main__"
        wrapper.__name__ = wrapper.__qualname__
    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def checked_future(func: Callable[..., Any], value: Any) -> Future[Any]:
    """The return value of a function marked with `async_execution`, if it is a future.

    Raises:
        TelegradError: it is not a future.
    """
    if isinstance(value, torch._C.Future):  # the type that `then` returns
        return value  # type: ignore[return-value]
    if isinstance(func._wrapped_async_rpc_function, torch.jit.ScriptFunction):  # type: ignore[attr-defined]
        raise TelegradError(
            "Async functions must return an IValue of Future type, but got "
            f"{type(value).__name__}: {describe_function(func)} is decorated with "
            "@rpc.functions.async_execution"
        )
    raise TelegradError(
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
        f"but {describe_function(func)}, decorated with @rpc.functions.async_execution, returned "
        f"a {type(value).__name__}"
    )


def guarded(func: Callable[..., Any], allowed: AllowList) -> Callable[..., Any]:
    """Adds a check of the method to telegrad's own functions that run a method of a remote value;
    returns other functions unchanged."""
    if func.__module__ == "telegrad.nn.remote_module" and func.__name__ == "_forward":

        @functools.wraps(func)
        def forward(module_rref: Any, *args: Any) -> Any:
            module = module_rref.local_value()
            allowed.check_method(type(module), "forward")
            return func(_Checked(module), *args)

        return forward
    if func.__module__ == "telegrad.rpc.references.proxy" and func.__name__.startswith(
        "call_owned"
    ):

        @functools.wraps(func)
        def call(owned: Any, name: str, args: Any, kwargs: Any) -> Any:
            entry = current_table().entry(owned) if isinstance(owned, RRefId) else owned
            if not isinstance(entry, OwnerEntry):  # an OwnerEntry is never in a message
                raise NotAllowed(
                    f"methods of {owned!r} may not be run here: it is not a remote value"
                )
            allowed.check_method(type(entry.wait()), name)
            return func(entry, name, args, kwargs)

        return call
    return func


class _Checked:
    """A value that was checked, in place of a reference that might lead to another one later."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def local_value(self) -> Any:
        return self._value
