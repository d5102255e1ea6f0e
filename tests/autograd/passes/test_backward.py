"""Passes: values, hooks, copies, errors, losses, double backward."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from autograd_cluster import Cluster

from telegrad.autograd.local import waves
from telegrad.errors import BackwardError, ContextError, WorkerLost
from telegrad.wire.frames import Kind


@pytest.fixture
def cluster():
    with Cluster(4, threads=2) as cluster:
        yield cluster


@pytest.fixture
def engine(cluster):
    return cluster.engines[0]


@pytest.fixture
def context(cluster, engine):
    context = engine.new()
    yield context
    if engine.find(context.id) is not None:
        engine.release(context.id)
    cluster.settle()
    for number, e in enumerate(cluster.engines):
        if number not in cluster.dead:
            assert e.debug_info()["num_current_backward_passes"] == 0


class Faulty(torch.autograd.Function):
    is_faulty = True

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        if Faulty.is_faulty:
            raise ValueError("Simulate error on backward pass")
        return g


@pytest.fixture
def fault():
    Faulty.is_faulty = True
    yield
    Faulty.is_faulty = True


def test_the_usual_pass_needs_only_its_gradient_messages(cluster, engine, context):
    a, b = (torch.rand(3, 3, requires_grad=True) for _ in range(2))
    engine.backward(context.id, [cluster.call(0, 1, torch.mul, a, b).sum()])
    cluster.settle()
    assert dict(cluster.sent) == {Kind.GRADIENTS: 2}
    assert torch.equal(engine.get_gradients(context.id)[a], b)


def test_a_worker_that_sends_nothing_on_answers_once(cluster, engine, context):
    w = torch.rand(3, requires_grad=True)
    engine.backward(context.id, [cluster.call(0, 1, lambda: w * 2).sum()])
    cluster.settle()
    assert dict(cluster.sent) == {Kind.GRADIENTS: 1, Kind.PASS_ANSWER: 1}


def test_an_unused_remote_result_is_resolved_where_upstream_hangs(cluster, engine, context):
    x = torch.rand(3, requires_grad=True)
    hidden = torch.sin(x)
    used = cluster.call(0, 1, torch.mul, hidden, hidden)
    cluster.call(0, 1, torch.add, hidden, hidden)
    engine.backward(context.id, [used.sum()])
    want = torch.autograd.grad((torch.sin(x) ** 2).sum(), x)[0]
    assert torch.allclose(engine.get_gradients(context.id)[x], want)
    assert cluster.sent[Kind.PASS_GATHER] > 0 or cluster.sent[Kind.GRADIENTS] == 2


def test_a_deep_chain_is_linear_in_messages(cluster, engine, context):
    x = y = torch.ones(2, requires_grad=True)
    for _ in range(60):
        y = cluster.call(0, 1, torch.neg, y)
    engine.backward(context.id, [y.sum()])
    cluster.settle()
    assert dict(cluster.sent) == {Kind.GRADIENTS: 120}
    assert torch.equal(engine.get_gradients(context.id)[x], torch.ones(2))


def test_roots_are_checked(engine, context):
    loss = torch.rand(1, requires_grad=True) * 2
    for arguments, text in [
        ((context.id, None), "roots must be a list of tensors, got a NoneType"),
        ((context.id, loss), r"got a Tensor: write backward\(context_id, \[loss\]\)"),
        ((context.id, [torch.futures.Future()]), r"roots\[0\] is a future: call \.wait\(\) on it"),
        ((context.id, [loss, 2.0]), r"roots\[1\] must be a tensor, got a float"),
        ((None, [loss]), "context_id must be the integer .* got None"),
        (("c", [loss]), "context_id must be the integer .* got 'c'"),
    ]:
        with pytest.raises(TypeError, match=text):
            engine.backward(*arguments)
    with pytest.raises(TypeError, match=r"context_id must be the integer .* got 'c'"):
        engine.get_gradients("c")
    for roots, text in [
        ([], "roots is empty"),
        ([torch.rand(3, 3)], r"root 0 \(the loss\) does not depend on anything that requires grad"),
        ([torch.rand(3, 3, requires_grad=True)], r"must be a scalar, and has the shape \(3, 3\)"),
        ([torch.rand(1, requires_grad=True)], "root 0 .* is a leaf: nothing leads from it"),
        ([torch.rand(1, requires_grad=True) * 1j], "must be real"),
        ([torch.rand(0, requires_grad=True) * 2], r"must be a scalar, and has the shape \(0,\)"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            engine.backward(context.id, roots)
    t = torch.rand(1, requires_grad=True)
    with pytest.raises(ContextError, match="there is no autograd context 100 on this worker"):
        engine.backward(100, [t * 2])


def test_the_graph_is_freed_unless_retained(cluster, engine, context):
    x = torch.rand(3, requires_grad=True)
    loss = cluster.call(0, 1, torch.sin, x).sum()
    engine.backward(context.id, [loss], retain_graph=True)
    engine.backward(context.id, [loss])
    assert torch.allclose(engine.get_gradients(context.id)[x], 2 * torch.cos(x))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        engine.backward(context.id, [loss])


def test_the_graph_is_freed_also_where_waves_met_a_boundary(cluster, engine, context):
    x = torch.rand(3, requires_grad=True)
    hidden = torch.exp(x)
    loss = (cluster.call(0, 1, torch.sin, hidden) * torch.tanh(hidden)).sum()
    engine.backward(context.id, [loss])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        engine.backward(context.id, [loss])


def test_a_later_pass_does_not_wait_for_what_an_earlier_one_has_freed(cluster, engine, context):
    x = torch.rand(3, requires_grad=True)
    hidden = x + 1  # it keeps nothing that could be freed
    losses = [cluster.call(0, 1, torch.neg, hidden).sum() for _ in range(2)]
    engine.backward(context.id, [losses[0]])
    cluster.settle()
    cluster.sent.clear()
    engine.backward(context.id, [losses[1]])
    assert set(cluster.sent) <= {Kind.GRADIENTS, Kind.PASS_END}
    assert engine.get_gradients(context.id)[x].tolist() == [-2, -2, -2]


def test_what_an_earlier_pass_has_freed_may_come_again(cluster, engine, context):
    """Nothing here keeps what could be freed: torch lets it run as often as one likes."""
    x = torch.rand(3, requires_grad=True)
    results = [cluster.call(0, 1, torch.neg, x + 1) for _ in range(4)]
    engine.backward(context.id, [results[0].sum()])
    engine.backward(context.id, [sum(results).sum()])
    assert engine.get_gradients(context.id)[x].tolist() == [-5, -5, -5]


def test_a_pass_leaves_nothing_of_a_freed_graph(cluster, engine, context):
    x = torch.rand(3, requires_grad=True)
    hidden = torch.exp(x)
    kept = weakref.ref(hidden)
    loss = cluster.call(0, 1, torch.sin, hidden).sum()
    engine.backward(context.id, [loss])
    del hidden, loss
    gc.collect()
    assert kept() is None


def test_hooks_of_every_kind_run_once_on_the_total(cluster, engine, context):
    t = torch.rand(4, requires_grad=True)
    seen = []
    t.register_hook(lambda g: seen.append("tensor") or g * 2)
    t.register_post_accumulate_grad_hook(lambda p: seen.append(("after", p.grad.clone())))
    hidden = t * 1
    node = hidden.grad_fn.next_functions[0][0]
    node.register_prehook(lambda gs: seen.append("pre"))
    node.register_hook(lambda out, into: seen.append("post"))
    hidden.register_hook(lambda g: seen.append("middle"))
    t.grad = before = torch.ones(4)
    loss = (cluster.call(0, 1, torch.sin, hidden) * hidden).sum()
    engine.backward(context.id, [loss])
    after = next(entry for entry in seen if isinstance(entry, tuple))
    assert [e for e in seen if not isinstance(e, tuple)] == ["middle", "tensor", "pre", "post"]
    plain = t.detach().clone().requires_grad_()
    want = 2 * torch.autograd.grad((torch.sin(plain) * plain).sum(), plain)[0]
    assert torch.allclose(after[1], want)
    assert torch.allclose(engine.get_gradients(context.id)[t], want)
    assert t.grad is before
    assert torch.equal(before, torch.ones(4))


def sent_on(cluster, watch):
    """A remote result that goes, untouched, into another call: its recv node is all that this
    worker's part of the pass consists of."""
    t = torch.tensor([1.0, 2.0], requires_grad=True)
    middle = cluster.call(0, 1, torch.mul, t, 3.0)
    seen = watch(middle)
    return t, cluster.call(0, 2, torch.square, middle).sum(), seen


