"""The job: training the model over three workers, or in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from telegrad.demo.model import Documents, Encoder, Head, Table, Whole, make_documents
from telegrad.demo.sides import Side, side_named

__all__ = ["DistributedModel", "Record", "time_steps", "train_whole"]

LEARNING_RATE = 0.05
DOCUMENTS = 20_000
_WARM_UP = 20

Gradients = dict[str, torch.Tensor]
"""By the parameter's name in the whole model."""


@dataclass
class Record:
    """What a training run leaves to compare."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    """Step → gradients, of the steps that were to be kept."""


class DistributedModel:
    """The model's three parts, on their workers. The driver makes it."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._table = side.rpc.remote("server", Table)
        self._encoder = side.rpc.remote("encoder", Encoder, args=(self._table,))
        self._head = Head()
        self._parts = {
            "table.": self._table,
            "encoder.": self._encoder,
            "head.": side.rpc.RRef(self._head),
        }
        parameters = []
        for part in self._parts.values():
            parameters += side.rpc.rpc_sync(part.owner(), _parameters_of, args=(side.name, part))
        self._optimizer = side.optimizer(torch.optim.Adagrad, parameters, lr=LEARNING_RATE)

    def step(
        self, batch: Documents, look: Callable[[int, torch.Tensor], None] | None = None
    ) -> float:
        """One training step; returns its loss.

        Args:
            look: gets the context and the loss when its gradients are there.
        """
        with self._side.autograd.context() as context_id:
            loss = nn.functional.cross_entropy(self(batch.words), batch.topics)
            self._side.autograd.backward(context_id, [loss])
            if look is not None:
                look(context_id, loss)
            self._optimizer.step(context_id)
        return loss.item()

    def __call__(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self._head(self._encoder.rpc_sync().forward(words))
        return scores

    def gradients(self, context_id: int) -> Gradients:
        """All gradients of the context, from all workers."""
        found: Gradients = {}
        for prefix, part in self._parts.items():
            told = self._side.rpc.rpc_sync(
                part.owner(), _gradients_of, args=(self._side.name, part, context_id)
            )
            found.update({prefix + name: gradient for name, gradient in told.items()})
        return found


def _parameters_of(side_name: str, part: Any) -> list[Any]:
    """Runs where the part lives."""
    side = side_named(side_name)
    return [side.rpc.RRef(parameter) for parameter in part.local_value().parameters()]


def _gradients_of(side_name: str, part: Any, context_id: int) -> Gradients:
    """Runs where the part lives."""
    gradients = side_named(side_name).autograd.get_gradients(context_id)
    return {
        name: gradients[parameter].to_dense()
        for name, parameter in part.local_value().named_parameters()
    }


def train_whole(documents: Documents, steps: int, kept: Collection[int]) -> Record:
    """The same training in one process.

    Args:
        kept: the steps whose gradients are kept.
    """
    model, record = Whole(), Record()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE)
    names = dict(model.named_parameters())
    for step in range(steps):
        batch = documents.batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch.words), batch.topics)
        torch.autograd.backward(loss)
        if step in kept:
            record.gradients[step] = {
                name: parameter.grad.to_dense()
                for name, parameter in names.items()
                if parameter.grad is not None
            }
        optimizer.step()
        record.losses.append(loss.item())
    return record


def time_steps(side_name: str, steps: int) -> float:
    """The median time of a training step. Runs on the driver of a group."""
    documents = make_documents(DOCUMENTS // 10, seed=5)
    model = DistributedModel(side_named(side_name))
    times = []
    for step in range(_WARM_UP + steps):
        begun = time.perf_counter()
        model.step(documents.batch(step))
        times.append(time.perf_counter() - begun)
    return statistics.median(times[_WARM_UP:])
