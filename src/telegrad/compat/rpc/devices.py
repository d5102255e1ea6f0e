"""Checking device maps, with torch's words: programs and suites look for them.

A device map says which device of a callee a tensor of a caller's device is put on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

__all__ = ["DeviceFacts", "check_all", "device_list", "reverse_maps"]

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