def hooked(middle):
    seen = []
    middle.register_hook(lambda g: seen.append(g) or g * 10)
    return seen


def node_hooked(middle):
    seen = []
    middle.grad_fn.register_prehook(lambda gs: seen.append(gs[0]) or (gs[0] * 10, *gs[1:]))
    return seen


def node_post_hooked(middle):
    seen = []
    middle.grad_fn.register_hook(lambda _, gs: seen.append(gs[0]))
    return seen


@pytest.mark.parametrize(
    ("watch", "factor"), [(hooked, 10.0), (node_hooked, 10.0), (node_post_hooked, 1.0)]
)
def test_hooks_of_a_result_that_is_only_sent_on_run(cluster, engine, context, watch, factor):
    t, loss, seen = sent_on(cluster, watch)
    engine.backward(context.id, [loss])
    assert [g.tolist() for g in seen] == [[6.0, 12.0]]
    assert engine.get_gradients(context.id)[t].tolist() == [18.0 * factor, 36.0 * factor]


def test_a_result_that_is_only_sent_on_can_retain_its_gradient(cluster, engine, context):
    _, loss, middle = sent_on(cluster, lambda middle: middle.retain_grad() or middle)
    engine.backward(context.id, [loss])
    assert middle.grad.tolist() == [6.0, 12.0]


