"""DistributedDataParallel inside a context: its reducer averages what the context gets."""

from __future__ import annotations

import multiprocessing
import traceback

import pytest
import torch
import torch.distributed
from autograd_cluster import Cluster
from torch.nn.parallel import DistributedDataParallel


def trainer(rank, path, outcomes, options):
    import warnings

    import telegrad.autograd as dist_autograd

    warnings.simplefilter("error")
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{path}", rank=rank, world_size=2
        )
        torch.manual_seed(rank)
        dist_autograd._init(rank)
        plain = torch.nn.Linear(2, 2)
        net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
        ddp = DistributedDataParallel(net, **options)
        for _ in range(3):
            x = torch.rand(4, 2)
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [ddp(plain(x)).norm()])
                got = dist_autograd.get_gradients(context_id)
            assert all(p.grad is None for p in plain.parameters())
            ddp.zero_grad()
            ddp(plain(x)).norm().backward()
            for parameter in (*net.parameters(), *plain.parameters()):
                torch.testing.assert_close(got[parameter], parameter.grad)
            ddp.zero_grad()
            plain.zero_grad()
        single = torch.nn.Linear(2, 2, bias=False)
        passes_of_one_context_add_up(DistributedDataParallel(single, **options))
        a_bucket_is_reached_in_several_waves(options)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        outcomes.put("")
    except BaseException:
        outcomes.put(traceback.format_exc())


def passes_of_one_context_add_up(ddp):
    """The bucket of its only parameter is as large as the gradient, and is used in every pass."""
    import telegrad.autograd as dist_autograd

    weight = ddp.module.weight
    for _ in range(2):  # in the first, DistributedDataParallel chooses its buckets
        inputs = torch.rand(3, 4, 2)
        with dist_autograd.context() as context_id:
            for x in inputs:
                dist_autograd.backward(context_id, [ddp(x).norm()])
            got = dist_autograd.get_gradients(context_id)[weight]
        for x in inputs:
            ddp(x).norm().backward()
        torch.testing.assert_close(got, weight.grad)
        weight.grad = None


class Split(torch.nn.Module):
    """Two layers, with one of another worker between them."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.second(self.call(self.first(x)))


def a_bucket_is_reached_in_several_waves(options):
    """The reducer writes to all parameters when the last is reached: to those of earlier waves
    once more."""
    with Cluster(2) as cluster:
        engine = cluster.engines[0]
        split = Split(lambda hidden: cluster.call(0, 1, torch.tanh, hidden))
        ddp = DistributedDataParallel(split, **options)
        for _ in range(2):
            x = torch.rand(4, 2)
            context = engine.new()
            for _ in range(2):
                engine.backward(context.id, [ddp(x).norm()])
            got = engine.get_gradients(context.id)
            engine.release(context.id)
            split.call, call = torch.tanh, split.call
            for _ in range(2):
                ddp(x).norm().backward()
            split.call = call
            for parameter in split.parameters():
                torch.testing.assert_close(got[parameter], parameter.grad)
            ddp.zero_grad()
        cluster.settle()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copy", "view"])
def test_gradients_in_a_context_are_reduced_as_in_plain_backward(tmp_path, options):
    spawn = multiprocessing.get_context("spawn")
    outcomes = spawn.Queue()
    workers = [
        spawn.Process(target=trainer, args=(rank, tmp_path / "pg", outcomes, options))
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    errors = [outcomes.get(timeout=100) for _ in workers]
    for worker in workers:
        worker.join()
    outcomes.close()
    outcomes.join_thread()
    assert errors == ["", ""], "\n".join(errors)
