"""A program written for torch's RPC, which knows nothing of telegrad. It is run as a script."""

import os
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, rpc_sync


def whose():
    return rpc.rpc_sync.__module__.partition(".")[0]


def work(rank, world_size):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=20)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        module = RemoteModule("worker1/cpu", nn.Linear, (2, 1))
        with dist_autograd.context() as context_id:
            loss = module(torch.ones(1, 2)).sum()
            dist_autograd.backward(context_id, [loss])
            DistributedOptimizer(optim.SGD, module.remote_parameters(), lr=0.1).step(context_id)
            after = module(torch.ones(1, 2)).sum()
        assert abs((loss - after).item() - 0.3) < 1e-5
        assert RRef(torch.ones(1)).to_here() == 1
        print("on", rpc_sync("worker1", whose), flush=True)
    rpc.shutdown()


def main():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    mp.start_processes(work, args=(2,), nprocs=2, start_method=sys.argv[1])


if __name__ == "__main__":
    main()
