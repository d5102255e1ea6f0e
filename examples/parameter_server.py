"""Trainers share one model that lives on a parameter server.

    telegrad run -n 3 examples/parameter_server.py

Worker 0 is the server and owns all parameters; every other worker is a trainer with data of its
own. A trainer calls the model on the server, and runs one backward pass through the call: the
gradients land on the server. When those of all trainers are there, it steps. No trainer ever holds
a parameter.
"""

import os
import threading

import torch
from torch import nn

import telegrad.autograd as dist_autograd
import telegrad.rpc as rpc

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TRAINERS, STEPS = SIZE - 1, 100


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


class Server:
    """What lives on worker 0. Trainers reach it through an RRef."""

    def __init__(self):
        self.model = new_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.lock = threading.Lock()  # trainers call at the same time
        self.arrived = 0
        self.stepped = torch.futures.Future()
        self.losses = []

    def predict(self, x):
        return self.model(x)

    @rpc.functions.async_execution  # answered when the future is done; no thread waits for that
    def step(self, context_id, loss):
        gradients = dist_autograd.get_gradients(context_id)
        with self.lock:
            self.losses.append(loss)
            for parameter in self.model.parameters():
                part = gradients[parameter] / TRAINERS
                parameter.grad = part if parameter.grad is None else parameter.grad + part
            self.arrived += 1
            stepped = self.stepped
            if self.arrived == TRAINERS:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.arrived, self.stepped = 0, torch.futures.Future()
                stepped.set_result(None)
        return stepped


def data_of(trainer):
    torch.manual_seed(trainer)
    x = torch.randn(64, 4)
    return x, x[:, :1] * x[:, 1:2] + x[:, 2:3]  # what the model has to learn


def train():
    server = rpc.remote("server", the_server)
    x, y = data_of(RANK)
    for _ in range(STEPS):
        with dist_autograd.context() as context_id:
            loss = nn.functional.mse_loss(server.rpc_sync().predict(x), y)
            dist_autograd.backward(context_id, [loss])
            server.rpc_sync().step(context_id, loss.item())


def train_in_one_process():
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = [data_of(trainer) for trainer in range(1, SIZE)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum(nn.functional.mse_loss(model(x), y) for x, y in data).div(TRAINERS).backward()
        optimizer.step()
    return model


server_object = Server() if RANK == 0 else None  # there before anybody can call


def the_server():
    """Runs on the server: every trainer gets a reference to the same object."""
    return server_object


rpc.init_rpc("server" if RANK == 0 else f"trainer{RANK}")
if RANK > 0:
    train()
rpc.shutdown()  # waits for everybody

if RANK == 0:
    losses = server_object.losses  # of all trainers, step by step
    first, last = sum(losses[:TRAINERS]) / TRAINERS, sum(losses[-TRAINERS:]) / TRAINERS
    print(f"{TRAINERS} trainers: loss fell from {first:.3f} to {last:.3f} in {STEPS} steps")
    pairs = zip(server_object.model.parameters(), train_in_one_process().parameters(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    print(f"largest difference to the same training in one process: {difference:.1e}")
    if not (last < first / 2 and difference < 1e-5):
        raise SystemExit("that is not the same training")
    print("ok")
