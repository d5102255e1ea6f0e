"""Remote calls and remote references. The API is that of `torch.distributed.rpc`."""

from telegrad.rpc import functions
from telegrad.rpc.api import (
    UNSET_RPC_TIMEOUT,
    _all_gather,
    _barrier,
    _rref_context_get_debug_info,
    _set_rpc_timeout,
    _wait_all,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_initialized,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from telegrad.rpc.options import RpcOptions, TlsOptions
from telegrad.rpc.rref import RRef
from telegrad.rpc.worker_info import WorkerInfo

__all__ = [
    "UNSET_RPC_TIMEOUT",
    "RRef",
    "RpcOptions",
    "TlsOptions",
    "WorkerInfo",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_initialized",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]
