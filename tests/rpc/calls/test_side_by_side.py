"""All kinds of calls at once, from several threads of every worker, with threads that switch often.

Each call's outcome is known, whatever else goes on. Afterwards nothing is left open.
`TELEGRAD_SIDE_BY_SIDE` sets for how many seconds they run.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
import threading
import time

import pytest
import torch

import telegrad.autograd as dist_autograd
from telegrad import rpc
from telegrad.rpc.api import _rref_context_get_debug_info
from telegrad.testing.cluster import cluster

SECONDS = float(os.environ.get("TELEGRAD_SIDE_BY_SIDE", "4"))
THREADS = 3
WORKERS = [f"worker{i}" for i in range(3)]

weight = torch.full((3,), 3.0, requires_grad=True)
large = torch.arange(100_000.0)


def add(a, b):
    return a + b


def refuse(a):
    raise ValueError(f"not {a}")


def weigh(x):
    return x * weight


def double_over(x, path):
    return rpc.rpc_sync(path[0], double_over, (x, path[1:])) if path else x * 2


@rpc.functions.async_execution
def add_elsewhere(to, a, b):
    return rpc.rpc_async(to, add, (a, b)).then(lambda future: future.wait() + 1)


def fetch(rref):
    return rref.to_here()


def fetch_all(rrefs):
    return [rref.to_here() for rref in rrefs]


def fetch_elsewhere(rref, to):
    return rpc.rpc_sync(to, fetch, (rref,))


def keep(value):
    return rpc.RRef(value)


class Box:
    def __init__(self, value):
        self.value = value
        self.lock = threading.Lock()  # cannot be sent

    def get(self):
        return self.value

    def add(self, number):
        with self.lock:
            self.value += number
        return self.value

    def add_fetched(self, rref):
        return self.value + rref.to_here()


def calls(n, to, other, rnd):
    assert rpc.rpc_sync(to, add, (n, 1)) == n + 1
    assert [future.wait() for future in [rpc.rpc_async(to, add, (n, i)) for i in range(5)]] == [
        n + i for i in range(5)
    ]
    assert rpc.rpc_sync(to, add_elsewhere, (other, n, 3)) == n + 4


def failures(n, to, other, rnd):
    for call in (rpc.rpc_sync, lambda *args: rpc.remote(*args).to_here()):
        with pytest.raises(ValueError, match=f"^not {n}"):
            call(to, refuse, (n,))


def large_tensors(n, to, other, rnd):
    assert torch.equal(rpc.rpc_sync(to, torch.neg, (large,)), -large)


def references(n, to, other, rnd):
    rref = rpc.remote(to, add, (n, 6))
    assert rpc.rpc_sync(other, fetch_elsewhere, (rref, rnd.choice(WORKERS))) == n + 6
    assert rpc.rpc_sync(other, fetch, (rpc.rpc_sync(to, keep, (n,)),)) == n
    rrefs = [rpc.remote(worker, add, (n, n)) for worker in WORKERS]
    assert rpc.rpc_sync(to, fetch_all, (rrefs,)) == [2 * n] * len(WORKERS)


def methods(n, to, other, rnd):
    box = rpc.remote(to, Box, (n,))
    assert box.rpc_sync().add(5) == n + 5
    assert box.rpc_async().get().wait() == n + 5
    assert box.remote().get().to_here() == n + 5
    assert box.rpc_sync().add_fetched(rpc.remote(other, add, (n, n))) == 3 * n + 5


def nested_passes(n, to, other, rnd):
    x = torch.ones(3, requires_grad=True)
    path = rnd.choices(WORKERS, k=rnd.randrange(4))
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync(to, double_over, (x, path))
        loss = rpc.rpc_async(other, weigh, (y,)).wait().sum()
        dist_autograd.backward(context_id, [loss])
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [6, 6, 6]


def passes_by_reference(n, to, other, rnd):
    x = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context_id:
        y = rpc.remote(to, weigh, (x,)).to_here() + rpc.remote(other, weigh, (x,)).to_here()
        rpc.rpc_sync(to, weigh, (x,))  # nobody uses it
        dist_autograd.backward(context_id, [y.sum()])
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [6, 6, 6]


KINDS = [
    calls,
    failures,
    large_tensors,
    references,
    methods,
    nested_passes,
    passes_by_reference,
]


def run_all_kinds(seed):
    """How many rounds of them there were."""
    rnd = random.Random(seed)
    end = time.monotonic() + SECONDS
    for rounds in itertools.count(1):
        for kind in rnd.sample(KINDS, len(KINDS)):
            kind(rnd.randrange(100), rnd.choice(WORKERS), rnd.choice(WORKERS), rnd)
        if time.monotonic() > end:
            return rounds


def open_here():
    gc.collect()
    counts = _rref_context_get_debug_info() | dist_autograd._get_debug_info()
    return {name: int(count) for name, count in counts.items() if int(count)}


def test_each_call_has_its_own_outcome_and_nothing_is_left():
    with cluster(len(WORKERS)):
        for worker in WORKERS:
            rpc.rpc_sync(worker, sys.setswitchinterval, (1e-5,))
        try:
            runs = [
                rpc.rpc_async(worker, run_all_kinds, (f"{worker}, {number}",), timeout=100)
                for worker in WORKERS
                for number in range(THREADS)
            ]
            for run in runs:
                assert run.wait() > 0
        finally:
            sys.setswitchinterval(0.005)
        end = time.monotonic() + 20
        while any(left := [rpc.rpc_sync(worker, open_here) for worker in WORKERS]):
            assert time.monotonic() < end, left
            time.sleep(0.02)
