"""Leaves that nobody watches, and the shorter way of gradients that end in them."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch
from autograd_cluster import Cluster
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from telegrad.autograd.local import waves
from telegrad.autograd.local.unwatched import Unwatched, unwatched


@pytest.fixture
def caught(monkeypatch):
    """For each wave, whether what flowed out was caught."""
    answers = []
    can_catch = waves.can_catch

    def ask(graph):
        answers.append(can_catch(graph))
        return answers[-1]

    monkeypatch.setattr("telegrad.autograd.local.local_pass.can_catch", ask)
    return answers


@pytest.fixture
def engine():
    with Cluster(2, threads=0) as cluster:
        yield cluster.engines[0]


@pytest.fixture
def gradients(engine):
    """Runs a pass from a loss, and gives the gradients of leaves."""

    def run(loss, *leaves, **options):
        context = engine.new()
        try:
            engine.backward(context.id, [loss], **options)
            found = engine.get_gradients(context.id)
            return [found[leaf] for leaf in leaves]
        finally:
            engine.release(context.id)

    return run


def new_leaf():
    return torch.ones(3, requires_grad=True)


def node_of(leaf):
    return get_gradient_edge(leaf).node


WATCHING = {
    "tensor": lambda leaf, see: leaf.register_hook(see),
    "node, before": lambda leaf, see: node_of(leaf).register_prehook(see),
    "node, after": lambda leaf, see: node_of(leaf).register_hook(see),
    "accumulated": lambda leaf, see: leaf.register_post_accumulate_grad_hook(see),
    "several": lambda leaf, see: register_multi_grad_hook([leaf], see),
}


@pytest.mark.parametrize("watch", WATCHING.values(), ids=WATCHING)
def test_a_hook_is_noticed_whenever_it_comes(watch):
    leaves = Unwatched()
    leaf = new_leaf()
    y = leaf * 2  # keeps the node, and with it the hooks
    assert leaves.includes(node_of(leaf))
    assert leaves.includes(node_of(leaf))
    handle = watch(leaf, lambda *grads: None)
    assert not leaves.includes(node_of(leaf))
    assert not leaves.includes(node_of(leaf))
    handle.remove()
    assert leaves.includes(node_of(leaf))
    del y


@pytest.mark.parametrize("watch", WATCHING.values(), ids=WATCHING)
def test_a_hook_that_came_between_passes_runs(gradients, caught, watch):
    leaf, other = new_leaf(), new_leaf()
    seen = []
    for _ in range(2):
        assert gradients((leaf * other).sum(), leaf)[0].tolist() == [1.0] * 3
    assert caught == [True, True]
    loss = (leaf * other * 2).sum()
    handle = watch(leaf, lambda *grads: seen.append(grads) and None)
    assert gradients(loss, leaf)[0].tolist() == [2.0] * 3
    assert len(seen) == 1
    handle.remove()
    assert gradients((leaf * other * 3).sum(), leaf)[0].tolist() == [3.0] * 3
    assert len(seen) == 1
    assert caught == [True, True, False, True]


def test_a_hook_of_another_thread_is_noticed(gradients, caught):
    leaf = new_leaf()
    y = leaf * 2
    assert gradients(y.sum(), leaf, retain_graph=True)[0].tolist() == [2.0] * 3
    seen = []
    thread = threading.Thread(target=lambda: node_of(leaf).register_prehook(seen.append))
    thread.start()
    thread.join()
    assert gradients(y.sum(), leaf)[0].tolist() == [2.0] * 3
    assert len(seen) == 1
    assert caught == [True, False]


def test_other_hooks_do_not_matter(gradients, caught):
    """Those of modules, and of other leaves, make one look again, no more."""
    leaf, other = new_leaf(), new_leaf()
    module = torch.nn.Linear(3, 1)
    module.register_forward_hook(lambda *seen: None)
    other.register_hook(lambda grad: None)
    y = other * 1
    node_of(other).register_hook(lambda *grads: None)
    for _ in range(3):
        gradients((leaf * 2).sum(), leaf)
    assert caught == [True] * 3
    del y


def test_looking_does_not_count(gradients):
    """Many leaves are looked at, some of them in waves with hooks of our own: the verdicts on the
    others stay."""
    leaf, watched = new_leaf(), new_leaf()
    watched.register_hook(lambda grad: None)
    assert unwatched.includes(node_of(leaf))
    (verdict,) = [v for v in unwatched._verdicts.values() if v() is leaf]
    for _ in range(5):
        gradients((new_leaf() * watched).sum(), watched)
    assert unwatched.includes(node_of(leaf))
    assert unwatched._verdicts[id(leaf)] is verdict


def test_a_look_while_another_wave_registers_is_not_remembered():
    """The count is too high then; the next hook that matters would make it right."""
    leaves = Unwatched()
    leaf, other = new_leaf(), new_leaf()
    y = leaf * 2, other * 2  # keep the nodes

    def register(hook):
        handle = node_of(other).register_prehook(hook)
        assert leaves.includes(node_of(leaf))
        return handle

    leaves.register(register, lambda grads: None)
    node_of(leaf).register_prehook(lambda grads: None)
    assert not leaves.includes(node_of(leaf))
    del y


def test_hooks_of_other_waves_and_of_those_who_look_are_no_watchers():
    """Taken for others', those after the node would make a wave put its gradients into `.grad` for
    a while, where other threads see them."""
    leaves = Unwatched()
    leaf, watched = new_leaf(), new_leaf()
    watched.register_hook(lambda grad: None)
    y = leaf * watched
    for node in map(node_of, (leaf, watched)):
        for register in (node.register_hook, node.register_prehook):
            leaves.register(register, lambda *grads: None)
    assert leaves.includes(node_of(leaf))
    assert not leaves.includes(node_of(watched))
    assert not leaves.has_post_hooks(node_of(watched))
    node_of(watched).register_hook(lambda *grads: None)
    assert leaves.has_post_hooks(node_of(watched))
    del y


def test_a_hook_that_cannot_be_registered_does_not_count():
    leaves = Unwatched()
    leaf = new_leaf()
    y = leaf * 2
    assert leaves.includes(node_of(leaf))

    def refuse(hook):
        raise TypeError("no")

    with pytest.raises(TypeError):
        leaves.register(refuse, None)
    assert leaves._verdicts[id(leaf)].count == leaves._count()
    node_of(leaf).register_hook(lambda *grads: None)
    assert not leaves.includes(node_of(leaf))
    del y


def test_looks_of_many_threads_miss_no_hook():
    """Waves with hooks of our own run all the time, while others come and go."""
    is_over = threading.Event()

    def make_waves():
        watched = new_leaf()
        watched.register_hook(lambda grad: None)
        while not is_over.is_set():
            unwatched.register((watched * 2).grad_fn.next_functions[0][0].register_prehook, len)

    threads = [threading.Thread(target=make_waves) for _ in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    try:
        for _ in range(1000):
            leaf = new_leaf()
            y = leaf * 2
            assert unwatched.includes(node_of(leaf))
            handle = node_of(leaf).register_prehook(len)
            assert not unwatched.includes(node_of(leaf))
            handle.remove()
            del y
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)


def test_nothing_is_remembered_of_a_leaf_that_is_gone():
    leaves = Unwatched()
    some = [new_leaf() for _ in range(10)]
    assert leaves.include_all(map(node_of, some))
    assert len(leaves._verdicts) == 10
    some.clear()
    gc.collect()
    assert not leaves._verdicts


def test_a_leaf_is_not_taken_for_another_at_its_address():
    leaves = Unwatched()
    first, second = new_leaf(), new_leaf()
    assert leaves.includes(node_of(first))
    leaves._verdicts[id(second)] = leaves._verdicts[id(first)]
    second._backward_hooks = {0: lambda grad: None}  # in a way that makes no handle
    assert not leaves.includes(node_of(second))


def test_a_gradient_that_two_leaves_share_is_not_shared_in_the_context(gradients, caught):
    a, b = new_leaf(), new_leaf()
    of_a, of_b = gradients((a + b).sum(), a, b)
    of_a.add_(1)
    assert of_b.tolist() == [1.0] * 3
    assert caught == [True]


def test_what_is_caught_is_not_copied(gradients, caught):
    a, b = new_leaf(), new_leaf()
    y = a * b
    pointers = []
    y.grad_fn.register_hook(lambda out, entered: pointers.extend(g.data_ptr() for g in out))
    assert [gradient.data_ptr() for gradient in gradients(y.sum(), a, b)] == pointers
    assert caught == [True]


def test_checkpoints_that_object_to_catching_work(gradients, caught):
    """Reentrant ones refuse to run where only some gradients are asked for."""
    leaf = new_leaf()
    y = checkpoint(lambda x: (x * x).sin(), leaf, use_reentrant=True)
    (got,) = gradients(y.sum(), leaf)
    (right,) = torch.autograd.grad((leaf * leaf).sin().sum(), [leaf])
    assert torch.equal(got, right)
    assert caught[0] is False


def test_checkpoints_that_do_not_object_work(gradients):
    leaf = new_leaf()
    y = checkpoint(lambda x: (x * x).sin(), leaf, use_reentrant=False)
    (got,) = gradients(y.sum(), leaf)
    (right,) = torch.autograd.grad((leaf * leaf).sin().sum(), [leaf])
    assert torch.equal(got, right)


def test_hooks_inside_of_the_graph_run_once(gradients, caught):
    leaf = new_leaf()
    seen = []
    y = leaf * 2
    y.register_hook(lambda grad: seen.append("tensor") or grad * 10)
    y.grad_fn.register_hook(lambda *grads: seen.append("after"))
    y.grad_fn.register_prehook(lambda grads: seen.append("before"))
    y.retain_grad()
    (got,) = gradients((y * 3).sum(), leaf)
    assert got.tolist() == [60.0] * 3
    assert y.grad.tolist() == [30.0] * 3
    assert sorted(seen) == ["after", "before", "tensor"]
    assert caught == [True]


def test_a_long_graph_is_not_caught(gradients, caught):
    leaf = new_leaf()
    y = leaf
    for _ in range(200):
        y = y + 1
    assert gradients(y.sum(), leaf)[0].tolist() == [1.0] * 3
    assert caught == [False]


@pytest.mark.parametrize("catches", [True, False])
def test_both_ways_give_the_same(gradients, monkeypatch, catches):
    if not catches:
        monkeypatch.setattr("telegrad.autograd.local.local_pass.can_catch", lambda graph: False)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    embedding = torch.nn.Embedding(5, 4, sparse=True)
    x = torch.rand(3, 4, requires_grad=True).T.contiguous().T  # not a leaf, laid out another way
    loss = (module(x + embedding(torch.tensor([0, 1, 0]))) ** 2).sum()
    leaves = [*module.parameters(), *embedding.parameters()]
    right = torch.autograd.grad(loss, leaves, retain_graph=True)
    for got, expected in zip(gradients(loss, *leaves), right, strict=True):
        assert got.layout is expected.layout
        assert torch.equal(got.to_dense(), expected.to_dense())
        if got.layout is torch.strided:
            assert got.stride() == expected.stride()
