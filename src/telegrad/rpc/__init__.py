"""Remote calls and remote references. The API is that of `torch.distributed.rpc`."""

from telegrad.rpc import functions
from telegrad.rpc.api import (
    UNSET_RPC_TIMEOUT,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_initialized,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from telegrad.rpc.api import (
    _all_gather as _all_gather,
)
from telegrad.rpc.api import (
    _barrier as _barrier,
)
from telegrad.rpc.api import (
    _rref_context_get_debug_info as _rref_context_get_debug_info,
)
from telegrad.rpc.api import (
    _set_rpc_timeout as _set_rpc_timeout,
)
from telegrad.rpc.api import (
    _wait_all as _wait_all,
)
from telegrad.rpc.group.options import RpcOptions, TlsOptions
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.references.rref import RRef

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
