"""In the place of `torch.distributed.rpc.api`: calls, and what programs reach for beside them.

The calls themselves are telegrad's; here stand the checks, texts and hooks of torch's. A program
may set `_ignore_rref_leak` or replace a function of this module, as with torch's: what is used
from here is looked up here when it is used.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.futures
from torch.futures import Future

from telegrad import rpc as native
from telegrad.compat.rpc import gathering, profiling
from telegrad.compat.rpc.agents import (
    TensorPipeAgent,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
)
from telegrad.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from telegrad.compat.rpc.gathering import (
    AllGatherStates,
    _all_gather,
    _barrier,
    _broadcast_to_followers,
    _gather_to_leader,
    _wait_all_workers,
)
from telegrad.compat.rpc.internal import (
    PythonUDF,
    RPCExecMode,
    _build_rpc_profiling_key,
    _internal_rpc_pickler,
    _run_pickled,
    builtin_name,
)
from telegrad.compat.torchscript.scripted import check_arguments
from telegrad.errors import RRefError
from telegrad.rpc.api import _set_rpc_timeout, get_rpc_timeout
from telegrad.rpc.calls.futures import wait_for
from telegrad.rpc.group import current
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.references.proxy import _rref_typeof_on_owner
from telegrad.rpc.references.rref import RRef
from telegrad.rpc.references.texts import leak_error

__all__ = [
    "AllGatherStates",
    "PyRRef",
    "RRef",
    "_all_gather",
    "_barrier",
    "_broadcast_to_followers",
    "_build_rpc_profiling_key",
    "_cleanup_python_rpc_handler",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_destroy_rref_context",
    "_gather_to_leader",
    "_get_current_rpc_agent",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_rref_typeof_on_owner",
    "_set_and_start_rpc_agent",
    "_set_rpc_timeout",
    "_wait_all",
    "_wait_all_workers",
    "get_rpc_timeout",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

for _function in (_broadcast_to_followers, _gather_to_leader):
    # Remote calls name a function by its module: this one, where programs put their own instead.
    _function.__module__ = __name__

_P = ParamSpec("_P")
_R = TypeVar("_R")

PyRRef = RRef

_SCRIPTED = (torch.jit.ScriptFunction, torch._C.ScriptMethod)

_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Packs the calls within it by another pickler, which has `serialize(obj)`."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def _require_initialized(func: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(func)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not _is_current_rpc_agent_set():
            current.refuse_if_forked()
            raise RuntimeError(
                "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
            )
        return func(*args, **kwargs)

    return wrapper


def _init_rpc_states(agent: Any) -> None:
    gathering.set_all_names({info.name for info in agent.get_worker_infos()})
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


# -- calls


@_require_initialized
def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Runs `func` on worker `to` and returns its result: see `telegrad.rpc.rpc_sync`."""
    if profiling.is_wanted():
        return wait_for(profiling.call(RPCExecMode.SYNC, to, func, args, kwargs, timeout))
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _packed(func, args, kwargs)
    try:
        return native.rpc_sync(to, func, args, kwargs, timeout)
    except TypeError as error:
        if builtin_name(func) is None:
            raise
        raise RuntimeError(
            f"Overloaded torch operator invoked from Python failed to match any schema:\n{error}"
        ) from error


@_require_initialized
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Runs `func` on worker `to` and returns a future: see `telegrad.rpc.rpc_async`."""
    if isinstance(func, _SCRIPTED):
        _check_scripted(func, args, kwargs)
    if profiling.is_wanted():
        future = profiling.call(RPCExecMode.ASYNC, to, func, args, kwargs, timeout)
    else:
        if _default_pickler is not _internal_rpc_pickler:
            func, args, kwargs = _packed(func, args, kwargs)
        future = native.rpc_async(to, func, args, kwargs, timeout)
    collected: list[Future[Any]] | None = getattr(_thread_local_var, "future_list", None)
    if collected is not None:
        collected.append(future)
    return future


@_require_initialized
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Runs `func` on worker `to`, which keeps the result: see `telegrad.rpc.remote`."""
    if isinstance(func, _SCRIPTED):
        _check_scripted(func, args, kwargs)
    if profiling.is_wanted():
        return profiling.remote(to, func, args, kwargs, timeout)
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _packed(func, args, kwargs)
    return native.remote(to, func, args, kwargs, timeout)