def test_a_result_that_is_only_sent_on_needs_no_engine(cluster, engine, context, monkeypatch):
    t, loss, _ = sent_on(cluster, lambda middle: None)
    local_runs = []
    run = waves._run_engine
    monkeypatch.setattr(waves, "_run_engine", lambda *a, **k: local_runs.append(1) or run(*a, **k))
    engine.backward(context.id, [loss])
    assert engine.get_gradients(context.id)[t].tolist() == [18.0, 36.0]
    assert len(local_runs) == 3  # sum here, square on worker 2, mul on worker 1


def test_post_hooks_on_the_leafs_node_run(engine, context):
    calls = []
    t = torch.rand(10, 10, requires_grad=True)
    a = t + t
    a.grad_fn.next_functions[0][0].register_hook(lambda o, i: calls.append(1))
    a.grad_fn.next_functions[1][0].register_hook(lambda o, i: calls.append(2))
    engine.backward(context.id, [a.sum()])
    assert calls == [1, 2]
    assert set(engine.get_gradients(context.id)) == {t}


def test_gradients_are_not_copied_without_need(engine, context):
    pointers = {}

    class One(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, g):
            pointers["one"] = g.data_ptr()
            return g

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, g):
            pointers["two"] = g.data_ptr()
            return g, g

    a, b, c = (torch.randn(5, 6, requires_grad=True) for _ in range(3))
    engine.backward(context.id, [One.apply(a)[1][0]])
    engine.backward(context.id, [Two.apply(b, c)[1][0]])
    got = engine.get_gradients(context.id)
    assert got[a].data_ptr() == pointers["one"]
    assert len({got[b].data_ptr(), got[c].data_ptr(), pointers["two"]}) == 3


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("is_hooked", [False, True])
def test_each_leaf_has_a_gradient_of_its_own(
    cluster, engine, context, create_graph, is_called, is_hooked
):
    """One that is changed in place, clipped say, changes no other."""
    a, b, c = (torch.rand(3, requires_grad=True) for _ in range(3))
    if is_hooked:
        a.register_hook(lambda gradient: None)
    both = cluster.call(0, 1, torch.add, a, b) if is_called else a + b
    engine.backward(context.id, [(both + c).sum()], create_graph=create_graph)
    got = engine.get_gradients(context.id)
    for gradient in got.values():
        gradient.detach().mul_(2)
    for leaf in (a, b, c):
        assert torch.equal(got[leaf], torch.full((3,), 2.0))


