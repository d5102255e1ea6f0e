"""In the place of `torch.distributed.rpc`."""

from __future__ import annotations

import logging
import numbers
from typing import Any

from torch._C._distributed_c10d import Store

import telegrad.compat.autograd as dist_autograd
from telegrad.compat.rpc import (
    _utils,
    api,
    backend_registry,
    constants,
    functions,
    internal,
    options,
    rref_proxy,
    server_process_global_profiler,
)
from telegrad.compat.rpc.agents import RpcAgent, TensorPipeAgent, enable_gil_profiling
from telegrad.compat.rpc.api import (
    AllGatherStates,
    PyRRef,
    RRef,
    _cleanup_python_rpc_handler,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _rref_context_get_debug_info,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    _wait_all,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from telegrad.compat.rpc.backend_registry import (
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from telegrad.compat.rpc.constants import (
    DEFAULT_INIT_METHOD as _DEFAULT_INIT_METHOD,
)
from telegrad.compat.rpc.constants import (
    DEFAULT_NUM_WORKER_THREADS as _DEFAULT_NUM_WORKER_THREADS,
)
from telegrad.compat.rpc.constants import (
    DEFAULT_RPC_TIMEOUT_SEC as _DEFAULT_RPC_TIMEOUT_SEC,
)
from telegrad.compat.rpc.constants import (
    UNSET_RPC_TIMEOUT as _UNSET_RPC_TIMEOUT,
)
from telegrad.compat.rpc.options import (
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    _TensorPipeRpcBackendOptionsBase,
    to_rpc_options,
)
from telegrad.compat.rpc.server_process_global_profiler import _server_process_global_profile
from telegrad.rpc.group.rendezvous import meet
from telegrad.rpc.group.worker_info import WorkerInfo

__all__ = [
    "_DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC",
    "_UNSET_RPC_TIMEOUT",
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "PyRRef",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_TensorPipeRpcBackendOptionsBase",
    "_cleanup_python_rpc_handler",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_destroy_rref_context",
    "_get_current_rpc_agent",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_server_process_global_profile",
    "_set_and_start_rpc_agent",
    "_set_rpc_timeout",
    "_utils",
    "_wait_all",
    "api",
    "backend_registered",
    "backend_registry",
    "constants",
    "construct_rpc_backend_options",
    "enable_gil_profiling",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "internal",
    "is_available",
    "options",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "rref_proxy",
    "server_process_global_profiler",
    "shutdown",
]

_is_tensorpipe_available = True
_log = logging.getLogger("telegrad.rpc")


def __getattr__(name: str) -> Any:
    if name == "BackendType":  # made anew by each registration
        return backend_registry.BackendType
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def is_available() -> bool:
    """True: telegrad needs nothing that a torch installation could lack."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Makes this process a worker: see `telegrad.rpc.init_rpc`.

    Args:
        backend: a member of `BackendType`; by default the one that the options are for.
        rpc_backend_options: a `TensorPipeRpcBackendOptions`, or what the backend takes.
    """
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _backend_for(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = construct_rpc_backend_options(backend)
    store, rank, size = meet(to_rpc_options(rpc_backend_options), rank, world_size or None)
    dist_autograd._init(rank)
    _init_rpc_backend(backend, store, name, rank, size or None, rpc_backend_options)


def _backend_for(given: RpcBackendOptions | None) -> Any:
    backends = backend_registry.BackendType
    if given is None:
        return backends.TENSORPIPE
    for candidate in backends:
        if isinstance(given, type(construct_rpc_backend_options(candidate))):
            if candidate is not backends.TENSORPIPE:
                _log.warning(
                    "RPC was initialized with no explicit backend but with options corresponding "
                    "to %(backend)s, hence that backend will be used instead of the default "
                    "BackendType.TENSORPIPE. To silence this warning pass `backend=%(backend)s` "
                    "explicitly.",
                    {"backend": candidate},
                )
            return candidate
    raise TypeError(f"Could not infer backend for options {given}")


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    wanted: list[tuple[Any, Any]] = [
        (backend, backend_registry.BackendType),
        (store, Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, RpcBackendOptions),
    ]
    for value, type_ in wanted:
        if not isinstance(value, type_):
            raise RuntimeError(
                f"Argument {value} must be of type {type_} but got type {type(value)}"
            )


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    backend = backend_registry.BackendType.TENSORPIPE if backend is None else backend
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)


@api._require_initialized
def _get_debug_info() -> dict[str, Any]:
    """What this worker knows of its references, its agent and its autograd contexts."""
    return {
        **_rref_context_get_debug_info(),
        **_get_current_rpc_agent().get_debug_info(),
        **dist_autograd._get_debug_info(),
    }


def _enable_jit_rref_pickle() -> None:
    """From here on this thread may save TorchScript modules that hold references."""
    from telegrad.compat.torchscript.references import allow_pickling

    allow_pickling(True)


def _disable_jit_rref_pickle() -> None:
    """The end of `_enable_jit_rref_pickle`."""
    from telegrad.compat.torchscript.references import allow_pickling

    allow_pickling(False)
