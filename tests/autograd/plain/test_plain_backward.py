"""Plain `loss.backward()` through calls on another worker does what it does in one process."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import telegrad
from telegrad import rpc
from telegrad.autograd import backward, context
from telegrad.autograd.plain import engine_here
from telegrad.errors import BackwardError, TelegradError
from telegrad.testing.cluster import cluster

P = torch.full((3,), 0.5, requires_grad=True)
PATIENCE = 30.0


@pytest.fixture(scope="module")
def group():
    with cluster(3) as running:
        yield running


def f(x):
    return torch.tanh(x * P)


def far(x):
    return telegrad.call("worker1", f, x)


def take_gradient():
    gradient, P.grad = P.grad, None
    return gradient


def counts():
    gc.collect()
    engine = engine_here()
    engine.flush()
    return engine.counts()


def leaf():
    return torch.linspace(0.1, 0.3, 3).requires_grad_()


def loss_of(y):
    return (y * torch.arange(1.0, 4.0)).sum()


def with_grads(f, x):
    (g,) = torch.autograd.grad(loss_of(f(x)), x, create_graph=True)
    (g * g).sum().backward()


def hooked(f, x):
    y = f(x)
    y.register_hook(lambda g: g * g)
    y.retain_grad()
    loss_of(y.exp()).backward()
    return y.grad


def in_threads(f, x):
    out = [None] * 4

    def one(i):
        out[i] = f(x * (i + 1))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    loss_of(sum(out)).backward()


def saved_on_cpu(f, x):
    with torch.autograd.graph.save_on_cpu():
        y = f(x * 2).exp()
    loss_of(y).backward()


def retained(f, x):
    loss = loss_of(f(x))
    loss.backward(retain_graph=True)
    loss.backward()


def in_no_grad(f, x):
    with torch.no_grad():
        y = f(x)
    assert not y.requires_grad
    return y


PROGRAMS = {
    "backward": lambda f, x: loss_of(f(x)).backward(),
    "twice in one loss": lambda f, x: loss_of(f(x) * f(x * 2)).backward(),
    "chain": lambda f, x: loss_of(f(f(f(x)))).backward(),
    "retain_graph": retained,
    "several roots": lambda f, x: torch.autograd.backward([f(x).sum(), f(x * 3).sum()]),
    "grad": lambda f, x: torch.autograd.grad(loss_of(f(x)), [x, leaf()], allow_unused=True)[0],
    "inputs": lambda f, x: loss_of(f(x)).backward(inputs=[x]),
    "grad of the result": lambda f, x: torch.autograd.grad(loss_of((y := f(x)).exp()), y)[0],
    "create_graph": with_grads,
    "hook and retain_grad on the result": hooked,
    "checkpoint": lambda f, x: loss_of(
        checkpoint(lambda t: f(t).exp(), x * 1, use_reentrant=False)
    ).backward(),
    "reentrant checkpoint": lambda f, x: loss_of(
        checkpoint(lambda t: f(t).exp(), x * 1, use_reentrant=True)
    ).backward(),
    "save_on_cpu": saved_on_cpu,
    "forward in threads": in_threads,
    "no_grad": in_no_grad,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_one_process(group, name):
    program, outcomes = PROGRAMS[name], []
    for function, gradient_of in (
        (far, lambda: telegrad.call("worker1", take_gradient)),
        (
            f,
            take_gradient,
        ),
    ):
        x = leaf()
        result = program(function, x)
        outcomes.append([result, x.grad, gradient_of()])
    for there, here in zip(*outcomes, strict=True):
        if here is None:
            assert there is None
        else:
            torch.testing.assert_close(there, here)


def cubed(x, y):
    return x * x * y.sin()


def test_gradcheck_and_gradgradcheck_pass(group):
    x, y = (torch.rand(3, dtype=torch.double, requires_grad=True) for _ in range(2))

    def function(x, y):
        return telegrad.call("worker1", cubed, x, y)

    assert gradcheck(function, (x, y))
    assert gradgradcheck(function, (x, y))


def two(x, y):
    return {"x": [x * P], "y": (y * 3, 7)}


def test_results_and_arguments_may_be_nested(group):
    x, y = leaf(), leaf()
    found = telegrad.call("worker1", two, x, y=y)
    assert found["y"][1] == 7
    found["x"][0].sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 0.5))
    assert y.grad is None
    telegrad.call("worker1", take_gradient)


def with_unused(x):
    return telegrad.call("worker2", f, P.cos()), x.sin()


def test_a_result_may_be_unused_though_only_it_leads_to_the_arguments(group):
    x = leaf()
    telegrad.call("worker1", with_unused, x)[0].sum().backward()
    assert x.grad is None or not x.grad.any()
    p, q = (P.detach().clone().requires_grad_() for _ in range(2))
    torch.tanh(p.cos() * q).sum().backward()
    torch.testing.assert_close(telegrad.call("worker1", take_gradient), p.grad)
    torch.testing.assert_close(telegrad.call("worker2", take_gradient), q.grad)


seen = []


def watched(x):
    y = torch.tanh(x)
    torch.autograd.graph.register_multi_grad_hook([y], seen.append)
    return y


def what_was_seen():
    taken = seen[:]
    seen.clear()
    return taken


def test_hooks_on_several_tensors_see_the_gradient_of_a_result(group):
    telegrad.call("worker1", watched, leaf()).sum().backward()
    ((gradient,),) = telegrad.call("worker1", what_was_seen)
    assert gradient.tolist() == [1.0] * 3


def deep(n, other, me, x):
    if n == 0:
        return x.sin() * P
    return telegrad.call(other, deep, n - 1, me, other, x) + 1


def test_calls_go_back_and_forth(group):
    x, y = leaf(), leaf()
    telegrad.call("worker1", deep, 20, "worker0", "worker1", x).sum().backward()
    ((y.sin() * P) + 20).sum().backward()
    take_gradient()
    telegrad.call("worker1", take_gradient)
    torch.testing.assert_close(x.grad, y.grad)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, meeting):
        ctx.meeting = meeting
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        telegrad.call("worker0", meet, ctx.meeting)
        return gradient, None


def slow(x, meeting):
    return Slow.apply(x, meeting)


both_are_there = threading.Barrier(2)


def meet(_):
    both_are_there.wait(PATIENCE)


def test_remote_parts_of_a_pass_run_side_by_side(group):
    x = leaf()
    parts = [telegrad.call(worker, slow, x, 0) for worker in ("worker1", "worker2")]
    sum(part.sum() for part in parts).backward()  # each waits for the other, in backward
    assert x.grad.tolist() == [2.0] * 3


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("boom in backward")


def boom(x):
    return Boom.apply(x * P)


def test_an_error_in_a_remote_backward_is_raised_by_backward(group):
    with pytest.raises(ValueError, match="boom in backward"):
        telegrad.call("worker1", boom, leaf()).sum().backward()
    far(leaf()).sum().backward()
    telegrad.call("worker1", take_gradient)


def test_a_second_pass_needs_retain_graph(group):
    loss = far(leaf()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()
    telegrad.call("worker1", take_gradient)


def own_backward(x):
    (x * P).sum().backward()


def test_a_function_cannot_run_backward_into_what_came_with_its_call(group):
    with pytest.raises(BackwardError, match="inside of a remotely called function"):
        telegrad.call("worker1", own_backward, leaf())
    telegrad.call("worker1", take_gradient)


def test_contexts_and_plain_calls_do_not_mix(group):
    x = leaf()
    with context() as context_id:
        with pytest.raises(TelegradError, match="inside of an autograd context"):
            far(x)
        received = rpc.rpc_sync("worker1", f, (x,))
        with pytest.raises(BackwardError, match=r"telegrad.autograd.backward\(context_id"):
            received.sum().backward()
    y = far(x)
    with context() as context_id, pytest.raises(BackwardError, match=r"call loss\.backward"):
        backward(context_id, [y.sum()])


_kept = []


def keep(x):
    _kept.append(x)


def forget():
    _kept.clear()


def wait_until_nothing_is_left():
    end = time.monotonic() + PATIENCE
    left = [{"any": 1}]
    while any(any(each.values()) for each in left) and time.monotonic() < end:
        left = [counts(), rpc.rpc_sync("worker1", counts)]
    assert left == [dict.fromkeys(left[0], 0)] * 2


def tokens():
    return len(engine_here().lifetimes.tokens)


def test_what_a_function_has_kept_ends_without_another_call(group):
    """However late it lets go: nothing but time tells its caller."""
    wait_until_nothing_is_left()
    telegrad.call("worker1", keep, leaf())
    end = time.monotonic() + 2.5  # seconds; what has died by then is told after one
    while time.monotonic() < end:
        assert tokens() == 1
        rpc.rpc_sync("worker1", tokens)
    rpc.rpc_sync("worker1", forget)
    end = time.monotonic() + PATIENCE
    while tokens() and time.monotonic() < end:
        rpc.rpc_sync("worker1", tokens)
    assert tokens() == 0


def test_nothing_is_left_of_calls_though_the_program_keeps_one_result(group):
    wait_until_nothing_is_left()
    kept = far(leaf())
    for _ in range(100):
        far(leaf())
    lifetimes, end = engine_here().lifetimes, time.monotonic() + PATIENCE
    while lifetimes.notes() > 1 and time.monotonic() < end:
        time.sleep(0.05)  # nothing but a timer sees to it
    assert lifetimes.notes() == 1
    del kept


@pytest.mark.parametrize("way", ["inference", "training", "exception", "submit"])
def test_nothing_is_left_of_a_call(group, way):
    x = leaf()
    for _ in range(20):
        if way == "inference":
            far(x)
        elif way == "submit":
            telegrad.submit("worker1", f, x).result()
        elif way == "training":
            far(x).sum().backward()
        else:
            with pytest.raises(ValueError, match="boom"):
                telegrad.call("worker1", boom, x).sum().backward()
    wait_until_nothing_is_left()
    telegrad.call("worker1", take_gradient)
