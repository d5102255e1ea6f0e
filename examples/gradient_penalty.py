"""Gradients of gradients across workers: a gradient penalty on a remote critic.

    telegrad run -n 2 examples/gradient_penalty.py

A critic is kept smooth by a penalty on the gradient of its output with respect to its input (as in
WGAN-GP). The input is here, the critic on another worker: the first backward pass must leave the
gradient differentiable (`create_graph=True`), and the second goes through the first, on both.
"""

import os

import torch
from torch import nn

import telegrad.autograd as dist_autograd
import telegrad.rpc as rpc

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def new_critic():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 1)).double()


critic = new_critic()  # every worker makes one; only that of worker 1 is used


def judge(x):
    return critic(x)


def gradients_of_critic(context_id):
    found = dist_autograd.get_gradients(context_id)
    return [found[parameter] for parameter in critic.parameters()]


def penalty_of(gradient):
    """How far the gradients at each sample are from length 1."""
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


def across_workers(x):
    with dist_autograd.context() as context_id:
        score = rpc.rpc_sync("critic", judge, args=(x,)).sum()
        dist_autograd.backward(context_id, [score], create_graph=True)
        gradient = dist_autograd.get_gradients(context_id)[x]  # has a history, on both workers
        penalty = penalty_of(gradient)
        dist_autograd.backward(context_id, [penalty])
        # The context has summed both passes: d score + d penalty.
        here = dist_autograd.get_gradients(context_id)[x]
        there = rpc.rpc_sync("critic", gradients_of_critic, args=(context_id,))
    return penalty, [here, *there]


def in_one_process(x):
    model = new_critic()
    leaves = [x, *model.parameters()]
    score = model(x).sum()
    (gradient,) = torch.autograd.grad(score, [x], create_graph=True)
    penalty = penalty_of(gradient)
    # The last bias shifts the score alone: the penalty does not depend on it.
    both = torch.autograd.grad(score + penalty, leaves)
    return penalty, list(both)


if SIZE != 2:
    raise SystemExit("run it with -n 2: one worker for the data, one for the critic")
rpc.init_rpc("data" if RANK == 0 else "critic")
if RANK == 0:
    torch.manual_seed(1)
    x = torch.randn(32, 6, dtype=torch.float64, requires_grad=True)
    penalty, gradients = across_workers(x)
    expected_penalty, expected = in_one_process(x)
    print(f"penalty {penalty.item():.6f}, in one process {expected_penalty.item():.6f}")
    pairs = zip(gradients, expected, strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    print(f"largest difference of {len(expected)} gradients to one process: {difference:.1e}")
    if not difference < 1e-10:
        raise SystemExit("those are not the same gradients")
    print("ok")
rpc.shutdown()
