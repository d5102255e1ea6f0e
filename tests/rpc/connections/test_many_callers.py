"""Several workers call short functions of one all the time. Real processes."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from hosting import hosted, invite_at

from telegrad import autograd, rpc
from telegrad.errors import WorkerLost
from telegrad.testing.cluster import cluster

PATIENCE = 30.0
SOON = 2.0

gate = threading.Event()
to_block = []  # for each entry, one call of `work_or_wait` waits for the gate
blocked = []


def work(number):
    """Short, but long enough to be in the way of others."""
    return number + sum(range(2000)) * 0


def work_or_wait(number):
    if to_block and threading.current_thread().name.endswith("-host"):
        to_block.pop()
        blocked.append(number)
        assert gate.wait(PATIENCE)
    return work(number)


def block_one():
    to_block.append(None)


def is_one_blocked():
    return bool(blocked)


def open_gate():
    gate.set()


def pid():
    return os.getpid()


def call_until_gate_opens():
    with Callers(4, work) as callers:
        assert gate.wait(PATIENCE)
    return callers.errors


class Callers:
    """Threads of this process that call until they are told to stop."""

    def __init__(self, count, function):
        self._stop = threading.Event()
        self.errors = []
        self.calls = 0
        self._threads = [threading.Thread(target=self._run, args=(function,)) for _ in range(count)]

    def _run(self, function):
        try:
            number = 0
            while not self._stop.is_set():
                assert rpc.rpc_sync("worker1", function, (number,)) == number
                number += 1
                self.calls += 1
        except Exception as error:
            self.errors.append(error)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def wait_until_hosted(count, source=0):
    invite_at(["worker1"])
    end = time.monotonic() + PATIENCE
    while rpc.rpc_sync("worker1", hosted).count(source) < count:
        assert time.monotonic() < end, "lanes did not move to the host"
        time.sleep(0.01)


@pytest.mark.parametrize("options", [{}, {"busy_wait": 0.0}, {"transport": "tcp"}], ids=str)
def test_lanes_of_many_callers_are_served_by_one_thread(options):
    with cluster(2, **options), Callers(6, work) as callers:
        wait_until_hosted(4)
    assert not callers.errors


def test_a_function_that_blocks_all_of_a_sudden_is_soon_set_free():
    with cluster(2), Callers(4, work_or_wait) as callers:
        wait_until_hosted(3)
        rpc.rpc_sync("worker1", block_one)
        begun = time.monotonic()
        while not rpc.rpc_sync("worker1", is_one_blocked):
            assert time.monotonic() - begun < PATIENCE
        before, begun = callers.calls, time.monotonic()
        while callers.calls < before + 100:  # the others go on
            assert time.monotonic() - begun < SOON
        rpc.rpc_sync("worker1", open_gate)
    assert not callers.errors


def test_one_of_the_callers_is_killed():
    with cluster(4) as group:
        victim = rpc.rpc_sync("worker2", pid)
        others = [rpc.rpc_async(f"worker{n}", call_until_gate_opens) for n in (2, 3)]
        with Callers(2, work) as callers:
            wait_until_hosted(1, source=2)
            group._expected_dead.add("worker2")
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(WorkerLost):
                others[0].wait()
            rpc.rpc_sync("worker3", open_gate)
            assert others[1].wait() == []
        assert not callers.errors


def layer(x):
    return torch.tanh(x @ torch.ones(8, 8).mul(0.1).requires_grad_())


def gradients(seed, steps):
    """The gradient of each step of a trainer, and that of the same in one process."""
    torch.manual_seed(seed)
    found = []
    for _ in range(steps):
        x = torch.randn(4, 8, requires_grad=True)
        with autograd.context() as context_id:
            loss = (rpc.rpc_sync("worker1", layer, (x,)) * x).sum()
            autograd.backward(context_id, [loss])
            there = autograd.get_gradients(context_id)[x]
        (here,) = torch.autograd.grad((layer(x) * x).sum(), x)
        found.append(torch.equal(there, here))
    return found


def test_gradients_of_many_trainers_are_exact():
    with cluster(4):
        futures = [rpc.rpc_async(f"worker{n}", gradients, (n, 300)) for n in (2, 3)]
        assert all(gradients(0, 300))
        for future in futures:
            assert all(future.wait())
