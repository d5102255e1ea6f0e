"""Pipelines whose workers die."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest
import torch
from torch import nn

import telegrad
from telegrad import rpc
from telegrad.autograd.plain import engine_here
from telegrad.errors import WorkerLost
from telegrad.tensors.table import tables_here
from telegrad.testing.cluster import cluster


class Pass(nn.Module):
    def forward(self, x):
        return x * 1


class Dies(nn.Module):
    """Ends its worker in the third micro-batch."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.count = 0

    def forward(self, x):
        self.count += 1
        if self.way == "forward" and self.count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return DiesBackward.apply(x, self.way == "backward")


class DiesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, must_die):
        ctx.must_die = must_die
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.must_die:
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient, None


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_the_loss_of_a_worker_is_raised_and_the_others_go_on(way, place):
    with cluster(4) as group:
        group.expect_death(f"worker{place + 1}")
        stages = [telegrad.module(f"worker{i + 1}", Pass) for i in range(3)]
        stages[place] = telegrad.module(f"worker{place + 1}", Dies, way)
        model = telegrad.Pipeline(stages, micro_batches=8)
        with pytest.raises(WorkerLost, match=f"'worker{place + 1}'"):
            model(torch.ones(8, 2, requires_grad=True)).sum().backward()
        with pytest.raises(WorkerLost, match=f"'worker{place + 1}'"):
            model(torch.ones(8, 2))
        rest = telegrad.Pipeline(stages[:place] + stages[place + 1 :], micro_batches=4)
        x = torch.ones(8, 2, requires_grad=True)
        rest(x).sum().backward()
        assert x.grad.tolist() == [[1.0, 1.0]] * 8


kept = []


def drive(micro_batches):
    """On a worker: keeps the graph of a forward."""
    stages = [telegrad.module(worker, nn.Linear, 2, 2) for worker in ("worker1", "worker2")]
    model = telegrad.Pipeline(stages, micro_batches=micro_batches)
    kept.append((model, model(torch.ones(8, 2))))


def left():
    gc.collect()
    engine_here().flush()
    things = sum(len(table.things) for table in tables_here()._tables.values())
    return engine_here().counts()["entries"], things


def test_nothing_is_left_of_a_driver_that_is_lost():
    with cluster(4) as group:
        rpc.rpc_sync("worker3", drive, args=(4,))
        assert [rpc.rpc_sync(worker, left)[0] for worker in ("worker1", "worker2")] == [4, 4]
        group.kill("worker3")
        end = time.monotonic() + 30.0
        while (now := [rpc.rpc_sync(w, left) for w in ("worker1", "worker2")]) != [(0, 0)] * 2:
            assert time.monotonic() < end, now
