"""Makes the figures of the documentation: `python docs/figures.py`.

They are pictures of real runs and of the protocols themselves. A test makes them again and compares
them with those that are committed.
"""

from __future__ import annotations

import pathlib
import sys

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import sequences
import state_diagrams
from telegrad import rpc
from telegrad.autograd import backward, context
from telegrad.observe import draw
from telegrad.testing.cluster import cluster

IMAGES = pathlib.Path(__file__).parent / "images"


# Every worker has its own of these.
weight = torch.ones(3, requires_grad=True)
layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
table = nn.EmbeddingBag(100, 4, sparse=True)


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * weight


def look_up(words: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = table(words)
    return found


def encode(words: torch.Tensor) -> torch.Tensor:
    encoded: torch.Tensor = layers(rpc.rpc_sync("worker2", look_up, args=(words,)))
    return encoded


def twice(x: torch.Tensor) -> torch.Tensor:
    hidden = x * weight
    return hidden + rpc.rpc_sync("worker2", torch.exp, args=(hidden,))


def graphs() -> dict[str, str]:
    """File name → the picture of a graph that is made here and now, by three workers."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    found = {}
    with cluster(3):
        with context() as context_id:
            loss = rpc.rpc_sync("worker1", scale, args=(x,)).sum()
            backward(context_id, [loss])
            found["step.svg"] = draw(context_id, title="one step of train.py").svg
        with context() as context_id:
            loss = rpc.rpc_sync("worker1", encode, args=(torch.arange(6).view(2, 3),)).sum()
            backward(context_id, [loss])
            found["nested.svg"] = draw(context_id, most_boxes=4, title="a call that calls on").svg
        with context() as context_id:
            loss = rpc.rpc_sync("worker1", twice, args=(x,)).sum()
            backward(context_id, [loss])
            found["waves.svg"] = draw(context_id, title="two waves on worker1").svg
        with context() as context_id:
            used = rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
            rpc.rpc_sync("worker2", torch.mul, args=(used, 3))
            loss = used.sum()
            backward(context_id, [loss])
            found["unused.svg"] = draw(context_id, title="a result that is not used").svg
    return found


def all_figures() -> dict[str, str]:
    return {**graphs(), **state_diagrams.all_diagrams(), **sequences.all_diagrams()}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, picture in all_figures().items():
        (IMAGES / name).write_text(picture, encoding="utf-8")
