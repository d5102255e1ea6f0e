"""Random programs over real processes give the gradients of the same program in one process.

Like `test_differential`, whose pieces these programs are made of; here each call is a real one, of
any kind, and draws its work from a seed of its own, so that the callee can build it.
`TELEGRAD_PROCESS_DIFFERENTIAL` sets how many programs run.
"""

from __future__ import annotations

import functools
import os
import random
import sys

import pytest
import torch
import torch.nn.functional as F
from process_programs import plainly, together, wait_until_clean, ways
from test_differential import BINARY, Python, World

import telegrad.autograd as dist_autograd
from telegrad import rpc
from telegrad.testing.cluster import cluster

PROGRAMS = int(os.environ.get("TELEGRAD_PROCESS_DIFFERENTIAL", "40"))
SIZE = 3
WORKERS = [f"worker{i}" for i in range(SIZE)]
WAYS = [name for name in ways if name != "plainly"]

SHARED = 1000
"""The first of the seeds whose programs all have the same leaves."""

shared_world = World(SHARED, SIZE, is_shared=True)
own_world = functools.cache(lambda seed: World(seed, SIZE))


def world_of(seed):
    """Each process makes all leaves of a program, and uses its own."""
    return shared_world if seed >= SHARED else own_world(seed)


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(SIZE) as group:
        yield group


def work(seed, is_plain, here, stream, depth, steps, outputs, given):
    """A part of the program of this seed, on worker `here`."""
    rnd = random.Random(stream)
    world = world_of(seed)
    parameters = world.parameters[here]
    values = [*given, *parameters[:2]]
    for _ in range(steps):
        kind = rnd.random()
        if kind < 0.35 and depth < 3:
            to = rnd.randrange(SIZE)
            chosen = tuple(rnd.choice(values) for _ in range(rnd.choice((1, 1, 2))))
            way = ways[rnd.choice(WAYS)]
            part = (to, rnd.random(), depth + 1, rnd.randrange(1, 4), rnd.choice((1, 1, 2)))
            call = plainly if is_plain else way
            values += call(WORKERS[to], work, seed, is_plain, *part, chosen)
        elif kind < 0.42:
            index = torch.tensor([rnd.randrange(5), rnd.randrange(5)])
            values.append(F.embedding(index, parameters[2], sparse=True))
        elif kind < 0.5:
            a, b = rnd.choice(values), rnd.choice(values)
            values.append(Python.apply(world.given(a), world.given(b)))
        else:
            value = rnd.choice(BINARY)(rnd.choice(values[-4:]), rnd.choice(values))
            value = torch.tanh(value)
            if rnd.random() < 0.25:
                value.register_hook(lambda g: torch.sin(g) + g * g * 0.1)
            values.append(value)
    return values[-outputs:]


def build(seed, is_plain):
    rnd = random.Random(seed)
    values = work(seed, is_plain, 0, rnd.random(), 0, rnd.randrange(4, 11), 4, ())
    roots = [values[-1].sum() + values[-2].mean()]
    if rnd.random() < 0.3:
        roots += [(value * 1.5).sum() for value in values[:2]]
    return [root for root in roots if root.grad_fn is not None], rnd.choice((1, 1, 2))


def wanted(seed):
    roots, passes = build(seed, is_plain=True)
    total = {}
    for _ in range(passes):
        found = torch.autograd.grad(
            roots, list(world_of(seed)), allow_unused=True, retain_graph=True
        )
        for number, gradient in enumerate(found):
            if gradient is not None:
                total[number] = total.get(number, 0) + gradient.to_dense()
    return total


def gradients_here(seed, context_id):
    if not dist_autograd._is_valid_context(context_id):
        return {}
    found = dist_autograd.get_gradients(context_id)
    leaves = enumerate(world_of(seed))
    return {number: found[leaf].to_dense() for number, leaf in leaves if leaf in found}


def check(seed, want):
    with dist_autograd.context() as context_id:
        roots, passes = build(seed, is_plain=False)
        for n in range(passes):
            dist_autograd.backward(context_id, roots, retain_graph=n + 1 < passes)
        got = {}
        for worker in WORKERS:
            got |= rpc.rpc_sync(worker, gradients_here, (seed, context_id))
    assert got.keys() == want.keys(), f"seed {seed}"
    for number in want:
        torch.testing.assert_close(got[number], want[number], msg=f"seed {seed}: leaf {number}")


def test_a_distributed_program_has_the_gradients_of_the_plain_one():
    for seed in range(PROGRAMS):
        check(seed, wanted(seed))
    wait_until_clean(WORKERS)


@pytest.fixture
def often_switching_threads():
    """What threads can do to each other at any step happens within a few programs."""
    before = sys.getswitchinterval()
    for worker in WORKERS:
        rpc.rpc_sync(worker, sys.setswitchinterval, (1e-5,))
    yield
    for worker in WORKERS:
        rpc.rpc_sync(worker, sys.setswitchinterval, (before,))


@pytest.mark.usefixtures("often_switching_threads")
@pytest.mark.parametrize("start", [0, SHARED], ids=["of their own", "shared"])
def test_programs_run_side_by_side(start):
    seeds = [range(start + first, start + PROGRAMS, 4) for first in range(4)]
    want = {seed: wanted(seed) for seed in range(start, start + PROGRAMS)}
    together(
        *(lambda chosen=chosen: [check(seed, want[seed]) for seed in chosen] for chosen in seeds)
    )
    wait_until_clean(WORKERS)
