"""A model in three stages on three workers, fed with micro-batches.

    telegrad run -n 3 examples/pipeline.py

Worker 0 owns the first stage, the data and the loss. Each stage sends its output on to the next, so
several micro-batches are under way at once, each on another worker. One backward pass then goes
through all of them. The same model is trained in one process beside it, to compare.
"""

import os

import torch
from torch import nn

import telegrad.autograd as dist_autograd
import telegrad.rpc as rpc
from telegrad.optim import DistributedOptimizer

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STAGES, MICRO_BATCHES, STEPS = 3, 4, 20


def new_stage(number):
    """Equal on every worker that asks for it: that is what makes the comparison possible."""
    torch.manual_seed(number)
    if number < STAGES - 1:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    return nn.Linear(16, 1)


stage = new_stage(RANK)  # that of this worker


def run_from_here(x):
    """This stage and those after it: calls nest, and backward follows them back."""
    y = stage(x)
    if RANK + 1 < STAGES:
        y = rpc.rpc_sync(f"stage{RANK + 1}", run_from_here, args=(y,))
    return y


def parameters():
    return [rpc.RRef(parameter) for parameter in stage.parameters()]


def train(x, y):
    owners = [f"stage{number}" for number in range(STAGES)]
    references = [ref for owner in owners for ref in rpc.rpc_sync(owner, parameters)]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.1)
    losses = []
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            # All micro-batches are sent before the first result is waited for.
            futures = [
                rpc.rpc_async("stage0", run_from_here, args=(part,))
                for part in x.chunk(MICRO_BATCHES)
            ]
            output = torch.cat([future.wait() for future in futures])
            loss = nn.functional.mse_loss(output, y)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses, [ref.to_here() for ref in references]


def train_in_one_process(x, y):
    model = nn.Sequential(*(new_stage(number) for number in range(STAGES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = torch.cat([model(part) for part in x.chunk(MICRO_BATCHES)])
        nn.functional.mse_loss(output, y).backward()
        optimizer.step()
    return list(model.parameters())


if SIZE != STAGES:
    raise SystemExit(f"run it with -n {STAGES}: one worker for each stage")
rpc.init_rpc(f"stage{RANK}")
if RANK == 0:
    torch.manual_seed(100)
    x = torch.randn(64, 16)
    y = x.sin().sum(dim=1, keepdim=True)
    losses, trained = train(x, y)
    print(f"loss fell from {losses[0]:.3f} to {losses[-1]:.3f} in {STEPS} steps")
    pairs = zip(trained, train_in_one_process(x, y), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    print(f"largest difference to the same model in one process: {difference:.1e}")
    if not (losses[-1] < losses[0] / 2 and difference < 1e-5):
        raise SystemExit("that is not the same training")
    print("ok")
rpc.shutdown()
