"""Ctrl-C at random moments of plain calls and passes: nothing stays on any worker."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import time

import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.autograd.plain import engine_here
from telegrad.testing.cluster import cluster

PATIENCE = 30.0
WEIGHT = torch.tensor([2.0, 3.0], requires_grad=True)


def scale(x):
    return x * WEIGHT


def over(x):
    """Two workers further."""
    return telegrad.call("worker2", scale, torch.tanh(x)) * WEIGHT


def broken(x):
    y = x * WEIGHT
    y.register_hook(lambda gradient: 1 / 0)
    return y


def call_broken(x):
    return telegrad.call("worker2", broken, x) * 2


def counts():
    gc.collect()
    WEIGHT.grad = None
    return engine_here().counts()


def wait_until_nothing_is_left():
    end = time.monotonic() + PATIENCE
    while True:
        left = [rpc.rpc_sync(worker, counts) for worker in range(3)]
        if not any(any(each.values()) for each in left) or time.monotonic() > end:
            break
        time.sleep(0.1)  # what is told by a timer must find some rest
    assert left == [dict.fromkeys(left[0], 0)] * 3


def test_nothing_is_left_of_a_pass_that_fails_on_another_worker():
    x = torch.ones(2, requires_grad=True)
    with cluster(3):
        for _ in range(3):
            loss = telegrad.call("worker1", call_broken, x).sum() + over(x).sum()
            with pytest.raises(Exception, match="division by zero"):
                loss.backward()
        del loss
        wait_until_nothing_is_left()


# Ctrl-C may come between a new socket and its name. Python closes it, and complains.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_nothing_is_left_of_what_ctrl_c_ends(monkeypatch):
    x = torch.ones(2, requires_grad=True)
    works = [
        lambda: telegrad.call("worker1", over, x).sum().backward(),
        lambda: telegrad.call("worker1", scale, x),
        lambda: telegrad.call("worker2", scale, telegrad.submit("worker1", over, x)),
        lambda: torch.autograd.grad(telegrad.call("worker1", over, x).sum(), x),
    ]
    chance = random.Random(7)

    def interrupt(*_):
        raise KeyboardInterrupt

    def run_until_interrupted():
        try:
            # More than once: one that comes in a destructor is dropped by Python.
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 4e-3), 0.02)
            while True:
                chance.choice(works)()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # for those in destructors
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with cluster(3, graceful=False):
            for _ in range(100):
                with contextlib.suppress(KeyboardInterrupt):
                    run_until_interrupted()
                x.grad = None
                telegrad.call("worker1", scale, x).sum().backward()
                assert x.grad.tolist() == [2.0, 3.0]
            wait_until_nothing_is_left()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
