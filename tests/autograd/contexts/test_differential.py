"""Random programs over several workers give the gradients of the same program run plainly.

A program is drawn from a seed, so that it can be built twice: with remote calls, and with each of
them replaced by a plain function call. `TELEGRAD_DIFFERENTIAL` sets how many programs run.
"""

from __future__ import annotations

import os
import random
import threading

import pytest
import torch
import torch.nn.functional as F
from autograd_cluster import Cluster

PROGRAMS = int(os.environ.get("TELEGRAD_DIFFERENTIAL", "600"))
CHUNK = 50

BINARY = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a @ b,
    lambda a, b: torch.sin(a) + b,
    lambda a, b: torch.stack([a, b]).sum(0),
    lambda a, b: a - b * a,
    lambda a, b: a + b.sum(),
    lambda a, b: torch.cat([a, b])[1:3],
]


class Python(torch.autograd.Function):
    """A Python node with several edges: it must run once, also on the boundary of a wave."""

    runs = 0

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):
        Python.runs += 1
        a, b = ctx.saved_tensors
        return g * b, g * a


class World:
    """The leaves of each worker, and how a call is made.

    Threads that share them apply Python functions to views of leaves only: torch itself stands
    still if one applies such a function to a leaf while another computes with it.
    """

    def __init__(self, seed, size, *, is_shared=False):
        generator = torch.Generator().manual_seed(seed)
        rnd = random.Random(seed)
        self.size = size
        self.is_shared = is_shared
        self.parameters = []
        for _ in range(size):
            leaves = [
                torch.rand(2, 2, dtype=torch.double, generator=generator).requires_grad_()
                for _ in range(2)
            ]
            leaves.append(
                torch.rand(5, 2, dtype=torch.double, generator=generator).requires_grad_()
            )
            for leaf in leaves[:2]:
                if rnd.random() < 0.3:
                    leaf.register_hook(lambda g: g * g + torch.sin(g))
            self.parameters.append(leaves)

    def __iter__(self):
        return (leaf for leaves in self.parameters for leaf in leaves)

    def given(self, value):
        """What a Python function gets for a value."""
        return value.view_as(value) if self.is_shared and value.is_leaf else value


def build(seed, world, call):
    """The roots of the program of this seed."""
    rnd = random.Random(seed)

    def work(here, values, depth, steps):
        values = list(values) + world.parameters[here][:2]
        for _ in range(steps):
            kind = rnd.random()
            if kind < 0.35 and depth < 3:
                to = rnd.randrange(world.size)
                chosen = [rnd.choice(values) for _ in range(rnd.choice((1, 1, 2)))]
                inner, outputs = rnd.randrange(1, 4), rnd.choice((1, 1, 2))

                def remote(*given, to=to, depth=depth, inner=inner, outputs=outputs):
                    return tuple(work(to, given, depth + 1, inner)[-outputs:])

                values += call(here, to, remote, *chosen)
            elif kind < 0.42:
                index = torch.tensor([rnd.randrange(5), rnd.randrange(5)])
                values.append(F.embedding(index, world.parameters[here][2], sparse=True))
            elif kind < 0.5:
                a, b = rnd.choice(values), rnd.choice(values)
                values.append(Python.apply(world.given(a), world.given(b)))
            else:
                value = rnd.choice(BINARY)(rnd.choice(values[-4:]), rnd.choice(values))
                value = torch.tanh(value)
                if rnd.random() < 0.25:
                    value.register_hook(lambda g: torch.sin(g) + g * g * 0.1)
                values.append(value)
        return values

    values = work(0, [], 0, rnd.randrange(4, 11))
    roots = [values[-1].sum() + values[-2].mean()]
    if rnd.random() < 0.3:
        roots += [(rnd.choice(values) * 1.5).sum() for _ in range(2)]
    passes = rnd.choice((1, 1, 2))
    return roots, passes


def plainly(seed, world):
    # Not loss.backward(): over two passes torch adds in place, and the values of a sparse gradient
    # may share memory with a dense one, which then goes wrong in torch itself.
    roots, passes = build(seed, world, lambda here, to, function, *args: function(*args))
    Python.runs = 0
    wanted = [None for _ in world]
    for _ in range(passes):
        found = torch.autograd.grad(roots, list(world), allow_unused=True, retain_graph=True)
        wanted = [
            after if before is None else before + after
            for before, after in zip(wanted, found, strict=True)
        ]
    return wanted, Python.runs


def check(seed, world, cluster, wanted):
    """One context, its passes, and the comparison, on this thread."""
    engine = cluster.engines[0]
    context = engine.new()
    try:
        roots, passes = build(seed, world, cluster.call)
        for n in range(passes):
            engine.backward(context.id, roots, retain_graph=n + 1 < passes)
        got = {}
        for engine_ in cluster.engines:
            if engine_.find(context.id) is not None:
                got |= engine_.get_gradients(context.id)
        for number, (leaf, want) in enumerate(zip(world, wanted, strict=True)):
            grad = got.get(leaf)
            assert leaf.grad is None, f"seed {seed}: .grad of leaf {number} was touched"
            assert (grad is None) == (want is None), f"seed {seed}: leaf {number}: {grad}, {want}"
            if want is not None:
                assert grad.layout == want.layout or not want.is_sparse, f"seed {seed}"
                grad, want = (t.to_dense() if t.is_sparse else t for t in (grad, want))
                assert torch.allclose(grad, want, rtol=1e-8), f"seed {seed}: leaf {number}"
    finally:
        engine.release(context.id)


@pytest.mark.parametrize("first", range(0, PROGRAMS, CHUNK))
def test_a_distributed_program_has_the_gradients_of_the_plain_one(first):
    for seed in range(first, min(first + CHUNK, PROGRAMS)):
        size = 2 + seed % 4
        world = World(seed, size)
        wanted, runs = plainly(seed, world)
        with Cluster(size, seed=seed) as cluster:
            Python.runs = 0
            check(seed, world, cluster, wanted)
            assert Python.runs == runs, f"seed {seed}: Python nodes ran {Python.runs} times"
            cluster.settle()
            for engine in cluster.engines:
                assert engine.debug_info() == {
                    "num_current_backward_passes": 0,
                    "num_autograd_contexts": 0,
                }, f"seed {seed}"


@pytest.mark.parametrize("seed", range(8))
def test_passes_of_many_contexts_run_side_by_side_through_the_same_leaves(seed):
    size, threads, rounds = 3, 4, 5
    world = World(seed, size, is_shared=True)
    plans = {t: [1000 * t + 37 * r + seed for r in range(rounds)] for t in range(threads)}
    wanted = {s: plainly(s, world)[0] for seeds in plans.values() for s in seeds}
    errors = []

    def run(seeds):
        try:
            for s in seeds:
                check(s, world, cluster, wanted[s])
        except BaseException as error:
            errors.append(error)

    with Cluster(size, seed=seed, threads=4) as cluster:
        runners = [threading.Thread(target=run, args=(seeds,)) for seeds in plans.values()]
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.join()
        if errors:
            raise errors[0]
