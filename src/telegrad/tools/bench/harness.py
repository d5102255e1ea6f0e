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
Prepare = Callable[["Side"], Op]

ROUNDS = 5
SECONDS_A_ROUND = 0.25
_PATIENCE = 100.0  # seconds for processes to start: each may import torch


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
    prepare: Prepare
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
    mark: float | None = None
    unit: str = "s"

    @classmethod
    def of_rounds(cls, name: str, found: dict[str, list[float]], **given: Any) -> Result:
        """The medians of what was found on each side, and of the rounds' ratios."""
        ratios = [t / g for t, g in zip(found["torch"], found["telegrad"], strict=True)]
        return cls(
            name=name,
            torch=statistics.median(found["torch"]),
            telegrad=statistics.median(found["telegrad"]),
            ratio=statistics.median(ratios),
            **given,
        )

    @property
    def is_good(self) -> bool:
        """Whether the ratio reaches its mark, to the tenth that is shown of it."""
        return round(self.ratio, 1) >= (self.mark if self.mark is not None else 1.0)


class Arena:
    """The processes of one side: a driver, which runs the cases, and the workers it calls.

    Attributes:
        directory: where they meet.
        started: seconds from when all processes run to when all have joined.
    """

    def __init__(self, side: str, size: int, *, apart: bool = False) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="telegrad-bench-")
        self.directory = self._directory.name
        start: Any = multiprocessing.get_context("spawn" if apart else "forkserver")
        if not apart:
            start.set_forkserver_preload([__name__])
        line: Connection
        self._line: Connection
        self._line, line = start.Pipe()
        self._done = start.Event()
        joining = side, self.directory, size, start.Barrier(size)
        self._processes = [start.Process(target=_drive, args=(joining, line))]
        self._processes += [
            start.Process(target=_serve, args=(joining, rank, self._done))
            for rank in range(1, size)
        ]
        for process in self._processes:
            process.daemon = True
            process.start()
        line.close()  # so that the driver's death ends a wait for it
        self.started: float = self._line.recv()

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

    def close(self) -> float:
        """Returns the seconds that the driver's shutdown took."""
        self._done.set()
        self._line.send(None)
        taken: float = self._line.recv()
        for process in self._processes:
            process.join()
        self._directory.cleanup()
        return taken

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
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
    return Result.of_rounds(case.name, times, mark=case.mark)


# -- in the driver

_op: Op | None = None


def _prepare(name: str, side: str) -> None:
    global _op
    from telegrad.tools.bench.suite import all_cases

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


_Joining = tuple[str, str, int, Any]
"""Side, directory, number of processes, and the barrier at which they wait for each other."""


def _drive(joining: _Joining, line: Connection) -> None:
    line.send(_join(joining, 0))
    while (wanted := line.recv()) is not None:
        function, args = wanted
        try:
            line.send(function(*args))
        except Exception as error:  # noqa: BLE001 - told to who asked
            line.send(error)
    begun = time.perf_counter()
    SIDES[joining[0]].rpc.shutdown()
    line.send(time.perf_counter() - begun)


def _serve(joining: _Joining, rank: int, done: Any) -> None:
    _join(joining, rank)
    done.wait()
    SIDES[joining[0]].rpc.shutdown()


def _join(joining: _Joining, rank: int) -> float:
    """Joins the group; returns the seconds that it took."""
    side, directory, size, barrier = joining
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    barrier.wait(_PATIENCE)
    begun = time.perf_counter()
    join_group(side, directory, rank, size)
    SIDES[side].rpc.api._all_gather(None)  # no worker waits for another's start below
    return time.perf_counter() - begun


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
