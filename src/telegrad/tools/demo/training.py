"""The model and its training, as a user writes them.

`train` does not know where the model lives: the demo runs it over three processes and in one. Each
part's gradients are clipped by themselves, so both add up the same numbers in the same order. (The
norm over all parts, too, can be had in one call; torch adds up the parts' norms in an order of its
own then, as it does for several GPUs, and the last bit may differ.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import telegrad
from telegrad.tools.demo.documents import TOPICS, WORDS, Documents

__all__ = ["Encoder", "local_model", "model_on_workers", "train"]

WIDTH = 32
HIDDEN = 64


class Encoder(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))))


def local_model() -> nn.Sequential:
    return nn.Sequential(
        nn.EmbeddingBag(WORDS, WIDTH),
        Encoder(WIDTH, HIDDEN),
        nn.Linear(HIDDEN, TOPICS),
    )


def model_on_workers() -> nn.Sequential:
    return nn.Sequential(
        telegrad.module("table", nn.EmbeddingBag, WORDS, WIDTH),
        telegrad.module("encoder", Encoder, WIDTH, HIDDEN),
        nn.Linear(HIDDEN, TOPICS),
    )


def train(
    model: nn.Sequential, documents: Documents, steps: int, look: Callable[[float], None]
) -> None:
    """
    Args:
        look: gets the loss of each step, when the gradients are in `.grad`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        words, topics = documents.batch(step)
        loss = F.cross_entropy(model(words), topics)
        loss.backward()
        for part in model:
            nn.utils.clip_grad_norm_(part.parameters(), 0.5)
        look(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
