"""Steps of the plain face: beside torch's RPC, and beside one process.

Torch has no plain face; its side runs the same step in one of its contexts. The rows beside one
process have no side of torch's RPC at all: they tell how far telegrad is from the floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

import telegrad
from telegrad.tensors import synchronize
from telegrad.tools.bench.harness import Case, Op, Prepare, Result, median_of
from telegrad.tools.bench.passes import TINY, forward, mlp_step, nested, scale, tiny_step

__all__ = ["CASES", "beside_one_process"]

_WIDTH = 256


def _plain(name: str, beside: Prepare, mark: float, run: Op) -> Case:
    """
    Args:
        beside: the same step in a context, for torch's side.
        run: the plain step.
    """
    return Case(
        name=name,
        prepare=lambda side: beside(side) if side.name == "torch" else run,
        mark=mark,
    )


def _tiny_step() -> None:
    TINY.grad = None
    telegrad.call("worker1", scale, TINY).sum().backward()  # type: ignore[no-untyped-call]


def _mlp_step(width: int) -> Case:
    head, x = nn.Linear(width, 1), torch.ones(32, width)

    def run() -> None:
        head.zero_grad()
        head(telegrad.call("worker1", forward, width, x)).sum().backward()

    return _plain(f"plain step of a remote {width}-wide MLP", mlp_step(width).prepare, 4.0, run)


def _hop(hops: int, x: torch.Tensor) -> torch.Tensor:
    if hops == 0:
        return x * 2
    me = telegrad.rpc.get_worker_info().id
    return telegrad.call(f"worker{1 - me}", _hop, hops - 1, x)


def _nested(hops: int) -> Case:
    def run() -> None:
        TINY.grad = None
        _hop(hops, TINY).sum().backward()  # type: ignore[no-untyped-call]

    return _plain(f"plain step through {hops} nested hops", nested(hops).prepare, 4.0, run)


CASES = [
    _plain("plain call and backward; tiny", tiny_step, 7.0, _tiny_step),
    _mlp_step(64),
    _nested(8),
]


class Blocks(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _timed(op: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        begun = time.perf_counter()
        op()
        return time.perf_counter() - begun

    return run


def _steps(first: nn.Module, second: nn.Module, batch: int) -> Callable[[], float]:
    x = torch.randn(batch, 64, _WIDTH)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(parameters)

    def run() -> None:
        second(first(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(first, Blocks):
            return
        synchronize()  # the worker's part of the step belongs to it

    return _timed(run)


class _Trained:
    """A module and its optimizer, both on one worker."""

    def __init__(self, depth: int) -> None:
        self._module = Blocks(depth)
        self._optimizer = torch.optim.AdamW(self._module.parameters())
        for parameter in self._module.parameters():
            parameter.grad = torch.ones_like(parameter)

    def step(self) -> None:
        self._optimizer.step()


def beside_one_process() -> list[Result]:
    """To be run in a driver, with one worker."""
    batch, depth = 16, 2
    one = _steps(Blocks(depth), Blocks(depth), batch)
    split = _steps(telegrad.module("worker1", Blocks, depth), Blocks(depth), batch)
    source, to = torch.ones(batch * 64 * _WIDTH), torch.empty(batch * 64 * _WIDTH)
    whole, apart, copy = median_of([one, split, _timed(lambda: to.copy_(source))])
    floor = whole + 2 * copy  # activations one way, their gradients the other
    results = [
        Result(
            name="step of a split transformer: one process / two",
            torch=floor,
            telegrad=apart,
            ratio=floor / apart,
            mark=0.87,  # 15 % more than the floor
        )
    ]
    placed = telegrad.module("worker1", Blocks, 6)
    optimizer = torch.optim.AdamW(placed.parameters())
    for parameter in placed.parameters():
        parameter.grad = torch.ones_like(parameter)
    trained = telegrad.object("worker1", _Trained, 6)

    def step() -> None:
        optimizer.step()
        synchronize()

    there, here = median_of([_timed(trained.step), _timed(step)])
    results.append(
        Result(
            name="optimizer step: run there / torch.optim here",
            torch=there,
            telegrad=here,
            ratio=there / here,
            mark=0.67,
        )
    )
    return results