def test_a_sparse_gradient_of_two_leaves_is_copied(engine, context):
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, gradient):
            sparse = gradient.to_sparse()
            return sparse, sparse

    a, b = (torch.rand(3, requires_grad=True) for _ in range(2))
    engine.backward(context.id, [Two.apply(a, b).sum()])
    got = engine.get_gradients(context.id)
    got[a]._values().zero_()
    assert got[b].to_dense().tolist() == [1, 1, 1]


def test_a_gradient_that_the_graph_needs_is_not_the_contexts(engine, context):
    a, b, weight = (torch.rand(3, requires_grad=True) for _ in range(3))
    engine.backward(context.id, [((a + torch.exp(b)) * weight).sum()], create_graph=True)
    first = engine.get_gradients(context.id)
    first[a].detach().zero_()
    engine.backward(context.id, [first[b].sum()])
    assert torch.allclose(engine.get_gradients(context.id)[b], torch.exp(b) * weight * 2)


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_gradient_is_laid_out_like_its_leaf(cluster, engine, context, is_hooked):
    leaves = [torch.rand(4, 3, requires_grad=True) for _ in range(2)]
    if is_hooked:
        for leaf in leaves:
            leaf.register_hook(lambda gradient: None)

    def transposed(worker):
        return torch.exp(leaves[worker].t().contiguous())

    there = cluster.call(0, 1, lambda: transposed(1))
    engine.backward(context.id, [(there * transposed(0)).sum()])
    for worker, leaf in enumerate(leaves):
        gradient = cluster.engines[worker].get_gradients(context.id)[leaf]
        assert gradient.stride() == leaf.stride()


def test_a_gradient_off_the_wire_becomes_the_contexts_without_a_copy(cluster, engine, context):
    t = torch.randn(5, 6, requires_grad=True)
    arrived = []
    arrive = cluster.messengers[0]
    handler = arrive.handlers[Kind.GRADIENTS]
    arrive.handlers[Kind.GRADIENTS] = lambda source, body: (
        arrived.append(body.tensors[0].data_ptr()),
        handler(source, body),
    )
    cluster.tosses_tails = lambda: True  # so that it comes by a message of its own
    engine.backward(context.id, [cluster.call(0, 1, torch.sin, t).sum()])
    assert engine.get_gradients(context.id)[t].data_ptr() == arrived[0]


