"""All kinds of calls at once, between all workers, served by hosts wherever that is possible."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from hosting import CHANGED, invite_at

from telegrad import autograd, rpc
from telegrad.errors import RpcTimeout
from telegrad.rpc.connections import lane_server
from telegrad.testing.cluster import cluster

SIZE = 3
THREADS = 4
CALLS = 300
SOON = 10.0
OFTEN = {"_BUSY": 0.2, "_TERM": 0.3}

weight = torch.full((16, 16), 0.1, requires_grad=True)


def short(n):
    return n + 1


def seldom_slow(n):
    if random.random() < 0.005:
        time.sleep(0.1)
    return n + 1


def slow(n, seconds):
    time.sleep(seconds)
    return n + 1


def circle(n, hops):
    if hops == 0:
        return n + 1
    me = rpc.get_worker_info().id
    return rpc.rpc_sync(f"worker{(me + 1) % SIZE}", circle, (n, hops - 1))


def fail(n):
    raise ValueError(str(n))


def double(tensor):
    return tensor * 2


def layer(x):
    return torch.tanh(x @ weight)


def call_short(to, n, dice):
    assert rpc.rpc_sync(to, short, (n,)) == n + 1


def call_seldom_slow(to, n, dice):
    assert rpc.rpc_sync(to, seldom_slow, (n,)) == n + 1


def call_slow(to, n, dice):
    assert rpc.rpc_sync(to, slow, (n, dice.random() / 20)) == n + 1


def call_in_a_circle(to, n, dice):
    assert rpc.rpc_sync(to, circle, (n, dice.randrange(6))) == n + 1


def call_what_fails(to, n, dice):
    with pytest.raises(ValueError, match=str(n)):
        rpc.rpc_sync(to, fail, (n,))


def call_what_takes_too_long(to, n, dice):
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync(to, slow, (n, 0.1), timeout=0.02)


def call_with_tensor(to, n, dice):
    tensor = torch.full((dice.choice((10, 5_000, 60_000, 400_000)),), float(n))
    assert torch.equal(rpc.rpc_sync(to, double, (tensor,)), tensor * 2)


def call_later(to, n, dice):
    assert rpc.rpc_async(to, short, (n,)).wait() == n + 1


def step(to, n, dice):
    x = torch.full((4, 16), n / 1000, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync(to, layer, (x,))
        autograd.backward(context_id, [(y * y).sum()])
        there = autograd.get_gradients(context_id)[x]
    (here,) = torch.autograd.grad((layer(x) ** 2).sum(), x)
    assert torch.equal(there, here)


ALL = {
    call_short: 50,
    call_seldom_slow: 20,
    step: 10,
    call_later: 5,
    call_with_tensor: 5,
    call_in_a_circle: 4,
    call_what_fails: 2,
    call_slow: 1,
    call_what_takes_too_long: 1,
}


def make_calls(seed):
    """What went wrong in several threads that call the others, and how long a call took at most."""
    me = rpc.get_worker_info().id
    others = [f"worker{n}" for n in range(SIZE) if n != me]
    errors, longest = [], [0.0]

    def run(number):
        dice = random.Random(seed * 100 + number)
        try:
            for call in dice.choices(list(ALL), list(ALL.values()), k=CALLS):
                begun = time.monotonic()
                call(dice.choice(others), dice.randrange(1000), dice)
                longest[0] = max(longest[0], time.monotonic() - begun)
        except BaseException as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors, longest[0]


@pytest.fixture
def inviting(monkeypatch):
    """At this worker; and the host gives up often."""
    for name, value in {**CHANGED, **OFTEN}.items():
        monkeypatch.setattr(lane_server, name, value)


@pytest.mark.parametrize("options", [{}, {"busy_wait": 0.0}, {"transport": "tcp"}], ids=str)
def test_all_kinds_of_calls_at_once(inviting, options):
    with cluster(SIZE, **options):
        invite_at([f"worker{n}" for n in range(1, SIZE)], **OFTEN)
        others = [rpc.rpc_async(f"worker{n}", make_calls, (n,)) for n in range(1, SIZE)]
        for errors, longest in [make_calls(0), *(other.wait() for other in others)]:
            assert errors == []
            assert longest < SOON
