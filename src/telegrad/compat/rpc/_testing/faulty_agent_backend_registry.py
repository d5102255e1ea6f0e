"""Registers `BackendType.FAULTY_TENSORPIPE`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from telegrad.compat.rpc import backend_registry
from telegrad.compat.rpc._testing.faulty_agent import (
    FaultyTensorPipeAgent,
    FaultyTensorPipeRpcBackendOptions,
    start,
)

__all__: list[str] = []


def _construct(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = 16,
    messages_to_fail: Sequence[str] = (),
    messages_to_delay: Mapping[str, float] | None = None,
    num_fail_sends: int = 0,
    **kwargs: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        num_worker_threads=num_worker_threads,
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        messages_to_fail=messages_to_fail,
        messages_to_delay=messages_to_delay,
        num_fail_sends=num_fail_sends,
    )


def _init(
    store: Store, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> FaultyTensorPipeAgent:
    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. "
            f"{rpc_backend_options}"
        )
    return start(store, name, rank, world_size, rpc_backend_options)


if not backend_registry.backend_registered("FAULTY_TENSORPIPE"):
    backend_registry.register_backend("FAULTY_TENSORPIPE", _construct, _init)