def test_sparse_gradients_stay_sparse_and_add_up(cluster, engine, context):
    table = torch.rand(10, 3, requires_grad=True)
    index = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9])

    def lookup():
        return F.embedding_bag(index, table, torch.tensor([0, 4]), sparse=True)

    loss = cluster.call(0, 1, lookup).sum()
    for _ in range(2):
        engine.backward(context.id, [loss], retain_graph=True)
    got = cluster.engines[1].get_gradients(context.id)[table]
    assert got.is_sparse
    want = torch.autograd.grad(lookup().sum(), table)[0].to_dense()
    assert torch.allclose(got.to_dense(), 2 * want)
    engine.backward(context.id, [cluster.call(0, 1, lambda: table * 2).sum()])
    got = cluster.engines[1].get_gradients(context.id)[table]
    assert torch.allclose(got, 2 * want + 2)


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_an_error_anywhere_reaches_the_caller_and_ends_the_pass_everywhere(
    cluster, engine, context, fault, worker
):
    x = torch.rand(3, requires_grad=True)

    def on(n, y):
        return Faulty.apply(y) if worker == n else y * 2

    def first(y):
        return cluster.call(1, 2, lambda z: on(2, z), on(1, y))

    hidden = on(0, x)
    loss = (cluster.call(0, 1, first, hidden) + hidden).sum()
    for _ in range(3):
        text = f"Error on Node {worker}: Simulate error on backward pass"
        with pytest.raises(BackwardError, match=text) as caught:
            engine.backward(context.id, [loss], retain_graph=True)
        assert caught.value.worker == worker
        assert "ValueError" in caught.value.traceback
    cluster.settle()
    for e in cluster.engines:
        assert e.debug_info()["num_current_backward_passes"] == 0
    Faulty.is_faulty = False
    engine.backward(context.id, [loss], retain_graph=True)
    assert x in engine.get_gradients(context.id)


def test_an_error_in_the_callers_first_wave_is_raised_as_it_is(engine, context, fault):
    with pytest.raises(ValueError, match="Simulate error"):
        engine.backward(context.id, [Faulty.apply(torch.rand(2, requires_grad=True)).sum()])


def test_an_error_in_a_gradient_that_has_to_wait_is_raised(cluster, engine, context):
    x, y = (torch.rand(3, requires_grad=True) for _ in range(2))
    hidden = torch.exp(x)
    result = cluster.call(0, 1, torch.sin, hidden)
    loss = (result + torch.special.gammainc(hidden, y)).sum()
    with pytest.raises(RuntimeError, match="derivative for 'igamma: input' is not implemented"):
        engine.backward(context.id, [loss])


@pytest.mark.parametrize(
    "combine",
    [
        lambda w: w * torch.full((3,), 2.0, dtype=torch.double),
        lambda w: w + torch.ones(4, 3),
        lambda w: (w * 1j).abs(),
    ],
    ids=["type", "shape", "complex"],
)
def test_what_comes_to_a_leaf_past_a_wave_fits_it(cluster, engine, context, combine):
    """The leaf is also behind what has to wait: the engine is not asked for its gradient."""
    w = torch.rand(3, requires_grad=True)

    def program(call):
        hidden = torch.exp(w)
        return (call(hidden) * torch.tanh(hidden)).sum() + combine(w).sum()

    want = torch.autograd.grad(program(torch.sin), w)[0]
    engine.backward(context.id, [program(lambda hidden: cluster.call(0, 1, torch.sin, hidden))])
    got = engine.get_gradients(context.id)[w]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("worker", [0, 1])
def test_what_came_in_another_context_is_refused(cluster, engine, context, worker):
    x = torch.rand(2, requires_grad=True)
    kept = []

    def keep(y):
        kept.append(y * 2)
        return kept[0]

    y = cluster.call(0, 1, keep, x)
    engine.release(context.id)
    other = engine.new()
    root = y.sum() if worker == 0 else cluster.call(0, 1, lambda: kept[0] * 3).sum()
    cluster.call(0, 1, torch.sin, x)  # the other worker knows the new context as well
    text = f"the pass of context {other.id} came to a tensor that was received in another context"
    with pytest.raises(BackwardError, match=text):
        engine.backward(other.id, [root])
    engine.release(other.id)
    cluster.settle()
    assert [e.debug_info()["num_current_backward_passes"] for e in cluster.engines] == [0] * 4


def test_a_worker_lost_before_backward_fails_it_at_once(cluster, engine, context):
    x = torch.rand(3, requires_grad=True)
    loss = cluster.call(0, 1, torch.sin, x).sum()
    cluster.kill(1)
    with pytest.raises(WorkerLost, match="Error on Node 1"):
        engine.backward(context.id, [loss])


