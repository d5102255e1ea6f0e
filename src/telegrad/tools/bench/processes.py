"""What takes processes of its own: starting and ending groups, and memory."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from telegrad.tools.bench.calls import echo
from telegrad.tools.bench.harness import SIDES, Arena, Result, arenas
from telegrad.tools.bench.passes import forward

_REPEATS = 3
_ECHOES = 50
_STEPS = 10
_WIDTH = 2048


def run() -> list[Result]:
    results = []
    for size in (2, 4, 8):
        started: dict[str, list[float]] = {"torch": [], "telegrad": []}
        ended: dict[str, list[float]] = {"torch": [], "telegrad": []}
        for _ in range(_REPEATS):
            for side in SIDES:
                arena = Arena(side, size)
                started[side].append(arena.started)
                ended[side].append(arena.close())
        results.append(Result.of_rounds(f"start of {size} workers", started))
        results.append(Result.of_rounds(f"shutdown of {size} workers", ended))
    name = "processor time of an idle worker, per second"
    results.append(Result.of_rounds(name, _asked(_idle_time)))
    name = f"memory of both workers after {_ECHOES} echoes of 64 MB"
    results.append(Result.of_rounds(name, _asked(_echo_memory), unit="B"))
    for name, step in (
        ("64 MB of activations each way", _activation_step),
        (f"a remote {_WIDTH}-wide MLP", _layer_step),
        ("6 remote layers of 40 MB", _chain_step),
        ("such layers, without a pass", _forward_step),
    ):
        with arenas(2) as sides:
            peaks = {side: [_peak(sides[side], step, side)] for side in sides}
        name = f"peak memory of steps with {name}"
        results.append(Result.of_rounds(name, peaks, mark=1.0, unit="B"))
    return results


def _asked(measure: Callable[[Any], float]) -> dict[str, list[float]]:
    """What is measured in a fresh group of each side, one after the other."""
    found = {}
    for side in SIDES:
        arena = Arena(side, 2)
        found[side] = [arena.ask(measure, side)]
        arena.close()
    return found


def _peak(arena: Arena, step: Callable[[str], None], side: str) -> float:
    """The most memory that steps need on both workers, above what these have when inputs and
    parameters are there. It is looked at as often as that goes."""
    arena.resume()
    arena.ask(_prepare_steps, side)
    before = _memory_of_all(arena.pids)
    peak = 0.0
    arena.begin(_run_steps, step, side)
    while not arena.is_done(0.0005):  # ends when the driver answers, or dies
        peak = max(peak, _memory_of_all(arena.pids) - before)
    arena.end()
    arena.pause()
    return max(peak, float(1 << 20))


def _prepare_steps(side: str) -> None:
    _activations()
    SIDES[side].rpc.rpc_sync("worker1", forward, args=(_WIDTH, torch.ones(32, _WIDTH)))
    SIDES[side].rpc.rpc_sync("worker1", _make_layers)


def _run_steps(step: Callable[[str], None], side: str) -> None:
    for _ in range(_STEPS):
        step(side)


def _echo_memory(side: str) -> float:
    rpc = SIDES[side].rpc
    before = _memory() + rpc.rpc_sync("worker1", _memory)
    x = torch.zeros(64 << 18)
    for _ in range(_ECHOES):
        rpc.rpc_sync("worker1", echo, args=(x,))
    del x
    gc.collect()
    time.sleep(5)  # both may keep memory for a moment; what counts is what stays
    return max(float(_memory() + rpc.rpc_sync("worker1", _memory) - before), float(1 << 20))


def _idle_time(side: str) -> float:
    rpc = SIDES[side].rpc
    rpc.rpc_sync("worker1", time.process_time)
    time.sleep(1)
    before: float = rpc.rpc_sync("worker1", time.process_time)
    time.sleep(3)
    return (rpc.rpc_sync("worker1", time.process_time) - before) / 3  # type: ignore[no-any-return]


@cache
def _activations() -> torch.Tensor:
    return torch.zeros(16 << 20, requires_grad=True)


def _activation_step(side: str) -> None:
    """Sends 64 MB to the other worker and back, and their gradients."""
    rpc, autograd = SIDES[side].rpc, SIDES[side].autograd
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", torch.mul, args=(_activations(), 2))
        autograd.backward(context_id, [y.sum()])
        autograd.get_gradients(context_id)


def _layer_step(side: str) -> None:
    """Steps through a remote MLP: its gradients stay where they are."""
    rpc, autograd = SIDES[side].rpc, SIDES[side].autograd
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", forward, args=(_WIDTH, torch.ones(32, _WIDTH)))
        autograd.backward(context_id, [y.sum()])


@cache
def _layers() -> list[torch.Tensor]:
    """So large that malloc gives back what has died, instead of keeping it."""
    return [torch.ones(10 << 20, requires_grad=True) for _ in range(6)]


def _make_layers() -> None:
    _layers()


def _chain() -> torch.Tensor:
    y = torch.ones(())
    for layer in _layers():
        y = y * layer
    return y.sum()


def _chain_step(side: str) -> None:
    rpc, autograd = SIDES[side].rpc, SIDES[side].autograd
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", _chain)])


def _forward_step(side: str) -> None:
    with SIDES[side].autograd.context():
        SIDES[side].rpc.rpc_sync("worker1", _chain)


def _memory_of_all(pids: Sequence[int]) -> float:
    """Bytes of data in several processes, where what they share counts once. It takes a hundredth
    of the time of `_memory`, so that a short peak is not missed."""
    private = 0.0
    mapped: list[float] = []
    held: dict[int, int] = {}  # bytes in anonymous files, by their number
    for pid in pids:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file if line.startswith("Rss"))
        private += float(fields["RssAnon"].split()[0]) * 1024
        mapped.append(float(fields["RssShmem"].split()[0]) * 1024)
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed in this moment
                if os.readlink(entry.path).startswith("/memfd:"):
                    found = os.stat(entry.path)
                    held[found.st_ino] = found.st_blocks * 512
    return private + max(sum(held.values()), *mapped)


def _memory(pid: int | str = "self") -> float:
    """Bytes of data in a process, with its share of what it shares; program text aside."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return sum(float(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))
