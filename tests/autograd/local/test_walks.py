"""Walks through local graphs, at once or ahead of time."""

from __future__ import annotations

import pytest
import torch
from autograd_cluster import Cluster

from telegrad import autograd, rpc
from telegrad.autograd.contexts.message_nodes import SendFunction, recv_history
from telegrad.autograd.local import walks
from telegrad.autograd.local.walks import graph_behind, look_ahead, walk
from telegrad.autograd.torch_internals import AccumulateGrad
from telegrad.testing import cluster as processes


def leaf():
    return torch.ones(2, requires_grad=True)


def edges_of(*tensors):
    return SendFunction(tensors, 1).next_functions


def chain(tensor, length):
    for _ in range(length):
        tensor = tensor + 1
    return tensor


def test_a_walk_finds_every_node_once():
    a, b = leaf(), leaf()
    node, (received,) = recv_history(1, 1, [torch.ones(2)])
    middle = a * b
    y = middle + middle * received
    graph = walk(edges_of(y, middle))
    assert {n.variable is a or n.variable is b for n in graph.leaves} == {True}
    assert len(graph.leaves) == 2
    assert graph.recvs == [node]
    assert len(graph.nodes) == 3 + 2 + 1
    assert set(graph.leaves) == {n for n in graph.nodes if type(n) is AccumulateGrad}


@pytest.mark.parametrize("length", [10, 1000])
def test_a_long_graph_is_not_walked_ahead_of_time(length):
    x = leaf()
    sent = SendFunction([chain(x, length)], 1)
    look_ahead(sent)
    is_short = length < walks._SOON
    assert (sent.graph is not None) is is_short
    assert len(graph_behind(sent).nodes) == length + 1
    assert graph_behind(sent) is sent.graph


def test_a_wide_graph_is_not_walked_ahead_of_time():
    sent = SendFunction([torch.stack([leaf() * 2 for _ in range(walks._SOON)])], 1)
    look_ahead(sent)
    assert sent.graph is None


def test_a_walk_that_stops_early_has_seen_no_more_than_it_may():
    assert len(walk(edges_of(chain(leaf(), 100)), 10).nodes) == 10


@pytest.fixture
def cluster():
    with Cluster(2, threads=0) as cluster:
        yield cluster


def gradients_there(cluster, used, *, ahead):
    """The gradients of two parameters of worker 1, one behind each of its two results, of which
    the loss uses these."""
    here, there = cluster.engines
    parameters = [leaf(), leaf()]
    context = here.new()
    results = cluster.call(0, 1, lambda: tuple(p * (i + 2) for i, p in enumerate(parameters)))
    (sent,) = there.retrieve(context.id).sends.values()
    sent.graph = None
    if ahead:
        (message_id,) = there.retrieve(context.id).sends
        there.foresee(context.id, message_id)
        assert len(sent.graph.leaves) == 2
    here.backward(context.id, [sum(results[i].sum() for i in used)])
    cluster.settle()
    found = there.get_gradients(context.id)
    here.release(context.id)
    return [found[p].tolist() if p in found else None for p in parameters]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    ("used", "right"),
    [((0, 1), [[2.0] * 2, [3.0] * 2]), ((0,), [[2.0] * 2, None]), ((1,), [None, [3.0] * 2])],
)
def test_more_may_be_foreseen_than_gets_gradients(cluster, used, right, ahead):
    assert gradients_there(cluster, used, ahead=ahead) == right


def test_a_hook_that_comes_after_the_look_ahead_runs(cluster):
    here, there = cluster.engines
    parameter = leaf()
    context = here.new()
    result = cluster.call(0, 1, lambda: parameter * 2)
    ((message_id, sent),) = there.retrieve(context.id).sends.items()
    there.foresee(context.id, message_id)
    seen = []
    sent.graph.leaves[0].register_prehook(seen.append)
    here.backward(context.id, [result.sum()])
    cluster.settle()
    assert len(seen) == 1
    assert there.get_gradients(context.id)[parameter].tolist() == [2.0] * 2
    here.release(context.id)


def has_looked_ahead(context_id):
    """Whether this worker knows what lies behind the only answer of the context."""
    (sent,) = autograd._retrieve_context(context_id)._send_functions().values()
    return sent.graph is not None


def test_an_agent_looks_ahead_when_it_has_answered():
    with processes.cluster(2), autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", torch.mul, args=(leaf(), 2))
        assert rpc.rpc_sync("worker1", has_looked_ahead, args=(context_id,))
        autograd.backward(context_id, [y.sum()])


def test_a_look_ahead_that_fails_is_not_the_callers_matter(cluster, monkeypatch):
    def fail(sent):
        raise RuntimeError("this node does not say what it leads to")

    here, there = cluster.engines
    context = here.new()
    cluster.call(0, 1, lambda: leaf() * 2)
    ((message_id, sent),) = there.retrieve(context.id).sends.items()
    sent.graph = None
    monkeypatch.setattr("telegrad.autograd.contexts.registry.look_ahead", fail)
    there.foresee(context.id, message_id)
    assert sent.graph is None
    here.release(context.id)


def test_where_edges_will_be_counted_nothing_is_walked(cluster):
    here, there = cluster.engines
    parameter = leaf()
    context = here.new()
    for _ in range(walks.MOST_WALKED + 1):
        cluster.call(0, 1, lambda: parameter * 2)
    sends = there.retrieve(context.id).sends
    for sent in sends.values():
        sent.graph = None
    for message_id in sends:
        there.foresee(context.id, message_id)
    assert [sent.graph for sent in sends.values()] == [None] * len(sends)
    here.release(context.id)


def test_what_is_gone_is_not_looked_at(cluster):
    here, there = cluster.engines
    context = here.new()
    there.foresee(context.id, 12345)
    here.foresee(context.id, 12345)
    here.release(context.id)
    here.foresee(context.id, 12345)
