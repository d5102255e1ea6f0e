"""A backward pass however its workers wait for messages: looking for them, sleeping, by a mailbox,
by a socket, or by a mixture of all."""

from __future__ import annotations

import process_programs as programs
import pytest
import torch
from process_programs import leaf

import telegrad.autograd as dist_autograd
from telegrad import rpc
from telegrad.testing.cluster import cluster

WAYS = {
    "looking": {},
    "sleeping": {"busy_wait": 0.0},
    "falling asleep": {"busy_wait": 1e-6},
    "no shared memory": {"shared_memory": False},
    "tcp": {"transport": "tcp"},
    "tcp, sleeping": {"transport": "tcp", "busy_wait": 0.0},
}


@pytest.mark.parametrize("way", WAYS)
def test_passes_end_and_are_exact(way):
    x = leaf("x")
    (wanted,) = torch.autograd.grad(programs.layer("worker1", x + x + x).sum(), x)
    with cluster(2, **WAYS[way]):
        for _ in range(50):
            with dist_autograd.context() as context_id:
                y = x
                for _ in range(2):
                    y = rpc.rpc_sync("worker1", torch.add, (y, x))
                y = rpc.rpc_sync("worker1", programs.layer, ("worker1", y))
                dist_autograd.backward(context_id, [y.sum()])
                (gradient,) = dist_autograd.get_gradients(context_id).values()
            torch.testing.assert_close(gradient, wanted)