class Meet(torch.autograd.Function):
    """Lets the test act while a wave runs."""

    action = None

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        Meet.action()
        return g


@pytest.mark.parametrize("lost", [1, 2])
def test_a_worker_lost_during_backward_fails_it_wherever_it_was(cluster, engine, context, lost):
    x = torch.rand(3, requires_grad=True)

    def middle(y):
        return cluster.call(1, 2, lambda z: Meet.apply(z), y)

    loss = cluster.call(0, 1, middle, x).sum()
    Meet.action = lambda: cluster.kill(lost)
    with pytest.raises(WorkerLost, match=f"Error on Node {lost}"):
        engine.backward(context.id, [loss])


def test_releasing_the_context_during_backward_ends_it(cluster, engine, context):
    x = torch.rand(3, requires_grad=True)
    loss = cluster.call(0, 1, lambda y: Meet.apply(y), x).sum()
    Meet.action = lambda: engine.release(context.id)
    with pytest.raises(ContextError, match="was released, or its worker shut down"):
        engine.backward(context.id, [loss])


def test_closing_the_engine_during_backward_ends_it(cluster, engine, context):
    loss = cluster.call(0, 1, lambda y: Meet.apply(y), torch.rand(3, requires_grad=True)).sum()
    Meet.action = engine.close
    with pytest.raises(ContextError, match="its worker shut down, during the backward pass"):
        engine.backward(context.id, [loss])


def test_gradients_of_a_message_that_was_never_sent_end_the_pass(cluster, engine, context):
    loss = cluster.call(0, 1, lambda y: Meet.apply(y), torch.rand(3, requires_grad=True)).sum()
    ((message_id, sent),) = cluster.engines[1].find(context.id).sends.items()
    cluster.engines[1].find(context.id).sends = {message_id + 1: sent}
    with pytest.raises(BackwardError, match=f"no message {message_id} was sent from here"):
        engine.backward(context.id, [loss])


def test_each_worker_tells_of_a_failure_once(cluster, engine, context, fault):
    """Though they all know each other."""
    aborts = Kind.PASS_ABORT
    cluster.dropped = lambda source, to, kind: kind is aborts and cluster.sent[aborts] > 100

    def middle(x):
        cluster.call(1, 2, torch.sin, x)
        return Faulty.apply(x)

    x = torch.rand(3, requires_grad=True)
    cluster.call(0, 2, torch.sin, x)
    loss = cluster.call(0, 1, middle, x).sum()
    with pytest.raises(BackwardError, match="Simulate error"):
        engine.backward(context.id, [loss])
    cluster.settle()
    assert cluster.sent[aborts] <= 6  # three workers tell the two others at most


def test_each_worker_tells_of_a_loss_once(cluster, engine, context):
    aborts = Kind.PASS_ABORT
    cluster.dropped = lambda source, to, kind: kind is aborts and cluster.sent[aborts] > 100
    x = torch.rand(3, requires_grad=True)
    for source, to in ((0, 1), (0, 2), (0, 3)):
        cluster.call(source, to, torch.sin, x)
    cluster.call(0, 1, lambda x: cluster.call(1, 2, torch.sin, x), x)
    cluster.kill(3)
    cluster.settle()
    assert cluster.sent[aborts] <= 6  # worker 0 has noticed it, and three tell the two others


def test_a_context_that_is_released_elsewhere_ends_a_pass_that_comes_there(
    cluster, engine, context
):
    loss = cluster.call(0, 1, torch.sin, torch.rand(3, requires_grad=True)).sum()
    cluster.dropped = lambda source, to, kind: kind is Kind.CONTEXT_RELEASE
    cluster.engines[1].release(context.id)
    with pytest.raises(ContextError, match="was released on worker 1 during the backward"):
        engine.backward(context.id, [loss])


