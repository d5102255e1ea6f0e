"""Programs that run twice, with remote and with local modules, and must give the same."""

from __future__ import annotations

import gc
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import telegrad
from telegrad import rpc
from telegrad.autograd.plain import engine_here
from telegrad.nn.module import PlacedModule
from telegrad.tensors.table import tables_here

__all__ = ["blocks", "loss_of", "make", "model", "numbers", "same", "seeded", "things_left"]


def seeded(seed, cls, *args, **kwargs):
    torch.manual_seed(seed)
    return cls(*args, **kwargs)


def blocks(width):
    return nn.Sequential(
        nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.LayerNorm(width)
    )


def make(far, worker, seed, cls, *args):
    """A module with the same numbers, on a worker or here."""
    if far:
        return telegrad.module(worker, seeded, seed, cls, *args)
    return seeded(seed, cls, *args)


def model(far, *, one_worker=False):
    """An embedding on worker1, blocks on worker2, a head here; or everything on worker1."""
    return nn.Sequential(
        make(far, "worker1", 1, nn.Embedding, 50, 16),
        make(far, "worker1" if one_worker else "worker2", 2, blocks, 16),
        make(far and one_worker, "worker1", 3, nn.Linear, 16, 50),
    )


def loss_of(module, seed=0):
    x = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(seed))
    return F.cross_entropy(module(x).flatten(0, 1).float(), x.roll(1, 1).flatten())


def numbers(module):
    return {name: value.detach().cpu() for name, value in module.state_dict().items()}


def same(program, within=0.0):
    """Runs `program(far)` with far True and False, and compares what they return."""
    found = []
    for far in (True, False):
        torch.manual_seed(7)
        found.append(tree_leaves(program(far)))
    assert len(found[0]) == len(found[1])
    for far, near in zip(*found, strict=True):
        if isinstance(far, torch.Tensor):
            assert (far.dtype, far.shape) == (near.dtype, near.shape)
            torch.testing.assert_close(far.detach().cpu(), near.detach(), rtol=0, atol=within)
        else:
            assert far == near or abs(far - near) <= within


def things_left(module: PlacedModule) -> int:
    """How much the worker of a module keeps for this process, once all three have heard of all
    graphs that have died."""
    end = time.monotonic() + 10.0
    while any(_graphs_left()) and time.monotonic() < end:
        pass
    stream = module._connection.stream
    stream.ask(_nothing)  # brings what is to be released
    return rpc.rpc_sync(stream.worker, _size, (stream.key,))


def _graphs_left():
    return [rpc.rpc_sync(worker, _count) for worker in range(3)]


def _count():
    gc.collect()
    engine_here().flush()
    return sum(engine_here().counts().values())


def _nothing(table):
    pass


def _size(key):
    return tables_here().size(key)
