"""Processes that use autograd and then end in one of several ways."""

from __future__ import annotations

import os
import time

import torch

import telegrad.autograd as dist_autograd
from ending_pairs import run_pairs
from telegrad import rpc


def multiply(x, y):
    return x * y


def sleep(seconds):
    time.sleep(seconds)


def run(rank, store, ending, meet, pair):
    options = rpc.RpcOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        with dist_autograd.context() as context_id:
            y = rpc.rpc_sync(f"worker{1 - rank}", multiply, args=(x, x))
            z = rpc.rpc_async(f"worker{1 - rank}", multiply, args=(y, x)).wait()
            dist_autograd.backward(context_id, [z.sum()])
            assert dist_autograd.get_gradients(context_id)[x].tolist() == [3, 3, 3]
    meet()  # neither leaves before the other is done
    if ending == "graceful":
        rpc.shutdown()
    elif ending == "ungraceful":
        rpc.shutdown(graceful=False)
    elif ending == "abandoned":
        dist_autograd._new_context()
        for _ in range(3):
            rpc.rpc_async(f"worker{1 - rank}", sleep, args=(0.05,))
            rpc.rpc_async(f"worker{1 - rank}", multiply, args=(x, x))
    elif ending == "bereaved" and rank == 1:
        time.sleep(0.02 * pair)  # the other is in the middle of its end
        os._exit(0)


if __name__ == "__main__":
    run_pairs(run)
