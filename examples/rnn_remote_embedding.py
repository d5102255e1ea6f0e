"""A recurrent model whose embedding table and decoder live on another worker.

    telegrad run -n 2 examples/rnn_remote_embedding.py

Large tables are the classic reason for a model to leave its process. Here the trainer runs the
LSTM, and the `tables` worker owns the embedding and the decoder, as `RemoteModule`s. One backward
pass goes decoder -> LSTM -> embedding, through both processes.
"""

import os

import torch
from torch import nn

import telegrad.autograd as dist_autograd
import telegrad.rpc as rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TEXT = "the quick brown fox jumps over the lazy dog. " * 4
LETTERS = sorted(set(TEXT))
WIDTH, STEPS = 24, 40


class Rnn(nn.Module):
    """Predicts the next letter. `embedding` and `decoder` are modules, of whatever worker."""

    def __init__(self, embedding, decoder):
        super().__init__()
        self.embedding, self.decoder = embedding, decoder
        torch.manual_seed(0)
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, letters):
        hidden, _ = self.lstm(self.embedding(letters))
        return self.decoder(hidden)

    def loss(self, letters):
        guessed = self(letters[:-1])
        return nn.functional.cross_entropy(guessed.flatten(0, 1), letters[1:].flatten())


def train(letters):
    embedding = RemoteModule("tables/cpu", nn.Embedding, args=(len(LETTERS), WIDTH))
    decoder = RemoteModule("tables/cpu", nn.Linear, args=(WIDTH, len(LETTERS)))
    # The twin for the comparison below starts from the same values.
    twin = Rnn(embedding.get_module_rref().to_here(), decoder.get_module_rref().to_here())
    model = Rnn(embedding, decoder)
    parameters = [rpc.RRef(parameter) for parameter in model.lstm.parameters()]
    parameters += embedding.remote_parameters() + decoder.remote_parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=1.0)
    losses = []
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            loss = model.loss(letters)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses, twin


def train_in_one_process(model, letters):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(letters)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if SIZE != 2:
    raise SystemExit("run it with -n 2: a trainer, and a worker for the tables")
rpc.init_rpc("trainer" if RANK == 0 else "tables")
if RANK == 0:
    letters = torch.tensor([LETTERS.index(letter) for letter in TEXT]).unsqueeze(1)
    losses, twin = train(letters)
    print(f"loss fell from {losses[0]:.3f} to {losses[-1]:.3f} in {STEPS} steps")
    alone = train_in_one_process(twin, letters)
    difference = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    print(f"largest difference to the losses in one process: {difference:.1e}")
    if not (losses[-1] < losses[0] * 0.8 and difference < 1e-4):
        raise SystemExit("that is not the same training")
    print("ok")
rpc.shutdown()
