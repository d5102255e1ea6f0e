"""`telegrad.join`, for programs that a launcher starts once per worker, and functions for every
process of a group, however it was started."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch

from telegrad import rpc
from telegrad.errors import TelegradError
from telegrad.launch.workers import DRIVER, check_positive, checked_options
from telegrad.rpc.api import _set_rpc_timeout
from telegrad.rpc.group import current
from telegrad.rpc.group.worker_info import WorkerInfo

__all__ = ["Membership", "join", "manual_seed", "name"]


def join(
    name: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float = 300.0,
    **options: Any,
) -> Membership:
    """Joins the group of the processes that `torchrun` or another launcher has started.

    The launcher sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. Every process runs the
    same program, and calls this once::

        with telegrad.join():
            if telegrad.name() == "driver":
                train()

    Returns when all processes have joined. The end of the block waits for all of them, so the
    workers serve the driver until its block ends. If the driver's block ends with an exception, or
    the driver dies, the others end too.

    Args:
        name: this process's, different from all others. By default "driver" for rank 0, and
            "worker<rank>" for the others.
        rank, world_size: for launchers that do not set `RANK` and `WORLD_SIZE`.
        timeout: seconds to wait for the other processes.
        options: fields of `telegrad.rpc.RpcOptions`. Calls have no time limit by default.

    Raises:
        TelegradError: a process did not join in time, two have the same name, or this one belongs
            to a group already.
        TypeError, ValueError: the name or an option is invalid, or the launcher has not set a
            variable.
    """
    _check_alone()
    check_positive("timeout", timeout)
    chosen = checked_options("join", options)
    calls, chosen.rpc_timeout = chosen.rpc_timeout, float(timeout)
    rank = _from_environment("RANK") if rank is None else rank
    world_size = _from_environment("WORLD_SIZE") if world_size is None else world_size
    if name is None:
        name = DRIVER if rank == 0 else f"worker{rank}"
    try:
        WorkerInfo(name, 0)
    except TelegradError as error:
        raise ValueError(str(error)) from None
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=chosen)
    _set_rpc_timeout(calls)
    return Membership(current.current())


def _check_alone() -> None:
    """
    Raises:
        TelegradError: this process belongs to a group already.
    """
    worker = current.acting()
    if worker is not None:
        raise TelegradError(
            f"this process is {worker.info.name!r} of a group already: join() is called once, by "
            "processes that a launcher such as torchrun has started. Leave the other group first, "
            "by closing what workers() or join() returned"
        )


def _from_environment(variable: str) -> int:
    text = os.environ.get(variable)
    if text is None:
        raise ValueError(
            f"{variable} is not set: start the program by torchrun or telegrad run, or pass rank= "
            "and world_size= to join. To start workers from this process, use telegrad.workers()"
        )
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable} must be a whole number, got {text!r}") from None


class Membership:
    """This process's place in a group that it has joined: a context manager, or use `close()`."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.name: str = worker.info.name
        """The name of this process."""
        infos = worker.agent.network.members.infos()
        self.names = tuple(info.name for info in sorted(infos, key=lambda info: info.id))
        """The names of all processes of the group, by rank."""

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._leave(graceful=kind is None)

    def __repr__(self) -> str:
        return f"<{self.name!r} of {', '.join(map(repr, self.names))}>"

    def close(self, timeout: float = 0) -> None:
        """Serves the others until all of them have called this, too, and no call is open; then
        leaves the group. Does not wait for processes that have died. A second call does nothing.

        Args:
            timeout: seconds to wait; 0 means no limit.

        Raises:
            RpcTimeout: it took longer. This process has left the group nevertheless.
        """
        self._leave(graceful=True, timeout=timeout)

    def _leave(self, *, graceful: bool, timeout: float = 0) -> None:
        if current.acting() is self._worker:
            rpc.shutdown(graceful=graceful, timeout=timeout)


def name() -> str:
    """The name of this process in its group.

    Raises:
        NotInitialized: it belongs to no group.

    Example::

        telegrad.name()  # "driver"
        telegrad.call("a", telegrad.name)  # "a"
    """
    return current.current().info.name


def manual_seed(seed: int) -> torch.Generator:
    """Seeds this process as `torch.manual_seed` does, and every other process of the group.

    The others get different seeds, made from `seed` and their names, which are the same in each
    run. Without a group this is `torch.manual_seed`.

    Args:
        seed: a whole number.

    Returns:
        The generator of this process, as `torch.manual_seed` does.

    Raises:
        WorkerLost: a worker has died or does not answer.

    Example::

        with telegrad.workers("a", "b"):
            telegrad.manual_seed(0)
            layer = telegrad.module("a", nn.Linear, 3, 3)  # the same weights in each run
    """
    generator = torch.manual_seed(seed)
    if rpc.is_initialized():
        worker = current.current()
        others = [info for info in worker.agent.network.members.infos() if info != worker.info]
        for seeded in [rpc.rpc_async(i, _seed, args=(_seed_for(i.name, seed),)) for i in others]:
            seeded.wait()
    return generator


def _seed_for(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{int(seed)}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
