"""Calls from and to TorchScript functions.

Each side has its own callers, since the compiler takes a name for what it stands for at the time.
They are compiled when this module is imported, on every worker: torch's RPC finds a script function
only where it was compiled.
"""

from typing import Any

import torch
import torch.distributed.rpc as torch_rpc
from torch import Tensor

import telegrad.rpc as telegrad_rpc
from telegrad.tools.bench.harness import Case, Op, Prepare, Side

A, B = torch.ones(4), torch.ones(4)


@torch.jit.script
def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


@torch.jit.script
def torch_sync(dst: str, a: Tensor, b: Tensor) -> Tensor:
    return torch_rpc.rpc_sync(dst, add, (a, b))  # type: ignore[no-any-return]


@torch.jit.script
def telegrad_sync(dst: str, a: Tensor, b: Tensor) -> Tensor:
    return telegrad_rpc.rpc_sync(dst, add, (a, b))  # type: ignore[no-any-return]


@torch.jit.script
def torch_async(dst: str, a: Tensor, b: Tensor) -> Tensor:
    return torch_rpc.rpc_async(dst, add, (a, b)).wait()  # type: ignore[no-any-return]


@torch.jit.script
def telegrad_async(dst: str, a: Tensor, b: Tensor) -> Tensor:
    return telegrad_rpc.rpc_async(dst, add, (a, b)).wait()  # type: ignore[no-any-return]


SYNC: dict[str, Any] = {"torch": torch_sync, "telegrad": telegrad_sync}
ASYNC: dict[str, Any] = {"torch": torch_async, "telegrad": telegrad_async}


def load() -> None:
    """Called on a worker, it has compiled what is above."""


def in_script(callers: dict[str, Any]) -> Prepare:
    def prepare(side: Side) -> Op:
        side.rpc.rpc_sync("worker1", load)
        return lambda: callers[side.name]("worker1", A, B)

    return prepare


def from_python(side: Side) -> Op:
    side.rpc.rpc_sync("worker1", load)
    return lambda: side.rpc.rpc_sync("worker1", add, args=(A, B))


def context_in_script(side: Side) -> Op:
    side.rpc.rpc_sync("worker1", load)
    call, a = ASYNC[side.name], torch.ones(4, requires_grad=True)

    def run() -> None:
        with side.autograd.context():
            call("worker1", a, B)

    return run


CASES = [
    Case(name="script function called from Python", prepare=from_python),
    Case(name="rpc_sync in a script function", prepare=in_script(SYNC)),
    Case(name="rpc_async in a script function", prepare=in_script(ASYNC)),
    Case(name="rpc_async in a script function, in a context", prepare=context_in_script),
]
