"""What a context records, and how the graph looks to those who walk it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from autograd_cluster import Cluster

from telegrad.errors import BackwardError, ContextError, NotInitialized
from telegrad.rpc.seams import NO_CONTEXT
from telegrad.wire.frames import Kind

SEND = "torch::distributed::autograd::SendRpcBackward"
RECV = "torch::distributed::autograd::RecvRpcBackward"


@pytest.fixture
def cluster():
    with Cluster(3) as cluster:
        yield cluster


@pytest.fixture
def context(cluster):
    context = cluster.engines[0].new()
    yield context
    if cluster.engines[0].find(context.id) is not None:
        cluster.engines[0].release(context.id)
    cluster.settle()


def test_a_call_is_seen_from_both_sides_as_upstream_shows_it(cluster, context):
    t1, t2 = (torch.ones(3, 3, requires_grad=True) for _ in range(2))
    result = cluster.call(0, 1, torch.add, t1, t2)

    (send,) = context._send_functions().values()
    (recv,) = context._recv_functions().values()
    assert send.name() == SEND
    assert recv.name() == RECV
    assert result.grad_fn == recv
    (first, zero), (second, _) = send.next_functions
    assert first.name() == "torch::autograd::AccumulateGrad"
    assert first.variable is t1
    assert second.variable is t2
    assert zero == 0
    assert context._known_worker_ids() == {1}

    there = cluster.engines[1].retrieve(context._context_id())
    (send,) = there._send_functions().values()
    add = send.next_functions[0][0]
    assert add.name() == "AddBackward0"
    (left, _), (right, _) = add.next_functions
    assert left.name() == right.name() == RECV
    assert left == right


def test_a_nested_call_shows_two_sends_in_the_middle(cluster, context):
    t1, t2 = (torch.ones(3, 3, requires_grad=True) for _ in range(2))
    cluster.call(0, 1, lambda a, b: cluster.call(1, 2, torch.add, a, b), t1, t2)
    middle = cluster.engines[1].retrieve(context.id)
    onward, back = middle._send_functions().values()
    assert [n.name() for n, _ in onward.next_functions] == [RECV, RECV]
    assert onward.next_functions[0][0] == onward.next_functions[1][0]
    assert [n.name() for n, _ in back.next_functions] == [RECV]
    assert middle._known_worker_ids() == {0, 2}


def test_a_result_that_nobody_keeps_is_still_told_of(cluster, context):
    t = torch.ones(3, requires_grad=True)
    result = cluster.call(0, 1, torch.sin, t)
    (alive,) = context._recv_functions().values()
    assert alive is result.grad_fn
    memory = weakref.ref(result)
    del result, alive
    gc.collect()
    assert memory() is None
    ((message_id, recv),) = context._recv_functions().items()
    assert recv.name() == RECV
    assert recv.received.message_id == message_id
    assert recv.received.source == 1


def test_nothing_is_recorded_for_tensors_without_grad_but_the_context_travels(cluster, context):
    cluster.call(0, 1, torch.add, torch.ones(2), torch.ones(2))
    assert context._send_functions() == {}
    assert context._recv_functions() == {}
    assert context._known_worker_ids() == {1}
    assert cluster.engines[1].find(context.id) is not None


def test_sparse_and_mixed_types_share_one_recv_node(cluster, context):
    sparse = torch.ones(2, 2).to_sparse().requires_grad_()
    double = torch.ones(3, dtype=torch.double, requires_grad=True)

    def both(s, d):
        return torch.sparse.sum(s).double() * d, s * 2

    first, second = cluster.call(0, 1, both, sparse, double)
    assert first.grad_fn == second.grad_fn
    assert second.is_sparse
    cluster.engines[0].backward(context.id, [first.sum()])
    gradients = cluster.engines[0].get_gradients(context.id)
    assert torch.equal(gradients[double], torch.full((3,), 4.0, dtype=torch.double))
    assert torch.equal(gradients[sparse].to_dense(), torch.full((2, 2), 3.0))


def test_a_send_function_refuses_inputs_and_undefined_gradients(cluster, context):
    t = torch.ones(3, 3, requires_grad=True)
    cluster.call(0, 1, torch.sin, t)
    (send,) = context._send_functions().values()
    with pytest.raises(BackwardError, match="takes no inputs"):
        send(t)
    send.set_grads([t, None])
    with pytest.raises(BackwardError, match="undefined gradient"):
        send()


def test_plain_backward_through_a_remote_tensor_says_what_to_call(cluster, context):
    result = cluster.call(0, 1, torch.sin, torch.ones(2, requires_grad=True))
    with pytest.raises(BackwardError, match=r"telegrad\.autograd\.backward"):
        result.sum().backward()


def test_recording_works_under_no_grad(cluster, context):
    t = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        message = cluster.engines[0].record_send(context.id, 1, [t])
        (out,) = cluster.engines[1].record_receive(context.id, message, 0, [torch.ones(2)])
    assert out.requires_grad


def test_a_thread_has_one_context_at_a_time(cluster, context):
    with pytest.raises(ContextError, match="already inside a dist_autograd"):
        cluster.engines[0].new()


def test_ids_carry_the_worker(cluster):
    engine = cluster.engines[2]
    context = engine.new()
    assert context.id >> 48 == 2
    assert engine.max_id == (2 << 48) + 281474976710655
    engine.release(context.id)
    with pytest.raises(
        ContextError, match=f"there is no autograd context {context.id} on this worker"
    ):
        engine.retrieve(context.id)
    with pytest.raises(ContextError, match="this thread is not inside an autograd context"):
        engine.current()


def test_leaving_a_context_frees_it_on_every_worker_transitively(cluster, context):
    t = torch.ones(2, requires_grad=True)
    cluster.call(0, 1, lambda x: cluster.call(1, 2, torch.sin, x), t)
    assert all(e.find(context.id) is not None for e in cluster.engines)
    cluster.engines[0].release(context.id)
    cluster.settle()
    assert all(e.find(context.id) is None for e in cluster.engines)


def test_a_late_message_does_not_bring_a_released_context_back(cluster, context):
    engine, there = cluster.engines[:2]
    message = engine.record_send(context.id, 1, [torch.ones(2, requires_grad=True)])
    engine.release(context.id)
    cluster.settle()
    (tensor,) = there.record_receive(context.id, message, 0, [torch.ones(2)])
    assert tensor.requires_grad  # as it did where it came from
    assert tensor.grad_fn is None
    with there.enter(context.id):
        assert there.current_context() == NO_CONTEXT
    cluster.settle()
    assert there.find(context.id) is None


class Overtaken:
    """A lock that another thread takes first, once, and does something under."""

    def __init__(self, lock, meanwhile):
        self._lock, self._meanwhile = lock, meanwhile

    def __enter__(self):
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)


def test_two_calls_may_bring_a_context_at_once(cluster, context):
    """One enters it, and has seen that there is none, when the other has recorded something."""
    there = cluster.engines[1]
    there._lifetimes_lock = Overtaken(
        there._lifetimes_lock, lambda: there.record_receive(context.id, 7, 0, [torch.ones(2)])
    )
    with there.enter(context.id):
        assert there.current_context() == context.id
    assert there.find(context.id)._recv_functions().keys() == {7}


def test_a_lost_release_is_sent_again(cluster, context):
    cluster.call(0, 1, torch.sin, torch.ones(2, requires_grad=True))
    cluster.dropped = lambda source, to, kind: True
    cluster.engines[0].release(context.id)
    cluster.engines[0].send_gathered()
    cluster.settle()
    cluster.dropped = lambda source, to, kind: False
    assert cluster.engines[1].find(context.id) is not None
    engine = cluster.engines[0]
    engine._retry()
    effects = engine._lifetimes.retry()
    engine._carry_out(effects)
    engine.send_gathered()
    cluster.settle()
    assert cluster.engines[1].find(context.id) is None
    cluster.engines[1].send_gathered()
    cluster.settle()
    assert not engine._lifetimes.has_unacknowledged


def test_acknowledgements_are_gathered_into_one_message(cluster):
    engine = cluster.engines[0]
    for _ in range(20):
        context = engine.new()
        cluster.call(0, 1, torch.sin, torch.ones(2, requires_grad=True))
        engine.release(context.id)
    cluster.settle()
    cluster.engines[1].send_gathered()
    cluster.settle()
    assert 1 <= cluster.sent[Kind.CONTEXT_RELEASE] <= 20
    assert cluster.sent[Kind.CONTEXT_RELEASED] == 1
    assert not engine._lifetimes.has_unacknowledged


def test_closing_an_engine_ends_what_it_has(cluster, context):
    engine = cluster.engines[0]
    cluster.call(0, 1, torch.sin, torch.ones(2, requires_grad=True))
    engine.close()
    engine.close()
    assert engine.debug_info() == {"num_current_backward_passes": 0, "num_autograd_contexts": 0}
    assert engine.current_context() == NO_CONTEXT


def test_the_creators_death_frees_its_contexts(cluster, context):
    t = torch.ones(2, requires_grad=True)
    cluster.call(0, 1, lambda x: cluster.call(1, 2, torch.sin, x), t)
    cluster.kill(0)
    cluster.settle()
    assert cluster.engines[1].find(context.id) is None
    assert cluster.engines[2].find(context.id) is None
    cluster.dead.clear()


def test_nobody_who_is_gone_is_told_again(cluster, context):
    engine = cluster.engines[0]
    cluster.call(0, 1, torch.sin, torch.ones(2, requires_grad=True))
    cluster.dead.add(1)  # and nobody has noticed
    engine.release(context.id)
    cluster.settle()
    assert not engine._lifetimes.has_unacknowledged


def test_a_context_whose_maker_is_found_to_be_gone_is_freed(cluster, context):
    t = torch.ones(2, requires_grad=True)
    cluster.call(0, 1, lambda x: cluster.call(1, 2, torch.sin, x), t)
    cluster.dead.add(0)  # and nobody has noticed
    cluster.kill(1)  # through which it knew worker 2
    cluster.settle()
    assert cluster.engines[2].find(context.id) is None
    cluster.dead.clear()


def test_a_context_frees_its_graph_and_gradients_when_left(cluster):
    engine = cluster.engines[0]
    context = engine.new()
    t = torch.ones(2, requires_grad=True)
    loss = cluster.call(0, 1, torch.sin, t).sum()
    engine.backward(context.id, [loss], retain_graph=True)
    watched = [weakref.ref(t), weakref.ref(context), weakref.ref(loss)]
    engine.release(context.id)
    cluster.settle()
    del t, context, loss
    gc.collect()
    assert [ref() for ref in watched] == [None, None, None]


def test_without_any_agent_contexts_are_local(monkeypatch):
    import telegrad.autograd as dist_autograd

    monkeypatch.setattr(dist_autograd, "_without_agent", None)
    with pytest.raises(NotInitialized):
        dist_autograd._new_context()
    dist_autograd._init(5)
    t = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [(t * 3).sum()])
        assert torch.equal(dist_autograd.get_gradients(context_id)[t], torch.full((2,), 3.0))
        assert dist_autograd._current_context()._context_id() == context_id
        assert dist_autograd._is_valid_context(context_id)
        assert dist_autograd._get_debug_info()["num_autograd_contexts"] == 1
    assert dist_autograd._get_max_id() >> 48 == 5
    assert t.grad is None
