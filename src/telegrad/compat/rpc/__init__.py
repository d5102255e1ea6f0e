"""In the place of `torch.distributed.rpc`: what torch's has, and `init_rpc`."""

# ruff: noqa: F401

from __future__ import annotations

import logging
import numbers
from typing import Any

from torch._C._distributed_c10d import Store

from telegrad import autograd
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
from telegrad.compat.rpc.api import *  # noqa: F403
from telegrad.compat.rpc.backend_registry import (
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from telegrad.compat.rpc.options import (
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    _TensorPipeRpcBackendOptionsBase,
    to_rpc_options,
)
from telegrad.compat.rpc.profiling import _server_process_global_profile
from telegrad.rpc.group.rendezvous import meet
from telegrad.rpc.group.worker_info import WorkerInfo

_DEFAULT_INIT_METHOD = constants.DEFAULT_INIT_METHOD
_DEFAULT_NUM_WORKER_THREADS = constants.DEFAULT_NUM_WORKER_THREADS
_DEFAULT_RPC_TIMEOUT_SEC = constants.DEFAULT_RPC_TIMEOUT_SEC
_UNSET_RPC_TIMEOUT = constants.UNSET_RPC_TIMEOUT
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
    autograd._init(rank)
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
    if api._is_current_rpc_agent_set():
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
        **api._rref_context_get_debug_info(),
        **api._get_current_rpc_agent().get_debug_info(),
        **autograd._get_debug_info(),
    }


def _enable_jit_rref_pickle() -> None:
    """From here on this thread may save TorchScript modules that hold references."""
    from telegrad.compat.torchscript.references import allow_pickling

    allow_pickling(True)


def _disable_jit_rref_pickle() -> None:
    """The end of `_enable_jit_rref_pickle`."""
    from telegrad.compat.torchscript.references import allow_pickling

    allow_pickling(False)
