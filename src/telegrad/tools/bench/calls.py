"""Plain calls: latency, bursts, threads, references, large tensors."""

from __future__ import annotations

import threading
import time

import torch

from telegrad.tools.bench.harness import Case, Op, Side

A, B = torch.ones(4), torch.ones(4)
THREAD_CALLS = 50


def nothing() -> None:
    pass


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


def empty_call(side: Side) -> Op:
    return lambda: side.rpc.rpc_sync("worker1", nothing)


def python_function(side: Side) -> Op:
    return lambda: side.rpc.rpc_sync("worker1", add, args=(A, B))


def torch_builtin(side: Side) -> Op:
    return lambda: side.rpc.rpc_sync("worker1", torch.add, args=(A, B))


def async_and_wait(side: Side) -> Op:
    return lambda: side.rpc.rpc_async("worker1", add, args=(A, B)).wait()


def burst(side: Side) -> Op:
    def run() -> None:
        futures = [side.rpc.rpc_async("worker1", add, args=(A, B)) for _ in range(200)]
        torch.futures.wait_all(futures)

    return run


def reference(side: Side) -> Op:
    return lambda: side.rpc.remote("worker1", add, args=(A, B)).to_here()


def echo_of(megabytes: int) -> Case:
    x = torch.zeros(megabytes << 18)

    def prepare(side: Side) -> Op:
        return lambda: side.rpc.rpc_sync("worker1", echo, args=(x,))

    mark = {1: 1.5, 16: 1.2, 64: 3.0}[megabytes]
    return Case(name=f"echo of {megabytes} MB", prepare=prepare, mark=mark)


def echo_of_many(count: int, elements: int, size: str) -> Case:
    tensors = [torch.zeros(elements) for _ in range(count)]

    def prepare(side: Side) -> Op:
        return lambda: side.rpc.rpc_sync("worker1", echo, args=(tensors,))

    return Case(name=f"echo of {count} tensors of {size}", prepare=prepare)


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
    Case(name="empty call", prepare=empty_call, mark=3.0),
    Case(name="Python function, two small tensors", prepare=python_function, mark=3.0),
    Case(name="torch builtin, two small tensors", prepare=torch_builtin, mark=3.0),
    Case(name="rpc_async(...).wait()", prepare=async_and_wait, mark=3.0),
    Case(name="burst of 200 rpc_async", prepare=burst, per=200, mark=3.0),
    Case(name="remote(...).to_here()", prepare=reference),
    Case(name="call to a worker busy with Python", prepare=busy_worker, per=5),
    *[threads(count) for count in (1, 2, 4, 8)],
    *[echo_of(megabytes) for megabytes in (1, 16, 64)],
    echo_of_many(1000, 4, "16 B"),
    echo_of_many(100, 90_000, "360 kB"),
]
