"""Torch's agent objects, as faces of a telegrad worker, and which one is current.

A backend that a program has registered itself brings an agent of its own kind: it is kept and
handed out, and nothing else is asked of it than torch asks.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from telegrad.compat.rpc.options import RpcBackendOptions
from telegrad.errors import NotInitialized, TelegradError
from telegrad.rpc.group import current
from telegrad.rpc.group.worker import Worker
from telegrad.rpc.group.worker_info import WorkerInfo

__all__ = ["RpcAgent", "TensorPipeAgent", "WorkerInfo"]

DeviceMaps = dict[str, dict[torch.device, torch.device]]

_is_gil_profiled = False
_foreign: Any = None  # the agent of a backend that a program has registered
_faces: dict[int, TensorPipeAgent] = {}  # of workers in this process, by id()


class RpcAgent:
    """What torch's agents have in common."""


class TensorPipeAgent(RpcAgent):
    """The agent of this process, as programs written for torch see it."""

    def __init__(
        self,
        worker: Worker,
        store: Store,
        options: RpcBackendOptions,
    ) -> None:
        self._worker = worker
        self._options = options
        self._reverse_device_maps: DeviceMaps = {}
        self._devices: list[torch.device] = []
        self.store = store
        _faces[id(worker)] = self

    def use_devices(self, reverse_device_maps: DeviceMaps, devices: list[torch.device]) -> None:
        """What the workers have agreed on, once all have told of their devices."""
        self._reverse_device_maps = reverse_device_maps
        self._devices = devices

    @property
    def is_static_group(self) -> bool:
        return not self._worker.directory.is_open

    @property
    def worker(self) -> Worker:
        """telegrad's own object."""
        return self._worker

    @property
    def name(self) -> str:
        return self._worker.info.name

    @property
    def id(self) -> int:
        return self._worker.info.id

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        if worker is None:
            return self._worker.info
        network = self._worker.agent.network
        worker_id = network.members.id_of(worker) if isinstance(worker, str) else worker
        name = None if worker_id is None else network.members.name_of(worker_id)
        if worker_id is None or name is None:
            raise TelegradError(f"could not find destination {worker}")
        return WorkerInfo(name, worker_id)

    def get_worker_infos(self) -> list[WorkerInfo]:
        return self._worker.agent.network.members.infos()

    def sync(self, timeout: float = 0) -> None:
        """Waits until no worker has work left and no call is under way; all must call it."""
        self._worker.wait_until_quiet(_deadline(timeout))

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """
        Args:
            shutdown: parts from the others, who part as well: none of them calls any more.
        """
        if shutdown:
            self._worker.part(_deadline(timeout))
        else:
            self.sync(timeout)

    def shutdown(self) -> None:
        """Ends at once."""
        self._worker.close()
        _faces.pop(id(self._worker), None)

    def get_debug_info(self) -> dict[str, str]:
        agent = self._worker.agent
        begun, ended = agent.service.work_counts()
        info = {
            "agent.thread_pool_size": str(agent.options.num_worker_threads),
            "agent.num_idle_threads": str(agent.network.calls.idle_threads),
            "agent.num_pending_requests": str(agent.pending_calls()),
            "agent.client_active_calls": str(agent.pending_calls()),
            "agent.server_active_calls": str(begun - ended),
            "agent.server_active_async_calls": "0",
        }
        if _is_gil_profiled:
            info["agent.gil_average_wait_time_us"] = f"{_gil_wait_seconds() * 1e6:.0f}"
        return info

    get_metrics = get_debug_info

    def _get_device_map(self, worker: WorkerInfo) -> dict[torch.device, torch.device]:
        maps: DeviceMaps = getattr(self._options, "device_maps", {})
        return maps.get(worker.name, {})


def _gil_wait_seconds() -> float:
    """How long a thread that has let the interpreter lock go waits to get it back, now."""
    began = time.perf_counter()
    time.sleep(0)  # lets it go
    return time.perf_counter() - began


def _deadline(timeout: float) -> float:
    return time.monotonic() + timeout if timeout > 0 else float("inf")


def enable_gil_profiling(flag: bool) -> None:
    """Whether debug info tells how long threads wait for the interpreter lock."""
    global _is_gil_profiled
    _is_gil_profiled = flag


def _is_current_rpc_agent_set() -> bool:
    return _foreign is not None or current.is_set()


def find_face() -> TensorPipeAgent | None:
    """The face of this process's worker; None if it was started by `telegrad.rpc.init_rpc`."""
    return _faces.get(id(current.current()))


def _get_current_rpc_agent() -> Any:
    if _foreign is not None:
        return _foreign
    worker = current.current()
    face = _faces.get(id(worker))
    if face is None:
        raise NotInitialized("this worker was started by telegrad.rpc.init_rpc: it has no face")
    return face


def _set_and_start_rpc_agent(agent: Any) -> None:
    global _foreign
    if isinstance(agent, TensorPipeAgent):
        current.set_current(agent.worker)
    else:
        _foreign = agent


def _reset_current_rpc_agent() -> None:
    global _foreign
    _foreign = None
    current.set_current(None)
