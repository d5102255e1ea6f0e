"""What takes processes of its own: starting and ending groups, and memory."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import torch

from telegrad.bench.calls import echo
from telegrad.bench.harness import SIDES, Result, join_group
from telegrad.bench.passes import forward

_REPEATS = 3
_ECHOES = 50
_STEPS = 10


def run() -> list[Result]:
    results = []
    for size in (2, 4, 8):
        times: dict[str, list[tuple[float, float]]] = {"torch": [], "telegrad": []}
        for _ in range(_REPEATS):
            for side, taken in times.items():
                taken.append(_forked(size, _life, side))
        for position, what in enumerate(("start", "shutdown")):
            of = {side: [t[position] for t in taken] for side, taken in times.items()}
            ratios = [a / b for a, b in zip(of["torch"], of["telegrad"], strict=True)]
            results.append(
                Result(
                    name=f"{what} of {size} workers",
                    torch=statistics.median(of["torch"]),
                    telegrad=statistics.median(of["telegrad"]),
                    ratio=statistics.median(ratios),
                    mark=None,
                )
            )
    idle = {side: _forked(2, _idle_time, side) for side in ("torch", "telegrad")}
    results.append(
        Result(
            name="processor time of an idle worker, per second",
            torch=idle["torch"],
            telegrad=idle["telegrad"],
            ratio=idle["torch"] / idle["telegrad"],
            mark=None,
        )
    )
    memory = {side: _forked(2, _echo_memory, side) for side in ("torch", "telegrad")}
    results.append(
        Result(
            name=f"memory of both workers after {_ECHOES} echoes of 64 MB",
            torch=memory["torch"],
            telegrad=memory["telegrad"],
            ratio=memory["torch"] / memory["telegrad"],
            mark=None,
            unit="B",
        )
    )
    for name, body in (
        ("64 MB of activations each way", _activation_steps),
        ("a remote 2048-wide MLP", _layer_steps),
    ):
        peaks = {side: _peak(body, side) for side in ("torch", "telegrad")}
        results.append(
            Result(
                name=f"peak memory of steps with {name}",
                torch=peaks["torch"],
                telegrad=peaks["telegrad"],
                ratio=peaks["torch"] / peaks["telegrad"],
                mark=1.0,
                unit="B",
            )
        )
    return results


def _forked(size: int, body: Callable[[str, str, int, int], Any], side: str) -> Any:
    """Runs `body` on `size` fresh processes; returns what rank 0 gives."""
    with _started(size, body, side) as (_, pipe):
        return pickle.loads(pipe.read())


@contextlib.contextmanager
def _started(
    size: int, body: Callable[[str, str, int, int], Any], side: str
) -> Iterator[tuple[list[int], BinaryIO]]:
    """Fresh processes that run `body`, and a pipe with what rank 0 gives, pickled."""
    with tempfile.TemporaryDirectory(prefix="telegrad-bench-") as directory:
        reader, writer = os.pipe()
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    value = body(side, directory, rank, size)
                    if rank == 0:
                        os.write(writer, pickle.dumps(value))
                    status = 0
                finally:
                    os._exit(status)
            pids.append(pid)
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            yield pids, pipe
        for pid in pids:
            _, status = os.waitpid(pid, 0)
            if status:
                raise RuntimeError(f"a worker of {side} ended with {status}")


def _peak(body: Callable[[str, str, int, int], Any], side: str) -> float:
    """The most memory that two workers have together while `body` works, above what they have at
    its start. It is looked at from outside, as often as that goes."""
    with _started(2, body, side) as (pids, pipe):
        begun = _memory_of(pids)
        peak = 0.0
        while not select.select([pipe], [], [], 0.0005)[0]:
            peak = max(peak, _memory_of(pids) - begun)
        before: float = pickle.loads(pipe.read())
        return max(peak + begun - before, float(1 << 20))


def _memory_of(pids: Sequence[int]) -> float:
    return sum(_memory(pid) for pid in pids)


def _life(side: str, directory: str, rank: int, size: int) -> tuple[float, float]:
    rpc = SIDES[side].rpc
    begun = time.perf_counter()
    join_group(side, directory, rank, size)
    rpc.api._all_gather(None)  # all have started, and none waits for another's start below
    started = time.perf_counter()
    rpc.shutdown()
    return started - begun, time.perf_counter() - started


def _echo_memory(side: str, directory: str, rank: int, size: int) -> float:
    torch.set_num_threads(1)
    join_group(side, directory, rank, size)
    rpc = SIDES[side].rpc
    used = 0.0
    if rank == 0:
        before = _memory() + rpc.rpc_sync("worker1", _memory)
        x = torch.zeros(64 << 18)
        for _ in range(_ECHOES):
            rpc.rpc_sync("worker1", echo, args=(x,))
        del x
        gc.collect()
        time.sleep(5)  # both may keep memory for a moment; what counts is what stays
        used = _memory() + rpc.rpc_sync("worker1", _memory) - before
    rpc.shutdown()
    return max(used, float(1 << 20))


def _idle_time(side: str, directory: str, rank: int, size: int) -> float:
    join_group(side, directory, rank, size)
    rpc = SIDES[side].rpc
    used = 0.0
    if rank == 0:
        rpc.rpc_sync("worker1", time.process_time)
        time.sleep(1)
        before = rpc.rpc_sync("worker1", time.process_time)
        time.sleep(3)
        used = (rpc.rpc_sync("worker1", time.process_time) - before) / 3
    rpc.shutdown()
    return used


def _activation_steps(side: str, directory: str, rank: int, size: int) -> float:
    """Steps that send 64 MB to the other worker and back, and their gradients; returns the memory
    of both before."""
    join_group(side, directory, rank, size)
    rpc, autograd = SIDES[side].rpc, SIDES[side].autograd
    before = 0.0
    if rank == 0:
        x = torch.zeros(16 << 20, requires_grad=True)
        before = _memory() + rpc.rpc_sync("worker1", _memory)
        for _ in range(_STEPS):
            with autograd.context() as context_id:
                y = rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
                autograd.backward(context_id, [y.sum()])
                autograd.get_gradients(context_id)
                del y
        time.sleep(0.1)  # the last look is not later than the last step
    rpc.shutdown()
    return before


def _layer_steps(side: str, directory: str, rank: int, size: int) -> float:
    """The same with a remote MLP of 2048 units: its gradients stay where they are."""
    join_group(side, directory, rank, size)
    rpc, autograd = SIDES[side].rpc, SIDES[side].autograd
    before = 0.0
    if rank == 0:
        x = torch.ones(32, 2048)
        rpc.rpc_sync("worker1", forward, args=(2048, x))
        before = _memory() + rpc.rpc_sync("worker1", _memory)
        for _ in range(_STEPS):
            with autograd.context() as context_id:
                y = rpc.rpc_sync("worker1", forward, args=(2048, x))
                autograd.backward(context_id, [y.sum()])
                del y
        time.sleep(0.1)
    rpc.shutdown()
    return before


def _memory(pid: int | str = "self") -> float:
    """Bytes of data in a process, with its share of what it shares; program text aside."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return sum(float(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))
