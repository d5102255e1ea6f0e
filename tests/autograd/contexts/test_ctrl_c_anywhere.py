"""Ctrl-C at random moments of a program: the next step works, and the group can end."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import time

import pytest
import torch

from telegrad import rpc
from telegrad.autograd import backward, context, get_gradients
from telegrad.testing.cluster import cluster

WEIGHT = torch.tensor([2.0, 3.0], requires_grad=True)


def scale(x):
    return x * WEIGHT


def same(x):
    return x


def fetch(reference):
    return reference.to_here()


def step(x):
    with context() as context_id:
        loss = rpc.rpc_sync("worker1", scale, (x,)).sum()
        backward(context_id, [loss])
        return get_gradients(context_id)[x].tolist()


# Ctrl-C may come between a new socket and its name. Python closes it, and complains.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_next_step_works_after_ctrl_c_in_calls_steps_and_references(monkeypatch):
    """A hundred times, wherever it comes; and the group can end."""
    x = torch.ones(2, requires_grad=True)
    works = [
        lambda: step(x),
        lambda: rpc.rpc_sync("worker1", same, (1,)),
        lambda: rpc.rpc_async("worker1", same, (torch.ones(1000),)).wait(),
        lambda: [f.wait() for f in [rpc.rpc_async("worker1", same, (n,)) for n in range(5)]],
        lambda: rpc.remote("worker1", same, (2,)).to_here(),
        lambda: rpc.rpc_sync("worker1", fetch, (rpc.RRef(torch.ones(2)),)),
    ]
    chance = random.Random(5)

    def interrupt(*_):
        raise KeyboardInterrupt

    def run():
        # Apart: Python 3.12 jumps back outside of the `try` that a loop is in.
        while True:
            chance.choice(works)()

    def run_until_interrupted():
        try:
            # More than once: one that comes in a destructor is dropped by Python.
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 4e-3), 0.02)
            run()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # for those in destructors
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with cluster(2):
            for _ in range(100):
                with contextlib.suppress(KeyboardInterrupt):
                    run_until_interrupted()
                assert step(x) == [2.0, 3.0]
            gc.collect()
            begun_at = time.monotonic()
        assert time.monotonic() - begun_at < 30, "the end waited for references"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
