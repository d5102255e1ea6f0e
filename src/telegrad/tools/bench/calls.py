"""Plain calls: latency, bursts, threads, references, large tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from telegrad.tools.bench.harness import Case, Op, Prepare, Side

A, B = torch.ones(4), torch.ones(4)
THREAD_CALLS = 50


def nothing() -> None:
    pass


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


def called(func: Callable[..., object], *args: object) -> Prepare:
    """Preparing to time one `rpc_sync`."""
    return lambda side: lambda: side.rpc.rpc_sync("worker1", func, args=args)


def burst(side: Side) -> Op:
    def run() -> None:
        futures = [side.rpc.rpc_async("worker1", add, args=(A, B)) for _ in range(200)]
        torch.futures.wait_all(futures)

    return run


def keep_busy(seconds: float) -> None:
    """Occupies the interpreter of its worker, as a training loop in Python does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def busy_worker(side: Side) -> Op:
    def run() -> float:
        work = side.rpc.rpc_async("worker1", keep_busy, args=(0.3,))
        begun = time.perf_counter()
        for _ in range(5):
            side.rpc.rpc_sync("worker1", add, args=(A, B))
        taken = time.perf_counter() - begun
        work.wait()
        return taken

    return run


def threads(count: int) -> Case:
    def prepare(side: Side) -> Op:
        def call() -> None:
            for _ in range(THREAD_CALLS):
                side.rpc.rpc_sync("worker1", add, args=(A, B))

        def run() -> None:
            callers = [threading.Thread(target=call) for _ in range(count)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()

        return run

    name = f"{count} calling thread{'s' if count > 1 else ''}"
    return Case(name=name, prepare=prepare, per=THREAD_CALLS * count)


CASES = [
    Case(name="empty call", prepare=called(nothing), mark=3.0),
    Case(name="Python function, two small tensors", prepare=called(add, A, B), mark=3.0),
    Case(name="torch builtin, two small tensors", prepare=called(torch.add, A, B), mark=3.0),
    Case(
        name="rpc_async(...).wait()",
        prepare=lambda side: lambda: side.rpc.rpc_async("worker1", add, args=(A, B)).wait(),
        mark=3.0,
    ),
    Case(name="burst of 200 rpc_async", prepare=burst, per=200, mark=3.0),
    Case(
        name="remote(...).to_here()",
        prepare=lambda side: lambda: side.rpc.remote("worker1", add, args=(A, B)).to_here(),
    ),
    Case(name="call to a worker busy with Python", prepare=busy_worker, per=5),
    *[threads(count) for count in (1, 2, 4, 8)],
    *[
        Case(name=f"echo of {mb} MB", prepare=called(echo, torch.zeros(mb << 18)), mark=mark)
        for mb, mark in ((1, 1.5), (16, 1.2), (64, 3.0))
    ],
    *[
        Case(
            name=f"echo of {count} tensors of {size}",
            prepare=called(echo, [torch.zeros(elements) for _ in range(count)]),
        )
        for count, elements, size in ((1000, 4, "16 B"), (100, 90_000, "360 kB"))
    ],
]
