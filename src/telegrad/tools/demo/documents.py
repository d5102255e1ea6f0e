"""The data of the demo: documents of words, each about one of eight topics.

A word comes from the topic's own distribution or, as often, from one that all topics share. So a
single word says little, and the model has to weigh all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["TOPICS", "WORDS", "Documents", "make_documents"]

WORDS = 2000
TOPICS = 8
LENGTH = 16
BATCH = 64


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
