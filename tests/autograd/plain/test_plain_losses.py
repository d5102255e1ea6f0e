"""What is left of plain calls when one of their workers dies."""

from __future__ import annotations

import time

import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.autograd.plain import engine_here
from telegrad.errors import WorkerLost
from telegrad.testing.cluster import cluster

PATIENCE = 30.0


def f(x):
    return torch.tanh(x)


def leaf():
    return torch.linspace(0.1, 0.3, 3).requires_grad_()


def counts():
    return engine_here().counts()


def call_and_keep(x):
    kept.append(telegrad.call("worker1", f, x))


kept = []


def test_nothing_is_left_of_a_caller_that_dies():
    with cluster(3, graceful=False) as group:
        rpc.rpc_sync("worker2", call_and_keep, (leaf(),))
        assert rpc.rpc_sync("worker1", counts)["entries"] == 1
        group.kill("worker2")
        with pytest.raises(WorkerLost):
            telegrad.call("worker2", f, leaf())
        end = time.monotonic() + PATIENCE
        while rpc.rpc_sync("worker1", counts)["entries"] and time.monotonic() < end:
            pass
        assert rpc.rpc_sync("worker1", counts)["entries"] == 0


def test_a_callee_that_dies_ends_the_pass():
    with cluster(2, graceful=False) as group:
        loss = telegrad.call("worker1", f, leaf()).sum()
        group.kill("worker1")
        with pytest.raises(WorkerLost, match="worker1"):
            loss.backward()
