"""In the place of `torch.distributed.rpc.options`: every option of torch's agents is accepted.

What has a meaning here: `rpc_timeout`, `init_method`, `num_worker_threads`, and `device_maps` and
`devices`, which are checked as torch checks them, with its words. A device map says which device of
a callee a tensor of a caller's device is put on. What has none: `_transports` and `_channels` name
parts of TensorPipe. telegrad's own options (`RpcOptions`: secret, TLS, transport, limits ...) come
from its environment variables, or from an `RpcOptions` passed as `telegrad_options`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from telegrad.compat.rpc import constants
from telegrad.rpc.group.options import RpcOptions, checked_timeout

__all__ = [
    "DeviceFacts",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "check_all",
    "device_list",
    "reverse_maps",
]

DeviceType = int | str | torch.device


class RpcBackendOptions:
    """What every backend is told: the default timeout of calls, and where the workers meet."""

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
    ) -> None:
        _check("rpc_timeout", rpc_timeout, (int, float))
        _check("init_method", init_method, (str,))
        self.rpc_timeout = checked_timeout(rpc_timeout, "rpc_timeout")
        self.init_method = init_method


class _TensorPipeRpcBackendOptionsBase(RpcBackendOptions):
    def __init__(
        self,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[torch.device, torch.device]] | None = None,
        devices: Sequence[torch.device] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        _check("num_worker_threads", num_worker_threads, (int,))
        if num_worker_threads <= 0:
            raise ValueError(f"num_worker_threads must be positive, got {num_worker_threads}")
        self.num_worker_threads = num_worker_threads
        self.device_maps = {name: dict(map_) for name, map_ in (device_maps or {}).items()}
        self.devices = list(devices or [])
        self._transports = _transports
        self._channels = _channels

    def _set_device_map(self, worker: str, device_map: Mapping[torch.device, torch.device]) -> None:
        self.device_maps.setdefault(worker, {}).update(device_map)


class TensorPipeRpcBackendOptions(_TensorPipeRpcBackendOptionsBase):
    """The options of `BackendType.TENSORPIPE`, which is telegrad's agent here.

    Args:
        device_maps: by worker name, which of this worker's devices is which of that worker's.
        devices: the local devices in use; by default those of the maps.
        telegrad_options: what torch has no word for; its timeout, meeting place and number of
            threads are taken from the arguments here.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceType, DeviceType]] | None = None,
        devices: Sequence[DeviceType] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
        telegrad_options: RpcOptions | None = None,
    ) -> None:
        super().__init__(
            num_worker_threads,
            _transports,
            _channels,
            rpc_timeout,
            init_method,
            {name: _to_device_map(map_) for name, map_ in (device_maps or {}).items()},
            _to_device_list(devices or ()),
        )
        self.telegrad_options = telegrad_options

    def set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Adds to the map of the devices of worker `to`."""
        known = self.device_maps.get(to, {})
        for ours, theirs in _to_device_map(device_map).items():
            if known.get(ours, theirs) != theirs:
                raise ValueError(
                    "`set_device_map` only supports 1-to-1 mapping, trying"
                    f" to map {ours} to {theirs} and {known[ours]}"
                )
        self._set_device_map(to, _to_device_map(device_map))

    def set_devices(self, devices: Sequence[DeviceType]) -> None:
        """Says which local devices are used."""
        self.devices = _to_device_list(devices)


def to_rpc_options(options: RpcBackendOptions) -> RpcOptions:
    """What the agent itself is started with."""
    threads = getattr(options, "num_worker_threads", constants.DEFAULT_NUM_WORKER_THREADS)
    base = getattr(options, "telegrad_options", None) or RpcOptions()
    return replace(
        base,
        rpc_timeout=options.rpc_timeout,
        init_method=options.init_method,
        num_worker_threads=threads,
    )


def _check(name: str, value: object, types: tuple[type, ...]) -> None:
    if not isinstance(value, types):
        raise TypeError(
            f"incompatible constructor arguments: {name} must be "
            f"{' or '.join(t.__name__ for t in types)}, got {value!r}"
        )


def _to_device(device: DeviceType) -> torch.device:
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(
            f"`set_devices` expect a list of CUDA devices, but got device type {device.type}."
        )
    return device


def _to_device_map(
    device_map: Mapping[DeviceType, DeviceType],
) -> dict[torch.device, torch.device]:
    full: dict[torch.device, torch.device] = {}
    reverse: dict[torch.device, torch.device] = {}
    for key, value in device_map.items():
        ours, theirs = torch.device(key), torch.device(value)
        if theirs in reverse:
            raise ValueError(
                "`device_map` only supports 1-to-1 mapping, "
                f"trying to map {ours} and {reverse[theirs]} to {theirs}"
            )
        full[ours] = theirs
        reverse[theirs] = ours
    return full


def _to_device_list(devices: Sequence[DeviceType]) -> list[torch.device]:
    return [_to_device(device) for device in devices]


DeviceMap = Mapping[torch.device, torch.device]


class DeviceFacts(NamedTuple):
    """What a worker tells the others of its devices."""

    name: str
    device_count: int
    device_maps: dict[str, dict[torch.device, torch.device]]
    devices: list[torch.device]


def _are_valid(devices: Collection[torch.device], device_count: int) -> bool:
    return all(
        device.type == "cpu" or (device.type == "cuda" and 0 <= device.index < device_count)
        for device in devices
    )


def check_all(workers: Sequence[DeviceFacts], *, is_static_group: bool = True) -> None:
    """
    Raises:
        ValueError: a worker's devices or maps do not fit what the others have.
    """
    by_name = {worker.name: worker for worker in workers}
    for worker in workers:
        _check_devices(worker)
    for worker in workers:
        # In an open group the target may not have joined yet.
        if is_static_group and not set(worker.device_maps) <= set(by_name):
            raise ValueError(
                f"Node {worker.name} has invalid target node names in its device maps\n"
                f"device maps = {worker.device_maps.keys()}\n"
                f"node names = {list(by_name)}"
            )
        for target, map_ in worker.device_maps.items():
            _check_map(worker, target, map_, by_name.get(target))


def _check_devices(worker: DeviceFacts) -> None:
    if len(set(worker.devices)) != len(worker.devices):
        raise ValueError(f"Node {worker.name} has duplicated devices\ndevices = {worker.devices}")
    if not _are_valid(worker.devices, worker.device_count):
        raise ValueError(
            f"Node {worker.name} has devices with invalid indices\n"
            f"devices = {worker.devices}\n"
            f"device count = {worker.device_count}"
        )


def _check_map(source: DeviceFacts, name: str, map_: DeviceMap, target: DeviceFacts | None) -> None:
    where = f"in its device map for {name}\ndevice map = {map_}\n"
    if len(set(map_.values())) != len(map_):
        raise ValueError(f"Node {source.name} has duplicated target devices {where}")
    _check_side(source.name, "source", set(map_), source, where)
    if target is not None:
        _check_side(source.name, "target", set(map_.values()), target, where)


def _check_side(
    name: str, side: str, devices: set[torch.device], worker: DeviceFacts, where: str
) -> None:
    if worker.devices:
        if not devices <= set(worker.devices):
            raise ValueError(
                f"Node {name} has unexpected {side} devices {where}devices = {worker.devices}"
            )
    elif not _are_valid(devices, worker.device_count):
        raise ValueError(
            f"Node {name} has {side} devices with invalid indices {where}"
            f"device count = {worker.device_count}"
        )


def reverse_maps(
    own_name: str, workers: Sequence[DeviceFacts]
) -> dict[str, dict[torch.device, torch.device]]:
    """How tensors of this worker's devices go back to each caller."""
    return {
        worker.name: {v: k for k, v in worker.device_maps[own_name].items()}
        for worker in workers
        if own_name in worker.device_maps
    }


def device_list(
    devices: Sequence[torch.device],
    device_maps: Mapping[str, DeviceMap],
    reverse: Mapping[str, DeviceMap],
) -> list[torch.device]:
    """The devices in use here: those given, or else those of the maps."""
    used = set(devices)
    if not used:
        for map_ in (*device_maps.values(), *reverse.values()):
            used.update(map_)
        used.discard(torch.device("cpu"))
    return sorted(used, key=lambda device: device.index)
