"""A program written for torch's RPC, with script functions, which knows nothing of telegrad. It is
run as a script."""

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.rpc import RRef, rpc_async


@torch.jit.script
def add(x, y):
    return x + y


@torch.jit.script
def fetch(rref: RRef[Tensor]) -> Tensor:
    return rref.to_here()


@torch.jit.script
def step(dst: str, x: Tensor, context_id: int):
    rref = rpc.remote(dst, add, (x, x))
    y = rpc_async(dst, add, (x, x)).wait() + rpc.rpc_sync(dst, fetch, (rref,))
    dist_autograd.backward(context_id, [y.sum()])
    return dist_autograd.get_gradients(context_id)


def work(rank, world_size):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        x = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context_id:
            gradients = step("worker1", x, context_id)
        print(gradients[x].tolist(), "on", rpc.rpc_sync.__module__.partition(".")[0], flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    mp.start_processes(work, args=(2,), nprocs=2, start_method=sys.argv[1])
