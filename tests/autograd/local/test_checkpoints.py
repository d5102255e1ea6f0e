"""Functions that run a backward pass inside of theirs: reentrant checkpoints, and others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from autograd_cluster import Cluster
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from telegrad.errors import BackwardError


def again(function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=True)


@pytest.fixture
def leaves():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, generator=generator).requires_grad_() for _ in range(4)]


def inside(x, w, v, _):
    return again(lambda x: (x * w).sin() + v, x * 2)


def inside_and_beside(x, w, v, _):
    return again(lambda x: (x * w).sin(), x * 2) * w + v


def inside_of_two(x, w, v, _):
    return again(lambda x: x * w * v, again(lambda x: (x * w).sin(), x))


def nested(x, w, v, u):
    return again(lambda x: again(lambda y: (y * w).sin() * v, x * w) * u, x)


def given(x, w, v, _):
    return again(lambda x, w: (x * w * v).sin(), x, w)


def one_of_several_outputs(x, w, v, _):
    return again(lambda x: (x * w, x * v), x * 1)[0]


def in_a_sequence(x, w, v, u):
    steps = [lambda x, p=p: (x * p).sin() for p in (w, v, u)]
    return checkpoint_sequential(steps, 3, x * 1, use_reentrant=True)


def without_a_leaf(x, *_):
    return again(lambda x: x.sin(), x * 1)


PROGRAMS = [
    inside,
    inside_and_beside,
    inside_of_two,
    nested,
    given,
    one_of_several_outputs,
    in_a_sequence,
    without_a_leaf,
]


def right_gradients(program, leaves):
    copies = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    program(*copies).sum().backward()
    return [copy.grad for copy in copies]


@pytest.fixture(params=["here", "there"])
def found_in(request):
    """Runs a program, here or on another worker, and passes over its result; gives the gradients
    that the contexts got where it ran."""
    with Cluster(2) as cluster:

        def run(program, leaves, passes=1):
            here = there = cluster.engines[0]
            context = here.new()
            try:
                if request.param == "here":
                    y = program(*leaves)
                else:
                    there = cluster.engines[1]
                    y = cluster.call(0, 1, lambda: program(*leaves))
                for number in range(passes):
                    here.backward(context.id, [y.sum()], retain_graph=number < passes - 1)
                return there.get_gradients(context.id)
            finally:
                here.release(context.id)

        yield run


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # when nested
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_leaves_of_the_function_get_their_gradients_in_the_context(
    found_in, leaves, program, passes
):
    before = torch.full((3,), 100.0)
    for leaf in leaves:
        leaf.grad = before.clone()
    found = found_in(program, leaves, passes)
    for leaf, right in zip(leaves, right_gradients(program, leaves), strict=True):
        if right is None:
            assert leaf not in found
        else:
            torch.testing.assert_close(found[leaf], passes * right)
        assert torch.equal(leaf.grad, before)  # left alone
    assert len(found) == sum(leaf in found for leaf in leaves)  # and nothing else is in it


def test_hooks_of_leaves_inside_run(found_in, leaves):
    seen = []
    leaves[1].register_hook(lambda gradient: seen.append(gradient) or 10 * gradient)
    found = found_in(inside, leaves)
    right = right_gradients(inside, leaves)[1]
    torch.testing.assert_close(found[leaves[1]], 10 * right)
    assert len(seen) == 1


@pytest.fixture
def backward():
    """Runs a pass of one worker, and gives all gradients."""
    with Cluster(1, threads=0) as cluster:
        (engine,) = cluster.engines

        def run(root, **options):
            context = engine.new()
            try:
                engine.backward(context.id, [root], **options)
                return engine.get_gradients(context.id)
            finally:
                engine.release(context.id)

        yield run


def test_a_failing_function_leaves_the_checkpoint_as_it_was(leaves, backward):
    x, w, *_ = leaves
    fails = []

    def function(x):
        if fails:
            raise ValueError("not again")
        return x * w

    y = again(function, x * 1).sum()
    fails.append(True)
    with pytest.raises(ValueError, match="not again"):
        backward(y, retain_graph=True)
    fails.clear()
    found = backward(y)
    assert torch.equal(found[x], w)
    assert torch.equal(found[w], x)
    checkpointed = y.grad_fn.next_functions[0][0]
    assert checkpointed.run_function is function


def test_passes_of_two_contexts_through_one_checkpoint_at_the_same_time(leaves, backward):
    x, w, *_ = leaves

    def function(x):
        return x * w

    scaled = again(function, x * 1) * 1
    both_are_in, first_is_over = threading.Barrier(2, timeout=30), threading.Event()
    came = []

    def before_the_checkpoint(gradient):
        came.append(gradient)
        is_first = len(came) == 1
        both_are_in.wait()
        if not is_first:
            assert first_is_over.wait(30)

    scaled.register_hook(before_the_checkpoint)
    y = scaled.sum()

    def run():
        found = backward(y, retain_graph=True)
        first_is_over.set()
        return found

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(run), threads.submit(run)]:
            found = future.result()
            assert torch.equal(found[x], w)
            assert torch.equal(found[w], x)
    assert w.grad is None
    checkpointed = scaled.grad_fn.next_functions[0][0]
    assert checkpointed.run_function is function


def test_leaves_whose_hooks_need_the_field_are_refused(leaves, backward):
    x, w, *_ = leaves
    w.register_post_accumulate_grad_hook(lambda leaf: None)
    y = again(lambda x: x * w, x * 1).sum()
    with pytest.raises(BackwardError, match=r"use checkpoint\(\.\.\., use_reentrant=False\)"):
        backward(y)
    assert w.grad is None


class Careful(torch.autograd.Function):
    """What other libraries' checkpoints do."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, gradient):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("checkpointing is not compatible with .grad()")
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


def test_functions_with_a_pass_inside_that_is_not_known_refuse(leaves, backward):
    x, w, *_ = leaves
    y = Careful.apply(lambda x: x * w, x * 1).sum()
    with pytest.raises(RuntimeError, match="not compatible"):
        backward(y)
    assert w.grad is None


@pytest.mark.parametrize("where", [0, 1])
def test_a_function_that_calls_another_worker_is_refused(leaves, where):
    x, w, *_ = leaves
    with Cluster(3) as cluster:
        here = cluster.engines[0]
        context = here.new()

        def program(x):
            return again(lambda x: cluster.call(where, 2, lambda x: x * w, x * 2), x)

        y = program(x) if where == 0 else cluster.call(0, 1, program, x)
        with pytest.raises(BackwardError, match="calls another worker"):
            here.backward(context.id, [y.sum()])
        here.release(context.id)
