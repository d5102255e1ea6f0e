"""In the place of `torch.distributed.rpc._testing`: an agent that loses and delays messages."""

from telegrad.compat.rpc._testing import faulty_agent_backend_registry
from telegrad.compat.rpc._testing.faulty_agent import (
    FaultyTensorPipeAgent,
    FaultyTensorPipeRpcBackendOptions,
)

__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]


def is_available() -> bool:
    """True."""
    return True
