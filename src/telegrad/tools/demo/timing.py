"""The time of a training step, on telegrad and on torch's own RPC.

The same model, data and optimizer, without clipping and schedule, which torch's RPC does not offer
for remote parameters. Only this module of the demo imports torch's RPC, when it is used.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import telegrad
from telegrad.tools.demo.documents import TOPICS, WORDS, make_documents
from telegrad.tools.demo.training import HIDDEN, WIDTH, Encoder, model_on_workers

__all__ = ["seconds_on_telegrad", "seconds_on_torchs_rpc", "torch_has_rpc"]

_WARM_UP = 20
_PATIENCE = 60.0  # seconds, and one more for each step
_DOCUMENTS = 2000
_LEARNING_RATE = 0.01

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _median(step: Step, steps: int) -> float:
    documents = make_documents(_DOCUMENTS, seed=5)
    times = []
    for number in range(_WARM_UP + steps):
        words, topics = documents.batch(number)
        begun = time.perf_counter()
        step(words, topics).item()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[_WARM_UP:])


def seconds_on_telegrad(steps: int) -> float:
    """The median time of a step, on the workers that are running."""
    model = model_on_workers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)

    def step(words: torch.Tensor, topics: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(words), topics)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return _median(step, steps)


def torch_has_rpc() -> bool:
    import torch.distributed

    return torch.distributed.is_available() and hasattr(torch._C, "_rpc_init")


def seconds_on_torchs_rpc(steps: int) -> float:
    """The median time of a step, on workers of its own, which `telegrad.workers` starts. They use
    telegrad only to be told to begin.

    Raises:
        RpcTimeout: it takes too long: torch's RPC can wait forever for a worker that has died.
    """
    names = ("trainer", "table", "encoder")
    with (
        tempfile.TemporaryDirectory(prefix="telegrad-demo-") as directory,
        telegrad.workers(*names, threads=1),
    ):
        running = [
            telegrad.submit(name, _run_torchs_rpc, name, rank, f"file://{directory}/store", steps)
            for rank, name in enumerate(names)
        ]
        median, *_ = [each.result(_PATIENCE + steps) for each in running]
    assert median is not None
    return median


def _run_torchs_rpc(name: str, rank: int, where: str, steps: int) -> float | None:
    """Runs on each of its workers."""
    from torch.distributed import rpc

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # it reports every connection that ends, and its own deprecations
    os.close(nowhere)
    options = rpc.TensorPipeRpcBackendOptions(init_method=where)
    rpc.init_rpc(name, rank=rank, world_size=3, rpc_backend_options=options)
    median = _train_on_torchs_rpc(steps) if name == "trainer" else None
    rpc.shutdown()
    return median


def _train_on_torchs_rpc(steps: int) -> float:
    from torch.distributed import autograd, rpc
    from torch.distributed.optim import DistributedOptimizer

    table = rpc.remote("table", nn.EmbeddingBag, args=(WORDS, WIDTH))
    encoder = rpc.remote("encoder", Encoder, args=(WIDTH, HIDDEN))
    head = nn.Linear(HIDDEN, TOPICS)
    parameters = [rpc.RRef(parameter) for parameter in head.parameters()]
    for part in (table, encoder):
        parameters += rpc.rpc_sync(part.owner(), _parameters_of, args=(part,))
    optimizer = DistributedOptimizer(torch.optim.AdamW, parameters, lr=_LEARNING_RATE)

    def step(words: torch.Tensor, topics: torch.Tensor) -> torch.Tensor:
        with autograd.context() as context_id:
            found = table.rpc_sync().forward(words)
            loss = F.cross_entropy(head(encoder.rpc_sync().forward(found)), topics)
            autograd.backward(context_id, [loss])  # type: ignore[attr-defined]
            optimizer.step(context_id)
        return loss

    return _median(step, steps)


def _parameters_of(part: Any) -> list[Any]:
    from torch.distributed import rpc

    return [rpc.RRef(parameter) for parameter in part.local_value().parameters()]
