"""What torch's old profiler sees of a call: an event at the caller, under torch's name for it, and
what the callee has done for it (`remote_events`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled, _profiler_type
from torch._C._profiler import ActiveProfilerType
from torch.futures import Future

from telegrad import rpc as native
from telegrad.compat.rpc import remote_events
from telegrad.compat.rpc.internal import (
    RPCExecMode,
    _build_rpc_profiling_key,
    builtin_name,
)
from telegrad.rpc.calls.kept_errors import fail
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.references.rref import RRef
from telegrad.rpc.references.table import Call

__all__ = ["call", "call_within", "is_wanted", "of_table", "remote"]


def is_wanted() -> bool:
    """Whether torch's old profiler watches this thread; the new one is not told of calls, as with
    torch's own RPC."""
    return _profiler_enabled() and _profiler_type() == ActiveProfilerType.LEGACY


def call(
    mode: RPCExecMode,
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: dict[str, Any] | None,
    timeout: float,
) -> Future[Any]:
    """Makes a call whose event ends when its future does."""
    key = _key(mode, to, func)
    with torch.autograd.profiler.record_function(key) as record:
        return _ending(record, call_within(key, to, func, args, kwargs, timeout))


def call_within(
    key: str,
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: dict[str, Any] | None,
    timeout: float,
) -> Future[Any]:
    """Makes the call itself, inside of its event."""
    profile = remote_events.profile.of_this_thread()
    if profile is None:
        return native.rpc_async(to, func, args, kwargs, timeout)
    return profile.call(key, to, func, args, kwargs, timeout)


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: dict[str, Any] | None,
    timeout: float,
) -> RRef[Any]:
    """Makes a remote value whose event ends when the owner has made it."""
    key = _key(RPCExecMode.REMOTE, to, func)
    profile = remote_events.profile.of_this_thread()
    with torch.autograd.profiler.record_function(key) as record:
        if profile is None:
            rref = native.remote(to, func, args, kwargs, timeout)
            rref._set_profiling_future(record._call_end_callbacks_on_future(rref._get_future()))
        else:
            rref, have_come = profile.remote(key, to, func, args, kwargs, timeout)
            ended = record._call_end_callbacks_on_future(rref._get_future())
            rref._set_profiling_future(torch.futures.collect_all([ended, have_come]))
    return rref


def of_table(inner: Call) -> Call:
    """Calls that references make themselves: to methods of their values, and for their types."""

    def call(
        mode: str,
        owner: int,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Any:
        if mode != "async" or not is_wanted():
            return inner(mode, owner, func, args, kwargs, timeout)
        with torch.autograd.profiler.record_function(
            _key(RPCExecMode.ASYNC, owner, func)
        ) as record:
            return _ending(record, inner(mode, owner, func, args, kwargs, timeout))

    return call


def _ending(record: Any, future: Future[Any]) -> Future[Any]:
    """Ends the event with the future; returns one that is done after that."""
    ended: Future[Any] = Future()

    def done(_: Future[Any]) -> None:
        try:
            value = future.value()
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            fail(ended, error)
        else:
            ended.set_result(value)

    # What torch returns here takes an exception that was set from Python for a value.
    record._call_end_callbacks_on_future(future).add_done_callback(done)
    return ended


def _key(mode: RPCExecMode, to: str | int | WorkerInfo, func: Callable[..., Any]) -> str:
    name = builtin_name(func)
    if name is None:
        is_scripted = isinstance(func, torch.jit.ScriptFunction)
        name = torch._jit_internal._qualified_name(func) if is_scripted else func.__qualname__
    callee = to if isinstance(to, WorkerInfo) else native.get_worker_info(to)
    return _build_rpc_profiling_key(mode, name, native.get_worker_info().name, callee.name)
