"""How pipelines work: what overlaps, in which order, who talks to whom."""

from __future__ import annotations

import threading

import pytest
import torch
from stages import (
    WORKERS,
    both,
    close,
    far_stage,
    four,
    gradients,
    numbered,
    rows,
    seeded,
)
from torch import nn

import telegrad
from telegrad import rpc
from telegrad.observe import Traffic, traffic
from telegrad.testing.cluster import cluster

PATIENCE = 30.0


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(4, wrap_transport=Traffic()) as running:
        yield running


# -- who talks to whom


def exchanged(worker2, width, *, between=()):
    """Bytes that this process sends and receives in a step, with activations of this width."""
    model = telegrad.Pipeline(
        [
            telegrad.module("worker1", nn.Linear, 4, width),
            *between,
            telegrad.module(worker2, nn.Linear, width, 4),
        ],
        micro_batches=4,
    )
    counts = []
    for _ in range(2):
        model(rows(64).requires_grad_()).sum().backward()
        count = traffic()
        counts.append(count.bytes_sent + count.bytes_received)
    return counts[1] - counts[0]


ACTIVATION = 64 * 2048 * 4  # bytes of the wide one


@pytest.mark.parametrize("worker", ["worker2", "worker1"])
def test_activations_and_gradients_do_not_go_through_the_driver(worker):
    narrow, wide = (exchanged(worker, width) for width in (8, 2048))
    assert wide < narrow + ACTIVATION / 20


def test_they_go_through_a_stage_at_the_driver():
    # Else the test above counts something else.
    assert exchanged("worker2", 2048, between=[nn.Identity()]) > 4 * ACTIVATION


meetings: dict[str, threading.Barrier] = {}


def meet(name):
    """Ends when two workers are in it at the same time."""
    meetings.setdefault(name, threading.Barrier(2)).wait(PATIENCE)


def forget_meetings():
    meetings.clear()


class Meet(nn.Module):
    """Meets, at worker3, another stage that is there under the same name.

    Args:
        forward, backward: under which name, by how many micro-batches it has seen before.
    """

    def __init__(self, forward=(), backward=()):
        super().__init__()
        self.names = {"forward": dict(forward), "backward": dict(backward)}
        self.counts = {"forward": 0, "backward": 0}
        self.weight = nn.Parameter(torch.ones(()))

    def pass_by(self, way):
        name = self.names[way].get(self.counts[way])
        self.counts[way] += 1
        if name is not None:
            rpc.rpc_sync("worker3", meet, args=(name,), timeout=0)

    def forward(self, x):
        self.pass_by("forward")
        return Meeting.apply(x * self.weight, self)


class Meeting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stage):
        ctx.stage = stage
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.stage.pass_by("backward")
        return gradient, None


def test_stages_work_on_different_micro_batches_at_the_same_time_in_forward():
    telegrad.call("worker3", forget_meetings)
    model = telegrad.Pipeline(
        [
            telegrad.module("worker1", Meet, forward={1: "a", 2: "b", 3: "c"}),
            telegrad.module("worker2", Meet, forward={0: "a", 1: "b", 2: "c"}),
        ],
        micro_batches=4,
    )
    assert torch.equal(model(numbered(4)), numbered(4))


@pytest.mark.parametrize("between", [False, True])
def test_stages_work_on_different_micro_batches_at_the_same_time_in_backward(between):
    telegrad.call("worker3", forget_meetings)
    model = telegrad.Pipeline(
        [
            telegrad.module("worker1", Meet, backward={0: "a", 1: "b", 2: "c"}),
            *([nn.Identity()] if between else []),
            telegrad.module("worker2", Meet, backward={1: "a", 2: "b", 3: "c"}),
        ],
        micro_batches=4,
    )
    model(numbered(4)).sum().backward()
    assert model[0].weight.grad.item() == 2 * (1 + 2 + 3)


class Recorder(nn.Module):
    """Says if two are in it at once, and in which order they came."""

    def __init__(self):
        super().__init__()
        self.busy = threading.Lock()
        self.order = []

    def forward(self, x):
        assert self.busy.acquire(blocking=False)
        self.order.append(int(x[0, 0].item()))
        x = x + torch.zeros(100, 100).exp().sum() * 0
        self.busy.release()
        return x

    def seen(self):
        return self.order


def test_a_stage_takes_micro_batches_in_order_one_at_a_time():
    stages = [telegrad.module(w, Recorder) for w in ("worker1", "worker2", "worker1", "worker3")]
    model = telegrad.Pipeline(stages, micro_batches=16)
    for _ in range(3):
        model(numbered(16))
    for stage in stages:
        assert stage.seen() == [*range(16)] * 3


def test_random_numbers_and_running_statistics_are_deterministic():
    def outcome():
        for worker in WORKERS[:2]:
            telegrad.call(worker, torch.manual_seed, 3)
        model = telegrad.Pipeline(
            [
                far_stage("worker1", 1, nn.BatchNorm1d, 4),
                telegrad.module("worker1", nn.Dropout, 0.5),
                far_stage("worker2", 2, nn.Linear, 4, 4),
                telegrad.module("worker1", nn.Dropout, 0.5),
                telegrad.module("worker2", nn.Dropout, 0.5),
            ],
            micro_batches=5,
        )
        with torch.random.fork_rng():
            outs = [model(rows(10)).detach() for _ in range(4)]
        return [*outs, model[0].running_mean.cpu()]

    for a, b in zip(outcome(), outcome(), strict=True):
        assert torch.equal(a, b)


def test_many_micro_batches_and_stages_do_not_deadlock():
    stages = [(WORKERS[i % 3], nn.Linear, 4, 4) for i in range(7)]
    far, near = both(*stages, micro_batches=64)
    for model in (far, near):
        model(rows(64)).square().sum().backward()
    close(gradients(far), gradients(near))


def test_two_threads_may_use_one_pipeline():
    far, near = four()
    found = {}

    def use(seed):
        found[seed] = far(rows(6, seed=seed)).detach()

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, y in found.items():
        close(y, near(rows(6, seed=seed)))


class Inner(nn.Module):
    """A stage that calls another worker, through which gradients flow."""

    def __init__(self, worker):
        super().__init__()
        self.worker = worker
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x):
        return telegrad.call(self.worker, torch.sin, x * self.weight) * x


def test_a_stage_may_call_other_workers():
    model = telegrad.Pipeline(
        [
            telegrad.module("worker1", Inner, "worker2"),
            telegrad.module("worker2", Inner, "worker1"),
        ],
        micro_batches=3,
    )
    weights = [torch.full((4,), 2.0, requires_grad=True) for _ in range(2)]
    x = rows(6).requires_grad_()
    y = rows(6).requires_grad_()
    model(x).sum().backward()
    z = y
    for weight in weights:
        z = torch.sin(z * weight) * z
    z.sum().backward()
    close([x.grad, *gradients(model)], [y.grad, *[weight.grad for weight in weights]])


def drive(x):
    """On another worker, with stages of its own."""
    model = telegrad.Pipeline(
        [far_stage("worker2", 1, nn.Linear, 4, 4), far_stage("worker1", 2, nn.Linear, 4, 4)],
        micro_batches=3,
    )
    return model(x)


def test_a_function_on_a_worker_may_drive_a_pipeline():
    near = nn.Sequential(seeded(1, nn.Linear, 4, 4), seeded(2, nn.Linear, 4, 4))
    found = []
    for run in (lambda x: telegrad.call("worker1", drive, x), near):
        x = rows(6).requires_grad_()
        run(x).square().sum().backward()
        found.append(x.grad)
    close(*found)