def test_a_pass_is_dropped_with_the_worker_that_began_it(cluster, engine, context):
    """In a context that another worker made, and which goes on."""

    def begin(x):
        loss = cluster.call(1, 2, lambda y: Meet.apply(y), x * 2).sum()
        Meet.action = lambda: cluster.kill(1)
        with pytest.raises(WorkerLost):
            cluster.engines[1].backward(context.id, [loss])
        return x

    cluster.call(0, 2, torch.sin, torch.rand(3, requires_grad=True))
    cluster.call(0, 1, begin, torch.rand(3, requires_grad=True))
    assert not cluster.engines[2].find(context.id).passes


def test_passes_of_one_context_may_overlap(cluster, engine, context):
    x = torch.rand(3, requires_grad=True)
    losses = [cluster.call(0, 1, torch.sin, x).sum() for _ in range(8)]
    threads = [
        threading.Thread(target=engine.backward, args=(context.id, [loss])) for loss in losses
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.allclose(engine.get_gradients(context.id)[x], 8 * torch.cos(x))


@pytest.mark.parametrize("hops", [1, 2])
def test_a_gradient_penalty_over_workers_equals_the_local_one(cluster, engine, context, hops):
    x = torch.rand(3, dtype=torch.double, requires_grad=True)
    w = torch.rand(3, dtype=torch.double, requires_grad=True)

    def model(y):
        return torch.sin(y * w) * y

    def remote(y):
        return model(y) if hops == 1 else cluster.call(1, 2, model, y)

    loss = cluster.call(0, 1, remote, x).sum()
    engine.backward(context.id, [loss], create_graph=True)
    gradient = engine.get_gradients(context.id)[x]
    penalty = (gradient**2).sum()
    there = cluster.engines[hops]
    before = there.get_gradients(context.id)[w].detach().clone()
    mine = gradient.detach().clone()
    engine.backward(context.id, [penalty])

    local = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    want_x, want_w = torch.autograd.grad((local**2).sum(), [x, w])
    assert torch.allclose(engine.get_gradients(context.id)[x] - mine, want_x)
    assert torch.allclose(there.get_gradients(context.id)[w] - before, want_w)


@pytest.mark.parametrize("hops", [1, 2])
def test_a_hessian_vector_product_over_workers_equals_the_local_one(cluster, engine, context, hops):
    x, v = (torch.rand(4, dtype=torch.double) for _ in range(2))
    x.requires_grad_()

    def model(y):
        return torch.exp(y).prod() * torch.sin(y)

    def remote(y):
        return model(y) if hops == 1 else cluster.call(1, 2, model, y)

    engine.backward(context.id, [cluster.call(0, 1, remote, x).sum()], create_graph=True)
    gradient = engine.get_gradients(context.id)[x]
    first = gradient.detach().clone()
    engine.backward(context.id, [(gradient * v).sum()])
    got = engine.get_gradients(context.id)[x] - first
    want = torch.autograd.functional.hvp(lambda y: model(y).sum(), x.detach(), v)[1]
    assert torch.allclose(got, want)


def test_a_call_to_oneself_is_a_message_like_any_other(cluster, engine, context):
    x = torch.rand(3, requires_grad=True)
    engine.backward(context.id, [cluster.call(0, 0, torch.sin, x).sum()])
    assert torch.allclose(engine.get_gradients(context.id)[x], torch.cos(x))
    assert len(context._send_functions()) == 2


@pytest.mark.parametrize("is_conversation", [False, True])
def test_a_profiler_sees_the_pass(cluster, engine, context, is_conversation):
    cluster.tosses_tails = lambda: not is_conversation
    a, b = (torch.rand(3, 3, requires_grad=True) for _ in range(2))
    loss = cluster.call(0, 1, torch.add, a, b).sum()
    with torch.autograd.profiler.profile() as profile:
        engine.backward(context.id, [loss])
    names = [event.name for event in profile.function_events]
    for name in ("SendRpcBackward", "RecvRpcBackward", "torch::distributed::autograd::backward"):
        assert any(name in event for event in names), name
