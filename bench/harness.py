"""Measures two sides in turn, so that what else the machine does hits both alike.

Every worker process is a worker of both groups, torch's and telegrad's. A case is measured in
rounds; each round times torch, then telegrad, and gives one ratio. The reported ratio is the median
of those, the reported times are medians too. Absolute times mean little on a shared machine.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed.autograd
import torch.distributed.rpc

import telegrad.autograd
import telegrad.rpc

Op = Callable[[], object]

ROUNDS = 5
SECONDS_A_ROUND = 0.25


@dataclass(frozen=True)
class Side:
    """One of the two contestants."""

    name: str
    rpc: ModuleType
    autograd: ModuleType


TORCH = Side("torch", torch.distributed.rpc, torch.distributed.autograd)
TELEGRAD = Side("telegrad", telegrad.rpc, telegrad.autograd)
SIDES = {"torch": TORCH, "telegrad": TELEGRAD}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to measure.

    Args:
        prepare: sets it up for a side; returns what is timed.
        per: how many calls one run of it makes; times are given per call.
        mark: how many times faster telegrad must be.
        workers: how many workers it needs, the driver among them.
    """

    name: str
    prepare: Callable[[Side], Op]
    per: int = 1
    mark: float | None = None
    workers: int = 2


@dataclass(frozen=True, kw_only=True)
class Result:
    name: str
    torch: float
    telegrad: float
    ratio: float
    mark: float | None
    unit: str = "s"

    @property
    def is_good(self) -> bool:
        return self.ratio >= (self.mark if self.mark is not None else 1.0)


def measure(case: Case) -> Result:
    ops = {side.name: case.prepare(side) for side in (TORCH, TELEGRAD)}
    for op in ops.values():
        for _ in range(5):
            op()
    times: dict[str, list[float]] = {name: [] for name in ops}
    for _ in range(ROUNDS):
        for name, op in ops.items():
            times[name].append(_time(op) / case.per)
    ratios = [t / g for t, g in zip(times["torch"], times["telegrad"], strict=True)]
    return Result(
        name=case.name,
        torch=statistics.median(times["torch"]),
        telegrad=statistics.median(times["telegrad"]),
        ratio=statistics.median(ratios),
        mark=case.mark,
    )


def median_of(ops: list[Callable[[], float]]) -> list[float]:
    """The median times of several things that time themselves, measured in turn."""
    for op in ops:
        op()
    rounds = [[op() for op in ops] for _ in range(15)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def _time(op: Op) -> float:
    """The median of one round's runs."""
    runs = []
    end = time.perf_counter() + SECONDS_A_ROUND
    while len(runs) < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        own = op()  # a float is what it has timed itself
        runs.append(own if isinstance(own, float) else time.perf_counter() - begun)
    return statistics.median(runs)


@contextlib.contextmanager
def group(size: int, sides: tuple[str, ...] = ("torch", "telegrad")) -> Iterator[None]:
    """`size` workers named worker0 (this process) ..., on the given sides."""
    with tempfile.TemporaryDirectory(prefix="telegrad-bench-") as directory:
        spawn = multiprocessing.get_context("spawn")
        done = spawn.Event()
        processes = [
            spawn.Process(target=_serve, args=(directory, rank, size, sides, done), daemon=True)
            for rank in range(1, size)
        ]
        for process in processes:
            process.start()
        for side in sides:
            join_group(side, directory, 0, size)
        try:
            yield
        finally:
            done.set()
            for side in sides:
                SIDES[side].rpc.shutdown()
            for process in processes:
                process.join()


def join_group(side: str, directory: str, rank: int, size: int) -> None:
    where = f"file://{directory}/{side}"
    if side == "torch":
        options = torch.distributed.rpc.TensorPipeRpcBackendOptions(init_method=where)
    else:
        options = telegrad.rpc.RpcOptions(init_method=where)
    SIDES[side].rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options
    )


def _serve(directory: str, rank: int, size: int, sides: tuple[str, ...], done: object) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for side in sides:
        join_group(side, directory, rank, size)
    done.wait()  # type: ignore[attr-defined]
    for side in sides:
        SIDES[side].rpc.shutdown()
