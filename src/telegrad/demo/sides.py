"""The two libraries that can run the job: telegrad, and torch's own RPC to compare it with.

The only module of telegrad that imports torch's RPC, and only when it is asked for as a yardstick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import telegrad.autograd
import telegrad.optim
import telegrad.rpc

__all__ = ["Side", "side_named", "torch_has_rpc"]


@dataclass(frozen=True)
class Side:
    """Modules with the same names in them."""

    name: str
    rpc: Any
    autograd: Any
    optimizer: Any
    options: Any


def side_named(name: str) -> Side:
    """`telegrad` or `torch`."""
    if name == "telegrad":
        return Side(
            name,
            telegrad.rpc,
            telegrad.autograd,
            telegrad.optim.DistributedOptimizer,
            telegrad.rpc.RpcOptions,
        )
    import torch.distributed.autograd
    import torch.distributed.optim
    import torch.distributed.rpc

    return Side(
        name,
        torch.distributed.rpc,
        torch.distributed.autograd,
        torch.distributed.optim.DistributedOptimizer,
        torch.distributed.rpc.TensorPipeRpcBackendOptions,
    )


def torch_has_rpc() -> bool:
    import torch.distributed

    return torch.distributed.is_available() and hasattr(torch._C, "_rpc_init")
