"""The data and the parts of the model. The parts know nothing of workers, but for the encoder,
which calls whoever holds the table.

The data are made: documents of words, each about one of eight topics. A word comes from the topic's
own distribution or, as often, from one that all topics share, so a single word says little and the
model has to weigh all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["BATCH", "TOPICS", "Documents", "Encoder", "Head", "Table", "Whole", "make_documents"]

WORDS = 2000
TOPICS = 8
LENGTH = 16
BATCH = 64
WIDTH = 32
HIDDEN = 64


class Documents(NamedTuple):
    words: torch.Tensor
    topics: torch.Tensor

    def batch(self, step: int) -> Documents:
        """The documents of a training step, in the order of the data, again and again."""
        begin = step * BATCH % (len(self.topics) - BATCH + 1)
        return Documents(self.words[begin : begin + BATCH], self.topics[begin : begin + BATCH])


def make_documents(count: int, seed: int) -> Documents:
    """
    Args:
        seed: of the choice of words; the topics' distributions are always the same.
    """
    world = torch.Generator().manual_seed(1)
    common = torch.rand(WORDS, generator=world) ** 4
    of_topics = torch.rand(TOPICS, WORDS, generator=world) ** 8
    chances = common / common.sum() + of_topics / of_topics.sum(1, keepdim=True)
    choice = torch.Generator().manual_seed(seed)
    topics = torch.randint(0, TOPICS, (count,), generator=choice)
    words = torch.multinomial(chances[topics], LENGTH, replacement=True, generator=choice)
    return Documents(words, topics)


class Table(nn.Module):
    """The mean of the embeddings of a document's words. Its gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.embedding = nn.EmbeddingBag(WORDS, WIDTH, mode="mean", sparse=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embedding(words)
        return found


class Encoder(nn.Module):
    """
    Args:
        table: a reference to the table, or the table itself.
    """

    def __init__(self, table: Any) -> None:
        super().__init__()
        self._look_up = table if isinstance(table, Table) else _Remote(table)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.layers = nn.Sequential(
                nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()
            )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.layers(self._look_up(words))
        return encoded


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.layer = nn.Linear(HIDDEN, TOPICS)

    def forward(self, encoded: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(encoded)
        return scores


class Whole(nn.Module):
    """The same model in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.encoder = Encoder(self.table)
        self.head = Head()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.encoder(words))
        return scores


class _Remote:
    """A module behind a reference, called where it lives."""

    def __init__(self, rref: Any) -> None:
        self._rref = rref

    def __call__(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._rref.rpc_sync().forward(words)
        return found
