"""Processes that end while script functions wait, in one of several ways."""

import os
import signal
import threading
import time

import torch
from torch import Tensor

import telegrad.autograd as dist_autograd
from ending_pairs import run_pairs
from telegrad import rpc


@torch.jit.ignore
def sleep(seconds: float) -> None:
    time.sleep(seconds)


@torch.jit.script
def slowly(x: Tensor, seconds: float) -> Tensor:
    sleep(seconds)
    return x + 1


@torch.jit.script
def begin(dst: str, x: Tensor, seconds: float):
    return rpc.rpc_async(dst, slowly, (x, seconds))


@torch.jit.script
def chain(dst: str, x: Tensor, seconds: float):
    for _ in range(100):
        x = rpc.rpc_async(dst, slowly, (x, seconds)).wait()
    return x


@torch.jit.script
def chain_of_sync(dst: str, x: Tensor, seconds: float):
    for _ in range(100):
        x = rpc.rpc_sync(dst, slowly, (x, seconds))
    return x


@torch.jit.script
def forked(dst: str, x: Tensor, seconds: float):
    return torch.jit.fork(chain, dst, x, seconds)


def endure(function, *args):
    try:
        function(*args)
    except RuntimeError:
        pass  # the worker has left


def interrupt_soon():
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()


def run(rank, store, ending, meet, pair):
    options = rpc.RpcOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    other, x = f"worker{1 - rank}", torch.ones(3, requires_grad=True)
    with dist_autograd.context():
        chain_of_sync(other, x, 0.0)
        chain(other, x, 0.0)
    meet()
    kept = []
    if ending == "abandoned":
        with dist_autograd.context():
            for seconds in (0.0, 0.001, 0.05, 5.0):
                kept += [begin(other, x, seconds) for _ in range(5)]
                kept += [forked(other, x, seconds)]
    elif ending == "waiting":
        for function in (chain, chain_of_sync):
            args = (function, other, x, 0.01)
            threading.Thread(target=endure, args=args, daemon=True).start()
    elif ending in ("interrupted", "interrupted synchronously"):
        if rank == 0:
            kept += [forked(other, x, 0.01)]
            interrupt_soon()
            function = chain if ending == "interrupted" else chain_of_sync
            try:
                function(other, x, 0.01)
                raise SystemExit("it was not interrupted")
            except KeyboardInterrupt:
                pass
        meet()
    elif ending == "raising":
        kept += [begin(other, x, 5.0), forked(other, x, 0.01)]
        globals()["kept"] = kept
        raise ValueError("the program has failed")
    globals()["kept"] = kept  # they live as long as the interpreter


if __name__ == "__main__":
    run_pairs(run, lambda ending: 1 if ending == "raising" else 0)
