"""Forward and backward across workers."""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import nn

from telegrad.tools.bench.harness import SIDES, Case, Op, Result, Side, median_of

TINY = torch.ones(4, requires_grad=True)


@cache
def weight() -> torch.Tensor:
    return torch.ones(4, requires_grad=True)


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * weight()


def tiny_step(side: Side) -> Op:
    def run() -> None:
        with side.autograd.context() as context_id:
            loss = side.rpc.rpc_sync("worker1", scale, args=(TINY,)).sum()
            side.autograd.backward(context_id, [loss])
            side.autograd.get_gradients(context_id)

    return run


@cache
def mlp(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def forward(width: int, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = mlp(width)(x)
    return y


def mlp_step(width: int) -> Case:
    head = nn.Linear(width, 1)
    x = torch.ones(32, width)

    def prepare(side: Side) -> Op:
        def run() -> None:
            with side.autograd.context() as context_id:
                hidden = side.rpc.rpc_sync("worker1", forward, args=(width, x))
                side.autograd.backward(context_id, [head(hidden).sum()])
                side.autograd.get_gradients(context_id)

        return run

    return Case(name=f"step of a remote {width}-wide MLP", prepare=prepare)


def sequential(calls: int, mark: float | None = 2.0) -> Case:
    """Only the backward pass is timed."""

    def prepare(side: Side) -> Op:
        def run() -> float:
            with side.autograd.context() as context_id:
                y = TINY
                for _ in range(calls):
                    y = side.rpc.rpc_sync("worker1", torch.add, args=(y, TINY))
                loss = y.sum()
                begun = time.perf_counter()
                side.autograd.backward(context_id, [loss])
                return time.perf_counter() - begun

        return run

    return Case(
        name=f"backward through {calls} calls, per call", prepare=prepare, per=calls, mark=mark
    )


def hop(side_name: str, hops: int, x: torch.Tensor) -> torch.Tensor:
    if hops == 0:
        return x * 2
    rpc = SIDES[side_name].rpc
    me = rpc.get_worker_info().id
    y: torch.Tensor = rpc.rpc_sync(f"worker{1 - me}", hop, args=(side_name, hops - 1, x))
    return y


def nested(hops: int) -> Case:
    def prepare(side: Side) -> Op:
        def run() -> None:
            with side.autograd.context() as context_id:
                loss = hop(side.name, hops, TINY).sum()
                side.autograd.backward(context_id, [loss])

        return run

    return Case(name=f"step through {hops} nested hops", prepare=prepare)


def train(side_name: str, steps: int) -> float:
    """What each trainer does: a small layer on the server, a head of its own."""
    side = SIDES[side_name]
    head = nn.Linear(64, 1)
    x = torch.ones(8, 64)
    begun = time.perf_counter()
    for _ in range(steps):
        with side.autograd.context() as context_id:
            hidden = side.rpc.rpc_sync("worker1", forward, args=(64, x))
            side.autograd.backward(context_id, [head(hidden).sum()])
    return time.perf_counter() - begun


def trainers(side: Side) -> Op:
    def run() -> float:
        others = [
            side.rpc.rpc_async(f"worker{rank}", train, args=(side.name, 20)) for rank in (2, 3)
        ]
        own = train(side.name, 20)  # all three at the same time
        taken: list[float] = torch.futures.wait_all(others)
        return max(own, *taken)

    return run


def activations(side: Side) -> Op:
    x = torch.zeros(16 << 20, requires_grad=True)

    def run() -> None:
        with side.autograd.context() as context_id:
            y = side.rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
            side.autograd.backward(context_id, [y.sum()])

    return run


CASES = [
    Case(name="context, forward, backward, gradients; tiny", prepare=tiny_step, mark=4.0),
    mlp_step(64),
    mlp_step(1024),
    sequential(100),
    sequential(400),
    sequential(1600),
    *[nested(hops) for hops in (1, 2, 4, 8, 16)],
    Case(name="step with 64 MB of activations each way", prepare=activations),
    Case(name="3 trainers on one server, per step", prepare=trainers, per=20, mark=3.0, workers=4),
    Case(
        name="3 trainers, processes started apart, per step",
        prepare=trainers,
        per=20,
        mark=3.0,
        workers=4,
        apart=True,
    ),
]


def local_graph(nodes: int) -> Result:
    """A local graph behind one call: what a pass adds to plain backward."""
    side = SIDES["telegrad"]

    def build(y: torch.Tensor, nodes: int) -> torch.Tensor:
        for _ in range(nodes):
            y = y + 1
        return y.sum()

    def plain() -> float:
        loss = build(TINY * 2, nodes)
        begun = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - begun

    def distributed(nodes: int) -> float:
        with side.autograd.context() as context_id:
            loss = build(side.rpc.rpc_sync("worker1", torch.mul, args=(TINY, 2)), nodes)
            begun = time.perf_counter()
            side.autograd.backward(context_id, [loss])
            return time.perf_counter() - begun

    with torch.enable_grad():
        times = median_of([plain, lambda: distributed(nodes), lambda: distributed(0)])
    TINY.grad = None
    added = times[1] - times[2]  # without what the network takes
    return Result(
        name=f"local graph of {nodes} nodes: plain backward / in a pass",
        torch=times[0],
        telegrad=added,
        ratio=times[0] / added,
        mark=0.8,
    )
