"""In the place of `torch.distributed.rpc.backend_registry`.

`BackendType.TENSORPIPE` is telegrad's agent here. Programs may register backends of their own.
"""

from __future__ import annotations

import collections
import enum
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from telegrad.compat.rpc import api, gathering, profiling
from telegrad.compat.rpc import constants as rpc_constants
from telegrad.compat.rpc.agents import TensorPipeAgent
from telegrad.compat.rpc.options import (
    DeviceFacts,
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    check_all,
    device_list,
    reverse_maps,
    to_rpc_options,
)
from telegrad.rpc.group import current
from telegrad.rpc.group.options import RpcOptions
from telegrad.rpc.group.worker import Worker, start_worker

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]

BackendValue = collections.namedtuple(
    "BackendValue", ["construct_rpc_backend_options_handler", "init_backend_handler"]
)


def _backend_type_repr(self: enum.Enum) -> str:
    return f"BackendType.{self.name}"


def _new_backend_type(members: dict[str, Any]) -> Any:
    made = enum.Enum("BackendType", members, module=__name__)  # type: ignore[misc]
    made.__repr__ = _backend_type_repr  # type: ignore[method-assign, assignment]
    made.__doc__ = "The available backends; `register_backend` adds to them."
    return made


BackendType: Any = _new_backend_type({})


def backend_registered(backend_name: str) -> bool:
    """Whether there is a backend of that name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Adds a backend.

    Args:
        construct_rpc_backend_options_handler: makes its options from a timeout, a meeting place
            and whatever else it takes.
        init_backend_handler: starts it and returns its agent; takes `store`, `name`, `rank`,
            `world_size` and `rpc_backend_options`.
    """
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    members = {member.name: member.value for member in BackendType}
    members[backend_name] = BackendValue(
        construct_rpc_backend_options_handler, init_backend_handler
    )
    BackendType = _new_backend_type(members)
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = rpc_constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = rpc_constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """The options of a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Starts a backend; returns its agent."""
    return backend.value.init_backend_handler(*args, **kwargs)


def start_agent(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions,
    rpc_options: RpcOptions,
    make: type[TensorPipeAgent] = TensorPipeAgent,
) -> TensorPipeAgent:
    """Starts a telegrad worker and makes its agent current."""
    made: list[TensorPipeAgent] = []

    def prepare(worker: Worker) -> None:
        # Others call this worker as soon as it listens: then its agent must be complete.
        worker.references.call = profiling.of_table(worker.references.call)
        worker.agent.service.on_failure = partial(_print_failure, worker)
        worker.agent.watch_losses(lambda id_, _: gathering.worker_lost(_name(worker, id_)))
        made.append(make(worker, store, options))

    try:
        worker = start_worker(name, rank, world_size, rpc_options, store, prepare)
        facts = DeviceFacts(
            name,
            torch.cuda.device_count(),
            getattr(options, "device_maps", {}),
            getattr(options, "devices", []),
        )
        everybody = _exchange(worker, facts)
        check_all(everybody, is_static_group=bool(world_size))
        reverse = reverse_maps(name, everybody)
        devices = device_list(facts.devices, facts.device_maps, reverse)
        if devices and torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]
        made[0].use_devices(reverse, devices)
        api._init_rpc_states(made[0])
    except BaseException:
        current.set_current(None)
        for agent in made:
            agent.shutdown()
        raise
    return made[0]


def _exchange(worker: Worker, facts: DeviceFacts) -> Sequence[DeviceFacts]:
    """What all workers of a group tell of their devices; in an open group, this one's."""
    if worker.directory.is_open:
        return [facts]
    workers = [member.id for member in worker.agent.network.members.infos()]
    found = worker.gatherings.gather(
        workers, tuple(facts), timeout=worker.agent.options.rpc_timeout
    )
    return [DeviceFacts(*found[id_]) for id_ in sorted(found)]


def _print_failure(worker: Worker, error: BaseException) -> None:
    """As torch's callee does: what a called function raised is printed where it ran, too."""
    frames = "".join(traceback.format_exception(error))
    print(f"On {worker.info}:\n{error!r}\n{frames}", file=sys.stderr)


def _name(worker: Worker, worker_id: int) -> str:
    return worker.agent.network.members.name_of(worker_id) or str(worker_id)


def check_start(store: Any, options: Any, wanted: type[RpcBackendOptions]) -> None:
    """Raises TypeError, with torch's words, for what a backend cannot be started with."""
    if not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(options, wanted):
        raise TypeError(f"`rpc_backend_options` must be a `{wanted.__name__}`. {options}")


def _tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float, init_method: str, **given: Any
) -> TensorPipeRpcBackendOptions:
    known = ("num_worker_threads", "_transports", "_channels")
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        **{name: given[name] for name in known if name in given},
    )


def _tensorpipe_init_backend_handler(
    store: Store, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    check_start(store, rpc_backend_options, TensorPipeRpcBackendOptions)
    options = to_rpc_options(rpc_backend_options)
    return start_agent(store, name, rank, world_size, rpc_backend_options, options)


register_backend(
    "TENSORPIPE",
    _tensorpipe_construct_rpc_backend_options_handler,
    _tensorpipe_init_backend_handler,
)
