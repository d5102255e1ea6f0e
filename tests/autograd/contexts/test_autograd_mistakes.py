"""What autograd says to those who have made a mistake; with real workers."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import telegrad.autograd as dist_autograd
from telegrad import rpc
from telegrad.errors import ContextError
from telegrad.observe import draw
from telegrad.testing.cluster import cluster

weight = torch.ones(3, requires_grad=True)
STOPS = (
    r"a gradient stops at a tensor that worker 'worker1' returned outside a "
    r"dist_autograd\.context\(\): parameters on 'worker1' get none"
)


def scale(x):
    return x * weight


def get_weight():
    return weight


def has_gradient(context_id):
    return weight in dist_autograd.get_gradients(context_id)


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(2) as group:
        yield group


@pytest.fixture
def x():
    return torch.ones(3)


def test_a_local_pass_that_reaches_a_result_from_outside_a_context_warns(x):
    y = rpc.rpc_sync("worker1", scale, (x,))
    assert y.is_leaf
    assert y.requires_grad
    with pytest.warns(UserWarning, match=STOPS) as caught:
        (y * 2).sum().backward()
    assert caught[0].filename == __file__
    assert y.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: rpc.rpc_sync("worker1", scale, (x,)),
        lambda x: rpc.rpc_async("worker1", scale, (x,)).wait(),
        lambda x: rpc.remote("worker1", scale, (x,)).to_here(),
        lambda x: rpc.rpc_sync("worker1", lambda x: {"y": [x * weight, 1]}, (x,))["y"][0],
        lambda x: rpc.rpc_sync("worker1", scale, (torch.ones(100_000, 3),)),
    ],
    ids=["sync", "async", "remote", "inside", "large"],
)
def test_so_does_a_distributed_one(call, x):
    head = torch.ones(3, requires_grad=True)
    y = call(x)
    with dist_autograd.context() as context_id:
        loss = (y * head).sum()
        with pytest.warns(UserWarning, match=STOPS) as caught:
            dist_autograd.backward(context_id, [loss])
        assert caught[0].filename == __file__
        assert head in dist_autograd.get_gradients(context_id)


def test_a_loop_warns_once(x):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(5):
            y = rpc.rpc_sync("worker1", scale, (x,))
            (y * 2).sum().backward()
    assert len(caught) == 1


def test_copies_of_leaves_and_plain_numbers_do_not_warn(x):
    copy = rpc.rpc_sync("worker1", get_weight)
    (copy * 2).sum().backward()  # a program that pulls parameters and pushes gradients
    assert copy.grad.tolist() == [2, 2, 2]
    with torch.no_grad():
        assert not rpc.rpc_sync("worker1", scale, (x,)).requires_grad
    rpc.rpc_sync("worker1", scale, (x,)).sum().item()  # only looked at


def test_a_marked_result_can_be_sent_on_and_saved(x, tmp_path):
    y = rpc.rpc_sync("worker1", scale, (x,))
    assert rpc.rpc_sync("worker1", torch.add, (y, 1)).tolist() == [2, 2, 2]
    torch.save(y, tmp_path / "y.pt")


def test_a_thread_takes_part_in_a_context_that_it_joins(x):
    with dist_autograd.context() as context_id:

        def forward(part):
            with dist_autograd.join_context(context_id) as joined:
                assert joined == context_id
                return rpc.rpc_sync("worker1", scale, (part,))

        with ThreadPoolExecutor(2) as pool:
            outputs = list(pool.map(forward, [x, x]))
        dist_autograd.backward(context_id, [torch.cat(outputs).sum()])
        assert rpc.rpc_sync("worker1", has_gradient, (context_id,))


def test_a_thread_that_has_joined_leaves_again(x):
    seen = []

    def work(context_id):
        with dist_autograd.join_context(context_id):
            pass
        try:
            dist_autograd._current_context()
        except ContextError as error:
            seen.append(str(error))

    with dist_autograd.context() as context_id:
        thread = threading.Thread(target=work, args=(context_id,))
        thread.start()
        thread.join()
    assert "join that of another thread by dist_autograd.join_context(context_id)" in seen[0]
    with pytest.raises(ContextError, match="there is no autograd context"):
        with dist_autograd.join_context(context_id):
            pass


def test_contexts_and_roots_are_checked(x):
    with dist_autograd.context() as context_id:
        with pytest.raises(ContextError, match="already inside a dist_autograd"):
            with dist_autograd.context():
                pass
        future = rpc.rpc_async("worker1", scale, (x,))
        reference = rpc.remote("worker1", scale, (x,))
        loss = future.wait().sum()
        for use in (dist_autograd.backward, draw):
            for roots, text in [
                (loss, rf"write {use.__name__}\(context_id, \[loss\]\)"),
                ([future], r"roots\[0\] is a future: call \.wait\(\)"),
                ([reference], r"roots\[0\] is an RRef: call \.to_here\(\)"),
            ]:
                with pytest.raises(TypeError, match=text):
                    use(context_id, roots)
        with pytest.raises(KeyError, match="no gradient for this tensor in the context"):
            dist_autograd.get_gradients(context_id)[x]
