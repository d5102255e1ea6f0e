"""Calls that are made while gradients are off: what they return is constant, as in one process."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import process_programs as programs
import pytest
import torch
from process_programs import leaf, relay, wait_until_clean, ways

import telegrad.autograd as dist_autograd
from telegrad import rpc
from telegrad.testing.cluster import cluster

WORKERS = [f"worker{i}" for i in range(3)]
MODES = [torch.no_grad, torch.inference_mode]


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(len(WORKERS)) as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_lives_on(group):
    yield
    wait_until_clean(WORKERS)


def check(program, way):
    """The program gives the gradients that it gives in one process."""
    torch.autograd.backward(program(programs.plainly))
    want = {name: leaf.grad for name, leaf in programs.leaves.items() if leaf.grad is not None}
    for parameter in programs.leaves.values():
        parameter.grad = None
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [program(way)])
        got = programs.gradients_everywhere(context_id, WORKERS)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient)


DISTRIBUTED = [name for name in ways if name != "plainly"]


@pytest.mark.parametrize("way", DISTRIBUTED)
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_a_result_is_constant(way, to):
    def program(call):
        x = leaf("x")
        prediction = call("worker2", programs.layer, "worker2", x)
        with torch.no_grad():
            target = call(to, programs.layer, to, x * 2)
        assert not target.requires_grad
        return ((prediction - target) * x).pow(2).sum()

    check(program, ways[way])


@pytest.mark.parametrize("way", DISTRIBUTED)
def test_so_is_one_that_was_computed_on_several_workers(way):
    def program(call):
        x = leaf("x")
        name = way if call is not programs.plainly else "plainly"
        with torch.no_grad():
            target = call("worker1", relay, name, ["worker1", "worker2", "worker1"], x)
        assert not target.requires_grad
        return (call("worker1", programs.layer, "worker1", x) * target).sum()

    check(program, ways[way])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [4, 400])  # small tensors travel in a table of their own
def test_what_requires_grad_of_a_result(mode, size):
    for to, context in itertools.product(WORKERS[:2], (dist_autograd.context, nullcontext)):
        with context() as context_id:
            with mode():
                now = rpc.rpc_sync(to, computed_and_given, (size,))
                later = rpc.rpc_async(to, computed_and_given, (size,))
            for computed, given in now, later.wait():
                assert [computed.requires_grad, given.requires_grad] == [False, True]
                assert given.is_leaf is (context_id is None)


def computed_and_given(size):
    given = torch.ones(size, size, requires_grad=True)
    return given * 2, given


@pytest.mark.parametrize("context", [dist_autograd.context, nullcontext])
def test_a_sparse_result_is_constant(context):
    with context(), torch.no_grad():
        assert not rpc.rpc_sync("worker1", sparse_and_computed).requires_grad


@pytest.mark.parametrize("way", DISTRIBUTED)
def test_a_history_from_before_is_kept(way):
    def program(call):
        with torch.no_grad():
            weight = call("worker1", leaf, "worker1")
            same = call("worker1", itself, leaf("y") * 2) if "async_function" not in way else 1
        return (weight * leaf("x") * same).sum()

    check(program, ways[way])


def itself(x):
    return x


def sparse_and_computed():
    return torch.eye(3, requires_grad=True).to_sparse() * 2


def test_outside_of_a_context_a_module_arrives_with_parameters_of_its_own():
    with torch.no_grad():
        module = rpc.rpc_sync("worker1", torch.nn.Linear, (2, 2))
        assert all(parameter.is_leaf for parameter in module.parameters())
        assert all(parameter.requires_grad for parameter in module.parameters())
        torch.optim.SGD(module.parameters(), lr=1.0)


@pytest.mark.parametrize("way", [name for name in DISTRIBUTED if name != "by_async_function"])
def test_in_a_context_the_function_runs_without_gradients_and_outside_of_one_with_them(way):
    """Outside, as under torch, what it does besides its result is its own matter."""
    call = ways[way]
    for to in WORKERS[:2]:
        with torch.no_grad():
            assert call(to, torch.is_grad_enabled)
            with dist_autograd.context():
                assert not call(to, torch.is_grad_enabled)
        with dist_autograd.context():
            assert call(to, torch.is_grad_enabled)


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_callbacks_of_such_a_call_are_in_its_context(to):
    with dist_autograd.context() as context_id:
        with torch.no_grad():
            future = rpc.rpc_async(to, torch.ones, (2,))
        current = future.then(lambda _: dist_autograd._current_context()._context_id())
        assert current.wait() == context_id


@rpc.functions.async_execution
def completed_with_gradients_off(x):
    future = torch.futures.Future()
    y = x * 3
    with torch.no_grad():
        future.set_result(y)
    return future


@rpc.functions.async_execution
def completed_later_with_gradients_off(x):
    y = x * 3

    def later(future):
        with torch.no_grad():
            return y

    return rpc.rpc_async("worker2", torch.ones, (1,)).then(later)


@pytest.mark.parametrize("func", [completed_with_gradients_off, completed_later_with_gradients_off])
def test_whoever_completes_a_result_does_not_matter(func):
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", func, (x,))
        dist_autograd.backward(context_id, [y.sum()])
        assert dist_autograd.get_gradients(context_id)[x].tolist() == [3, 3]


def test_a_call_within_backward_is_recorded_if_that_is_differentiated():
    x = torch.tensor(2.0, requires_grad=True, dtype=torch.double)
    for create_graph in (False, True):
        with dist_autograd.context() as context_id:
            y = Doubled.apply(rpc.rpc_sync("worker1", torch.mul, (x, x)))
            dist_autograd.backward(context_id, [y], create_graph=create_graph)
            gradient = dist_autograd.get_gradients(context_id)[x]
            assert gradient.item() == 8.0
            assert gradient.requires_grad is create_graph


class Doubled(torch.autograd.Function):
    """Its gradient is computed elsewhere."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return rpc.rpc_sync("worker2", torch.mul, (gradient, 2))
