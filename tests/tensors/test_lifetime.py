"""Remote tensors and the lives of the workers they are on, and of the callers they belong to."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch
from torch import nn

import telegrad
from telegrad import rpc
from telegrad.errors import NotInitialized, RpcTimeout, TelegradError, WorkerLost
from telegrad.tensors.table import tables_here
from telegrad.testing.cluster import cluster

KEPT = []
PATIENCE = 10.0


def count_tables():
    return len(tables_here()._tables)


def make_and_keep():
    """Makes this worker a caller of worker1."""
    KEPT.append(telegrad.module("worker1", nn.Linear, 2, 2))
    return KEPT[-1](torch.ones(1, 2)).shape


class Trap(nn.Module):
    """Its call is not answered while the worker lives."""

    def forward(self, path):
        with open(path, "w"):
            pass
        torch.futures.Future().wait()


def test_the_loss_of_a_worker_ends_every_use_of_its_tensors(tmp_path):
    with cluster(3, graceful=False) as group:
        lost = telegrad.module("worker1", nn.Linear, 2, 2)
        other = telegrad.module("worker2", nn.Linear, 2, 2)
        optimizer = torch.optim.SGD([*lost.parameters(), *other.parameters()], lr=0.1)
        loss = other(lost(torch.ones(1, 2))).sum()
        group.kill("worker1")
        with pytest.raises(WorkerLost):
            loss.backward()
        for use in (
            lambda: lost(torch.ones(1, 2)),
            lambda: lost.weight.detach().sum().item(),
            lambda: lost.weight.data.mul_(2),
            lambda: lost.state_dict()["weight"].cpu(),
        ):
            with pytest.raises(WorkerLost, match="worker1"):
                use()
        assert "on worker 'worker1'" in repr(lost)
        assert "of shape (2, 2) on worker 'worker1'" in repr(lost.weight)
        other(torch.ones(1, 2)).sum().backward()  # the others go on
        lost.zero_grad()
        del loss, optimizer


def test_a_worker_that_is_started_again_has_new_modules_only():
    with cluster(3, graceful=False) as group:
        old = telegrad.module("worker1", nn.Linear, 2, 2)
        group.kill("worker1")
        with pytest.raises(WorkerLost):
            old(torch.ones(1, 2))
        group.start("worker1", 1)
        group.wait_until_ready("worker1")
        new = telegrad.module("worker1", nn.Linear, 2, 2)
        assert new(torch.ones(1, 2)).shape == (1, 2)
        with pytest.raises(WorkerLost, match="cannot be used any more"):
            old(torch.ones(1, 2))
        with pytest.raises(RuntimeError):
            old.weight + new.weight


def test_a_call_that_waits_ends_when_its_worker_is_lost(tmp_path):
    with cluster(2, graceful=False) as group:
        trap = telegrad.module("worker1", Trap)
        found = []

        def call():
            try:
                trap(str(tmp_path / "running"))
            except WorkerLost as error:
                found.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        while not (tmp_path / "running").exists():
            time.sleep(0.001)
        group.kill("worker1")
        thread.join(30)
        assert len(found) == 1


OPENED = threading.Event()


def wait_until_opened(table):
    OPENED.wait(30)


def open_it():
    OPENED.set()


def test_a_call_that_takes_too_long_times_out_and_the_stream_goes_on():
    with cluster(2):
        weight = telegrad.module("worker1", nn.Linear, 1, 1).weight
        weight.data.fill_(3)  # goes with the call, and is not lost with it
        with pytest.raises(RpcTimeout):
            weight.handle.stream.ask(wait_until_opened, timeout=0.1)
        assert weight.item() == 3.0
        rpc.rpc_sync("worker1", open_it)
        weight.handle.stream.ask(wait_until_opened)


def test_what_a_caller_has_on_a_worker_ends_with_the_caller():
    with cluster(3, graceful=False) as group:
        assert rpc.rpc_sync("worker2", make_and_keep) == (1, 2)
        assert rpc.rpc_sync("worker1", count_tables) == 1
        mine = telegrad.module("worker1", nn.Linear, 2, 2)
        assert rpc.rpc_sync("worker1", count_tables) == 2
        group.kill("worker2")
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("worker2", count_tables)
        while rpc.rpc_sync("worker1", count_tables) > 1:  # it hears of the loss by itself
            pass
        assert mine(torch.ones(1, 2)).shape == (1, 2)


def test_a_failure_that_no_call_has_raised_is_logged_at_the_end(caplog):
    with caplog.at_level(logging.WARNING, "telegrad.tensors"):
        with cluster(2):
            p = telegrad.module("worker1", nn.Linear, 4, 4).weight.detach()
            torch.linalg.cholesky(-(p @ p.T))
            p.handle.stream.flush()
    (record,) = [each for each in caplog.records if each.name == "telegrad.tensors"]
    assert "failed on worker 'worker1', and no call has raised it" in record.getMessage()


def test_a_failure_that_was_raised_is_not_logged(caplog):
    with caplog.at_level(logging.WARNING, "telegrad.tensors"):
        with cluster(2):
            p = telegrad.module("worker1", nn.Linear, 4, 4).weight.detach()
            torch.linalg.cholesky(-(p @ p.T))
            p.handle.stream.flush()
            with pytest.raises(RuntimeError, match="positive-definite"):
                p.sum().item()
    assert not [each for each in caplog.records if each.name == "telegrad.tensors"]


def test_tensors_of_a_group_that_has_ended_say_so():
    with cluster(2):
        module = telegrad.module("worker1", nn.Linear, 2, 2)
    with pytest.raises(TelegradError, match=r"cannot be used any more: .*has been closed"):
        module(torch.ones(1, 2))
    with pytest.raises(TelegradError):
        module.weight.data.mul_(2)
    assert "on worker 'worker1'" in repr(module)
    with cluster(2):
        new = telegrad.module("worker1", nn.Linear, 2, 2)
        assert new(torch.ones(1, 2)).shape == (1, 2)
        with pytest.raises(TelegradError):
            module.weight.detach().sum()


class Held:
    def __len__(self):
        return 1

    def add(self, x):
        return x + 1


def test_what_calls_have_left_of_a_group_that_has_ended_says_so():
    x = torch.ones(2, requires_grad=True)
    with cluster(2):
        held = telegrad.object("worker1", Held)
        losses = [
            telegrad.call("worker1", torch.mul, x, 2).sum(),
            telegrad.module("worker1", nn.Linear, 2, 2)(x).sum(),
            telegrad.Pipeline([telegrad.module("worker1", nn.Linear, 2, 2)], micro_batches=2)(
                torch.ones(2, 2)
            ).sum(),
        ]
        future = telegrad.submit("worker1", torch.mul, x, 2)
        future.result()

    def use_all():
        for loss in losses:
            with pytest.raises(NotInitialized, match=r"call backward\(\) before the group"):
                loss.backward()
        for use in (held.add, held.add.submit):
            with pytest.raises(NotInitialized, match=r"<Held on worker 'worker1'> is gone"):
                use(x)
        with pytest.raises(NotInitialized, match=r"<Held on worker 'worker1'> is gone"):
            len(held)

    use_all()
    with cluster(2):
        use_all()
        for argument in (held, future):  # which used to wait forever
            with pytest.raises(NotInitialized, match="has been closed"):
                telegrad.call("worker1", len, argument)


def test_values_are_released_though_nothing_else_is_sent():
    with cluster(2):
        module = telegrad.module("worker1", nn.Linear, 2, 2)
        key = module._connection.stream.key
        before = rpc.rpc_sync("worker1", size_of, (key,))
        copies = [module.weight.detach() + n for n in range(10)]
        torch.stack(copies).sum().item()
        assert rpc.rpc_sync("worker1", size_of, (key,)) > before
        del copies
        while rpc.rpc_sync("worker1", size_of, (key,)) > before:  # takes a second
            pass


def size_of(key):
    return tables_here().size(key)


def test_a_worker_that_is_behind_slows_its_caller_down():
    with cluster(2):
        p = telegrad.module("worker1", nn.Linear, 300, 300).weight.detach()
        stream = p.handle.stream
        most = 0
        total = torch.zeros_like(p)
        for _ in range(1500):
            total += p @ p
            most = max(most, len(stream._under_way))
        assert most <= 17
        assert torch.isfinite(total.sum()).item()


class Interrupting:
    """An agent whose next message is interrupted by Ctrl-C, before or after it has left."""

    def __init__(self, agent, method, *, is_sent):
        self._agent, self._method, self._is_sent = agent, method, is_sent

    def __getattr__(self, name):
        method = getattr(self._agent, name)
        if name != self._method:
            return method
        self._method = None

        def interrupted(*args, **kwargs):
            if self._is_sent:
                method(*args, **kwargs)
            raise KeyboardInterrupt

        return interrupted


@pytest.mark.parametrize("is_sent", [True, False])
@pytest.mark.parametrize("method", ["call", "call_async"])
def test_ctrl_c_loses_no_operation_and_repeats_none(method, is_sent):
    with cluster(2, graceful=False):
        tensor = telegrad.module("worker1", nn.Linear, 1, 1).weight.detach().fill_(0.0)
        stream = tensor.handle.stream
        agent = stream._agent
        for _ in range(3):
            tensor.add_(1.0)
            stream._agent = Interrupting(agent, method, is_sent=is_sent)
            with pytest.raises(KeyboardInterrupt):
                tensor.item() if method == "call" else stream.flush()
            stream._agent = agent
            tensor.add_(1.0)
        assert tensor.item() == 6.0
        end = time.monotonic() + PATIENCE
        while stream._leaving and time.monotonic() < end:
            pass  # the second copy of a batch is answered at some time
        assert not stream._leaving
        assert not stream._batches[0]
