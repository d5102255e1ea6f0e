"""What the error of a failed backward pass keeps alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.testing.cluster import cluster


def double(x):
    return 2 * x


class Local:
    pass


def test_variables_of_a_failed_backward_go_with_its_error():
    def step():
        local = Local()
        gone.append(weakref.ref(local))
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", double, args=(x,))
            group.kill("worker1")
            autograd.backward(context_id, [y.sum()])

    gone = []
    with cluster(2, graceful=False) as group:
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(RuntimeError) as caught:
                step()
            del caught
            assert gone[0]() is None
        finally:
            gc.enable()
