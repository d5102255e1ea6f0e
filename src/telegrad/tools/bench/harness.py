"""Measures two sides in turn, so that what else the machine does hits both alike.

Each side has processes of its own, and while one is measured the other's are stopped (SIGSTOP):
torch's RPC keeps one processor busy in every process that uses it, also when nothing is going on. A
case is measured in rounds; each round times torch, then telegrad, and gives one ratio. The reported
ratio is the median of those, the reported times are medians too. Absolute times mean little on a
shared machine.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

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
        apart: whether each of them is started for itself, as torchrun and `mp.spawn` do. Else
            they are forked from one process, as `telegrad run` does, and lie at the same addresses.
    """

    name: str
    prepare: Callable[[Side], Op]
    per: int = 1
    mark: float | None = None
    workers: int = 2
    apart: bool = False


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
        """Whether the ratio reaches its mark, to the tenth that is shown of it."""
        return round(self.ratio, 1) >= (self.mark if self.mark is not None else 1.0)


class Arena:
    """The processes of one side: a driver, which runs the cases, and the workers it calls."""

    def __init__(self, side: str, size: int, *, apart: bool) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="telegrad-bench-")
        start: Any = multiprocessing.get_context("spawn" if apart else "forkserver")
        line: Connection
        self._line: Connection
        self._line, line = start.Pipe()
        self._done = start.Event()
        where = self._directory.name
        self._processes = [start.Process(target=_drive, args=(side, where, size, line))]
        self._processes += [
            start.Process(target=_serve, args=(side, where, rank, size, self._done))
            for rank in range(1, size)
        ]
        for process in self._processes:
            process.daemon = True
            process.start()
        line.close()  # so that the driver's death ends a wait for it
        self._line.recv()

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function in the driver."""
        self.begin(function, *args)
        return self.end()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """The same, without waiting for it."""
        self._line.send((function, args))

    def is_done(self, seconds: float) -> bool:
        """Whether what was begun is over; waits so long for it."""
        return self._line.poll(seconds)

    def end(self) -> Any:
        """Waits for what was begun; returns what it gave. The driver's death ends the wait."""
        value = self._line.recv()
        if isinstance(value, Exception):
            raise value
        return value

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def pause(self) -> None:
        for process in self._processes:
            os.kill(process.pid or 0, signal.SIGSTOP)

    def resume(self) -> None:
        for process in self._processes:
            os.kill(process.pid or 0, signal.SIGCONT)

    def close(self) -> None:
        self._done.set()
        self._line.send(None)
        for process in self._processes:
            process.join()
        self._directory.cleanup()


@contextlib.contextmanager
def arenas(
    size: int, sides: tuple[str, ...] = ("torch", "telegrad"), *, apart: bool = False
) -> Iterator[dict[str, Arena]]:
    """The sides' processes, all stopped."""
    found = {}
    for side in sides:
        found[side] = Arena(side, size, apart=apart)
        found[side].pause()
    try:
        yield found
    finally:
        for arena in found.values():
            arena.resume()
            arena.close()


def measure(case: Case, sides: dict[str, Arena]) -> Result:
    times: dict[str, list[float]] = {side: [] for side in sides}
    for side, arena in sides.items():
        arena.resume()
        arena.ask(_prepare, case.name, side)
        arena.pause()
    for _ in range(ROUNDS):
        for side, arena in sides.items():
            arena.resume()
            times[side].append(arena.ask(_time) / case.per)
            arena.pause()
    ratios = [t / g for t, g in zip(times["torch"], times["telegrad"], strict=True)]
    return Result(
        name=case.name,
        torch=statistics.median(times["torch"]),
        telegrad=statistics.median(times["telegrad"]),
        ratio=statistics.median(ratios),
        mark=case.mark,
    )


# -- in the driver

_op: Op | None = None


def _prepare(name: str, side: str) -> None:
    global _op
    from telegrad.tools.bench.cases import all_cases

    (case,) = [case for case in all_cases() if case.name == name]
    _op = case.prepare(SIDES[side])
    for _ in range(5):
        _op()


def _time() -> float:
    """The median of one round's runs."""
    assert _op is not None
    for _ in range(2):
        _op()  # awake again after the pause
    runs: list[float] = []
    end = time.perf_counter() + SECONDS_A_ROUND
    while len(runs) < 3 or time.perf_counter() < end:
        begun = time.perf_counter()
        own = _op()  # a float is what it has timed itself
        runs.append(own if isinstance(own, float) else time.perf_counter() - begun)
    return statistics.median(runs)


def median_of(ops: list[Callable[[], float]]) -> list[float]:
    """The median times of several things that time themselves, measured in turn."""
    for op in ops:
        op()
    rounds = [[op() for op in ops] for _ in range(15)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def _drive(side: str, directory: str, size: int, line: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    join_group(side, directory, 0, size)
    line.send("ready")
    while (wanted := line.recv()) is not None:
        function, args = wanted
        try:
            line.send(function(*args))
        except Exception as error:  # noqa: BLE001 - told to who asked
            line.send(error)
    SIDES[side].rpc.shutdown()


def _serve(side: str, directory: str, rank: int, size: int, done: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    join_group(side, directory, rank, size)
    done.wait()
    SIDES[side].rpc.shutdown()


def join_group(side: str, directory: str, rank: int, size: int) -> None:
    where = f"file://{directory}/{side}"
    options: Any
    if side == "torch":
        options = torch.distributed.rpc.TensorPipeRpcBackendOptions(init_method=where)
    else:
        options = telegrad.rpc.RpcOptions(init_method=where)
    SIDES[side].rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options
    )