def _check_scripted(func: Any, args: Sequence[Any] | None, kwargs: dict[str, Any] | None) -> None:
    """What torch's RPC refuses at once, of functions and methods of TorchScript."""
    if isinstance(func, torch._C.ScriptMethod):
        raise TypeError(
            f"cannot pickle the TorchScript method {func.name!r}: call a function that takes the "
            "module, or a method of a reference to it"
        )
    check_arguments(func.schema, args or (), kwargs or {})


def _packed(
    func: Callable[..., Any], args: Sequence[Any] | None, kwargs: dict[str, Any] | None
) -> tuple[Callable[..., Any], tuple[Any, ...], None]:
    """The call of a function, packed by the pickler that the program has set."""
    return _run_pickled, _default_pickler.serialize(PythonUDF(func, args or (), kwargs or {})), None


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Waits, at its end, for all futures that `rpc_async` gave to this thread within it."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """A worker's name and id; without an argument, this worker's."""
    agent = _get_current_rpc_agent()
    info: WorkerInfo = (
        agent.get_worker_info() if worker_name is None else agent.get_worker_info(worker_name)
    )
    return info


def _rref_context_get_debug_info() -> dict[str, str]:
    return current.current().references.table.debug_info()


# -- the end


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Ends this worker's part in the group.

    Args:
        graceful: waits until all workers have called it and no work is left anywhere.
        timeout: seconds for that; 0 is no limit.

    Raises:
        RuntimeError: it took longer, or, if `_ignore_rref_leak` is unset, others still hold
            references to values here. The worker is ended all the same.
    """
    if not graceful:
        _finalize_shutdown()
        return
    try:
        agent = _get_current_rpc_agent()
        if not isinstance(agent, TensorPipeAgent):
            agent.join(shutdown=True, timeout=timeout)
        elif agent.is_static_group:
            _wait_all_workers_here(timeout)
            agent.sync(timeout)
            _delete_all_user_and_unforked_owner_rrefs()
            # Now: after the last meeting workers leave, and those of them that leaked are gone.
            leaks = [] if _ignore_rref_leak else agent.worker.references.table.leak_report()
            agent.join(shutdown=True, timeout=timeout)
            if leaks:
                raise leak_error(leaks)
        else:
            agent.worker.shutdown(graceful=True, timeout=timeout)
    finally:
        _finalize_shutdown(was_checked=True)


def _wait_all_workers_here(timeout: float) -> None:
    globals()["_wait_all_workers"](timeout)  # a program may have put its own there


def _finalize_shutdown(*, was_checked: bool = False) -> None:
    agent = _get_current_rpc_agent()
    try:
        _destroy_rref_context(_ignore_rref_leak or was_checked)
    finally:
        agent.shutdown()
        gathering.forget_all()
        _cleanup_python_rpc_handler()
        _reset_current_rpc_agent()


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 100.0) -> None:
    """Ends all references that cross this worker's border; all workers must do it."""
    still_open = current.current().references.table.flush(timeout)
    if still_open:
        raise RRefError("remote references were still open: " + "; ".join(still_open))


def _destroy_rref_context(ignore_rref_leak: bool) -> None:
    if not ignore_rref_leak and isinstance(_get_current_rpc_agent(), TensorPipeAgent):
        current.current().references.table.check_leaks()


def _cleanup_python_rpc_handler() -> None:
    """torch's C++ lets go of its Python functions here; telegrad has nothing to let go of."""
