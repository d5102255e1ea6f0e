"""Mistakes and failures in pipelines, and what is left of them."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
import torch
from stages import (
    WORKERS,
    Pass,
    four,
    numbered,
    rows,
    seeded,
)
from torch import nn

import telegrad
from telegrad import rpc
from telegrad.autograd.plain import engine_here
from telegrad.errors import TelegradError
from telegrad.tensors.table import tables_here
from telegrad.testing.cluster import cluster

PATIENCE = 30.0


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(4) as running:
        yield running


# -- mistakes and failures


def test_mistakes_are_refused_at_once():
    here = [nn.Linear(2, 2)]
    for wrong, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="micro_batches must be"):
            telegrad.Pipeline(here, micro_batches=wrong)
    with pytest.raises(ValueError, match="at least one stage"):
        telegrad.Pipeline([], micro_batches=2)
    with pytest.raises(TypeError, match="stage 1 of a pipeline is a function"):
        telegrad.Pipeline([*here, seeded], micro_batches=2)
    with pytest.raises(TypeError, match=r"sequence of modules, got a Linear"):
        telegrad.Pipeline(here[0], micro_batches=2)
    whole = telegrad.module("worker1", nn.Sequential, nn.Linear(2, 2))
    with pytest.raises(TypeError, match="cannot be split into stages"):
        telegrad.Pipeline(whole, micro_batches=2)


def test_arguments_that_cannot_be_split_are_refused():
    model, _ = four()
    with pytest.raises(ValueError, match="needs a tensor among its arguments"):
        model(3)
    with pytest.raises(ValueError, match="no dimensions"):
        model(torch.tensor(3.0))
    with pytest.raises(ValueError, match=r"different sizes there: \(2, 4\), \(3, 4\)"):
        model(torch.ones(2, 4), torch.ones(3, 4))


class Odd(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "scalar":
            return x.sum()
        return [x] * int(x[0, 0].item()) if self.kind == "list" else int(x[0, 0].item())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("scalar", "tensor without dimensions"),
        ("list", "different structures"),
        ("number", "not tensors and differ"),
    ],
)
def test_results_that_cannot_be_put_together_are_refused(kind, message):
    model = telegrad.Pipeline([telegrad.module("worker1", Odd, kind)], micro_batches=2)
    with pytest.raises(TypeError, match=message):
        model(numbered(4))


def test_a_hook_of_this_process_on_a_remote_stage_is_refused():
    model, _ = four()
    model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(TelegradError, match=r"stage '1'.*'worker2', has a hook"):
        model(rows(3))


class Refuses(nn.Module):
    def __init__(self, number, way="forward"):
        super().__init__()
        self.number = number
        self.way = way
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        is_it = int(x[0, 0].item()) == self.number
        if is_it and self.way == "forward":
            raise KeyError("not this one")
        return FailsBackward.apply(x * self.weight, is_it)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise KeyError("not back through this one")
        return gradient, None


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_an_error_names_the_stage_and_the_pipeline_goes_on(way):
    model = telegrad.Pipeline(
        [
            telegrad.module("worker1", Pass),
            telegrad.module("worker2", Refuses, 3, way),
            telegrad.module("worker1", Pass),
        ],
        micro_batches=8,
    )
    for _ in range(3):
        with pytest.raises(KeyError, match=r"not .*this one") as caught:
            model(numbered(8)).sum().backward()
        expected = "stage '1' of the pipeline, on worker 'worker2', failed with micro-batch 4 of 8"
        assert expected in str(caught.value.__cause__)
        assert "test_pipeline_failures.py" in str(caught.value.__cause__)
        model.zero_grad()
        model(numbered(8) + 10).sum().backward()
        assert model[1].weight.grad.item() == 2 * sum(range(10, 18))


def test_an_error_in_a_stage_of_this_process_is_raised_as_it_is():
    first, last = telegrad.module("worker1", Pass), telegrad.module("worker2", Pass)
    model = telegrad.Pipeline([first, Refuses(2), last], micro_batches=4)
    with pytest.raises(KeyError, match="not this one"):
        model(numbered(4))


class Keeps(nn.Module):
    """Adds what it has made of the micro-batch before."""

    def __init__(self, *, detaches):
        super().__init__()
        self.detaches = detaches
        self.last = 0.0
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        y = x * self.weight + self.last
        self.last = y.detach() if self.detaches else y
        return y


def test_a_graph_that_is_kept_for_the_next_micro_batch_is_refused():
    for detaches in (True, False):
        model = telegrad.Pipeline(
            [
                telegrad.module("worker1", Pass),
                telegrad.module("worker2", Keeps, detaches=detaches),
            ],
            micro_batches=4,
        )
        loss = model(numbered(4)).sum()
        if detaches:
            loss.backward()
            assert model[1].weight.grad.item() == 2 * (1 + 2 + 3)
        else:
            with pytest.raises(TelegradError, match="shares a part of its graph") as caught:
                loss.backward()
            assert "stage '1' of the pipeline" in str(caught.value.__cause__)


def test_a_result_that_cannot_be_sent_is_an_error_of_its_stage():
    model = telegrad.Pipeline(
        [telegrad.module("worker1", Locks), telegrad.module("worker2", Pass)], micro_batches=4
    )
    with pytest.raises(Exception, match=r"lock|pickle") as caught:
        model(numbered(4))
    assert "stage '0' of the pipeline" in str(caught.value.__cause__)


class Locks(nn.Module):
    def forward(self, x):
        return x, threading.Lock()


class Drives(nn.Module):
    """A stage that drives a pipeline of its own, with a stage on the same worker."""

    def __init__(self, *workers):
        super().__init__()
        self.inner = [
            telegrad.Pipeline([telegrad.module(w, Pass) for w in workers], micro_batches=2)
        ]

    def forward(self, x):
        return self.inner[0](x) + 1


def test_a_stage_may_drive_a_pipeline():
    stages = [telegrad.module("worker1", Drives, "worker1", "worker2") for _ in range(3)]
    model = telegrad.Pipeline(stages, micro_batches=4)
    x = numbered(8).requires_grad_()
    y = model(x)
    assert torch.equal(y, numbered(8) + 3)
    y.sum().backward()
    assert x.grad.tolist() == [[1.0, 1.0]] * 8


def test_second_derivatives_are_refused():
    model, _ = four()
    x = rows(4).requires_grad_()
    with pytest.raises(TelegradError, match="create_graph=True does not go through"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.may_go = threading.Event()
        self.began = threading.Event()

    def forward(self, x):
        self.began.set()
        assert self.may_go.wait(PATIENCE)
        return x

    def let_go(self):
        self.may_go.set()

    def wait_until_begun(self):
        return self.began.wait(PATIENCE)


def test_ctrl_c_leaves_the_pipeline_usable():
    waits = telegrad.module("worker2", Waits)
    model = telegrad.Pipeline([telegrad.module("worker1", Pass), waits], micro_batches=4)

    def interrupt():
        waits.wait_until_begun()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        model(numbered(4))
    thread.join()
    waits.let_go()
    assert torch.equal(model(numbered(4)), numbered(4))


# -- what is left


def left():
    gc.collect()
    engine = engine_here()
    engine.flush()
    counts = engine.counts()
    things = sum(len(table.things) for table in tables_here()._tables.values())
    return counts["entries"], counts["values"], counts["passes"], things


def everything_left():
    gc.collect()
    engine_here().flush()
    telegrad.tensors.synchronize()
    return [rpc.rpc_sync(worker, left) for worker in WORKERS]


def has_grown(before, now):
    """What earlier tests have left may still end meanwhile."""
    pairs = zip(sum(now, ()), sum(before, ()), strict=True)
    return any(n > b for n, b in pairs)


def test_nothing_is_left_over_many_steps():
    model, _ = four()
    failing = telegrad.Pipeline([telegrad.module("worker2", Refuses, 1), model[3]], micro_batches=2)
    seen = []

    def step():
        model(rows(5)).sum().backward()
        model.zero_grad()
        with torch.no_grad():
            model(rows(5))
        model(rows(5))  # no backward
        with pytest.raises(TelegradError):
            torch.autograd.grad(model(rows(5)).sum(), list(model.parameters()), create_graph=True)
        with pytest.raises(KeyError):
            failing(numbered(2, 6))

    step()
    end = time.monotonic() + PATIENCE
    while (before := everything_left()) not in seen and time.monotonic() < end:
        seen.append(before)
    for _ in range(30):
        step()
    while has_grown(before, now := everything_left()) and time.monotonic() < end:
        pass
    assert not has_grown(before, now), (before, now)
