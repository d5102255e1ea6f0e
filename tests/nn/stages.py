"""Models for tests of pipelines, each with the unsplit one in this process as the oracle."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import telegrad

WORKERS = ["worker1", "worker2", "worker3"]


def seeded(seed, cls, *args, **kwargs):
    torch.manual_seed(seed)
    return cls(*args, **kwargs)


def far_stage(worker, seed, cls, *args, **kwargs):
    return telegrad.module(worker, seeded, seed, cls, *args, **kwargs)


class Block(nn.Module):
    """Has a buffer that forward replaces, and a tuple between its parts."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.LayerNorm(outputs)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.rows = self.rows + x.shape[0]  # not in place
        return torch.tanh(self.norm(self.linear(x)))


def both(*stages, micro_batches=3):
    """A pipeline, and the same model in this process. A stage is where it is (None: here), a class
    and its arguments."""
    far, near = [], []
    for seed, (worker, cls, *args) in enumerate(stages):
        near.append(seeded(seed, cls, *args))
        far.append(far_stage(worker, seed, cls, *args) if worker else seeded(seed, cls, *args))
    return telegrad.Pipeline(nn.Sequential(*far), micro_batches=micro_batches), nn.Sequential(*near)


def four(micro_batches=3):
    return both(
        ("worker1", Block, 4, 5),
        ("worker2", Block, 5, 6),
        (None, nn.Linear, 6, 6),
        ("worker1", Block, 6, 3),
        micro_batches=micro_batches,
    )


def rows(count, width=4, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def close(far, near, within=1e-5):
    far, near = tree_leaves(far), tree_leaves(near)
    assert len(far) == len(near)
    for a, b in zip(far, near, strict=True):
        if b is None:
            assert a is None
        else:
            torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=within, atol=within)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


class Pass(nn.Module):
    def forward(self, x):
        return x


def numbered(count, width=2):
    return torch.arange(count, dtype=torch.float32)[:, None].repeat(1, width)
