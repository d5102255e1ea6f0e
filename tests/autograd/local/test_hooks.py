"""Hooks that change gradients, look at them, or run passes of their own."""

from __future__ import annotations

import threading

import pytest
import torch
from autograd_cluster import Cluster

from telegrad.errors import BackwardError


@pytest.fixture
def engine():
    with Cluster(1, threads=0) as cluster:
        yield cluster.engines[0]


@pytest.fixture
def context(engine):
    made = engine.new()
    yield made
    engine.release(made.id)


def leaf():
    return torch.ones(3, requires_grad=True)


def times(x, w):
    return x * w


# After a node whose gradients go two ways, one of which must wait: y needs the gradient of z


def strict(into, out):
    return tuple(3 * gradient for gradient in into)


def first_only(into, out):
    return (7 * into[0], *into[1:])


def by_what_entered(into, out):
    return tuple(gradient * out[0] for gradient in into)


def looking(into, out):
    assert all(gradient is not None for gradient in into)


CHANGES = [[strict], [first_only], [by_what_entered], [looking], [strict, first_only, looking]]


@pytest.mark.parametrize("hooks", CHANGES, ids=lambda hooks: "+".join(h.__name__ for h in hooks))
@pytest.mark.parametrize("seed", range(4))
def test_a_hook_after_a_node_sees_and_changes_all_its_gradients(hooks, seed):
    calls = []

    def counted(hook):
        def run(into, out):
            calls.append(hook)
            return hook(into, out)

        return run

    def program(x, a, double):
        y = x * a
        z = double(y)
        m = y * x
        for hook in hooks:
            m.grad_fn.register_hook(counted(hook))
        return m + z

    x, a = leaf(), torch.full((3,), 2.0, requires_grad=True)
    program(x, a, lambda y: y * 2).sum().backward()
    right, plain_calls = (x.grad, a.grad), calls.copy()
    calls.clear()
    x.grad = a.grad = None
    with Cluster(3, seed=seed) as cluster:
        here, middle, _ = cluster.engines
        context = here.new()

        def there(x):
            return program(x, a, lambda y: cluster.call(1, 2, lambda y: y * 2, y))

        here.backward(context.id, [cluster.call(0, 1, there, x).sum()])
        assert torch.equal(here.get_gradients(context.id)[x], right[0])
        assert torch.equal(middle.get_gradients(context.id)[a], right[1])
        here.release(context.id)
    assert calls == plain_calls == hooks


def test_hooks_after_a_node_are_as_before_afterwards():
    """Also one that removes itself, and one that another removes."""
    calls = []
    with Cluster(3) as cluster:
        here = cluster.engines[0]
        context = here.new()
        nodes = []

        def there(x):
            y = x * 2
            z = cluster.call(1, 2, lambda y: y * 2, y)
            m = y * z

            def once(into, out):
                calls.append("once")
                handles[0].remove()
                handles[1].remove()

            handles = [
                m.grad_fn.register_hook(once),
                m.grad_fn.register_hook(lambda into, out: calls.append("removed")),
                m.grad_fn.register_hook(lambda into, out: calls.append("every time")),
            ]
            nodes.append(m.grad_fn)
            return m

        loss = cluster.call(0, 1, there, leaf()).sum()
        here.backward(context.id, [loss], retain_graph=True)
        assert calls == ["once", "removed", "every time"]  # as plain torch has it
        here.backward(context.id, [loss], retain_graph=True)
        assert calls[3:] == ["every time"]
        here.release(context.id)
        probe = nodes[0].register_hook(lambda *_: None)
        assert [hook.__name__ for hook in probe.hooks_dict_ref().values()] == ["<lambda>"] * 2


def test_hooks_after_a_node_run_once_in_each_of_two_passes_that_overlap():
    """One pass begins after another, goes on when that has ended, and shares its graph."""
    calls, found, errors = [], {}, []
    goes_on = {name: threading.Event() for name in ("first", "second")}
    shared = torch.full((3,), 2.0, requires_grad=True)
    hidden = shared.exp()
    split = hidden * leaf()  # one way is the leaf's, and one has to wait
    split.grad_fn.register_hook(lambda into, out: calls.append(threading.current_thread().name))

    @split.register_hook
    def pause(gradient):
        here = threading.current_thread().name
        other = "second" if here == "first" else "first"
        if here == "second":
            goes_on[other].set()
        else:
            second.start()
        assert goes_on[here].wait(60)

    def run():
        here = cluster.engines[0]
        context = here.new()
        try:
            loss = (split + cluster.call(0, 1, torch.neg, hidden)).sum()
            here.backward(context.id, [loss], retain_graph=True)
            found[threading.current_thread().name] = here.get_gradients(context.id)[shared]
        except BaseException as error:
            errors.append(error)
        finally:
            here.release(context.id)
            goes_on["second"].set()

    with Cluster(2) as cluster:
        first, second = (threading.Thread(target=run, name=name) for name in ("first", "second"))
        first.start()
        first.join()
        second.join()
    assert not errors
    assert sorted(calls) == ["first", "second"]
    right = torch.autograd.grad((hidden * 1 - hidden).sum(), [shared], retain_graph=True)[0]
    for gradient in found.values():
        assert torch.equal(gradient, right)
    probe = split.grad_fn.register_hook(lambda *_: None)
    assert [hook.__name__ for hook in probe.hooks_dict_ref().values()] == ["<lambda>"] * 2


def test_a_hook_after_the_node_of_a_leaf_sees_its_gradient(engine, context):
    x, w = leaf(), leaf()
    w.grad = torch.full((3,), 100.0)
    seen = []
    node = torch.autograd.graph.get_gradient_edge(w).node
    node.register_hook(lambda into, out: seen.append((into, out)))
    engine.backward(context.id, [times(x * 5, w).sum()])
    ((into, (out,)),) = seen
    assert into == ()
    assert out.tolist() == [5, 5, 5]
    assert engine.get_gradients(context.id)[w].tolist() == [5, 5, 5]
    assert w.grad.tolist() == [100, 100, 100]


# Passes inside of passes


def test_a_pass_inside_of_a_pass_of_the_same_context_is_refused(engine, context):
    x, w = leaf(), leaf()
    y = x * 2
    inner = (w * 4).sum()
    y.register_hook(lambda gradient: engine.backward(context.id, [inner], retain_graph=True))
    with pytest.raises(BackwardError, match="inside a backward pass of the same context"):
        engine.backward(context.id, [y.sum()])
    engine.backward(context.id, [inner])  # and it goes on
    assert engine.get_gradients(context.id)[w].tolist() == [4, 4, 4]


def test_a_pass_inside_of_a_pass_of_another_context(engine, context):
    x, w = leaf(), leaf()
    y = x * 2
    inner = (w * 4).sum()
    others = []
    thread = threading.Thread(target=lambda: others.append(engine.new()))
    thread.start()
    thread.join()
    (other,) = others
    y.register_hook(lambda gradient: engine.backward(other.id, [inner]))
    engine.backward(context.id, [y.sum()])
    assert engine.get_gradients(other.id)[w].tolist() == [4, 4, 4]
    assert engine.get_gradients(context.id)[x].tolist() == [2, 2, 2]
    engine.release(other.id)


def test_a_pass_inside_of_a_pass_through_a_node_that_has_to_wait(engine, context):
    """What the inner pass brings to that node is none of the outer one's."""
    with Cluster(2) as cluster:
        here = cluster.engines[0]
        outer, others = here.new(), []
        thread = threading.Thread(target=lambda: others.append(here.new()))
        thread.start()
        thread.join()
        (other,) = others
        x = leaf()
        hidden = x * 2
        result = cluster.call(0, 1, torch.neg, hidden)
        waits = times(hidden, torch.full((3,), 3.0))
        inner = waits.sum()
        result.register_hook(lambda g: here.backward(other.id, [inner], retain_graph=True))
        here.backward(outer.id, [(result + waits).sum()], retain_graph=True)
        assert here.get_gradients(outer.id)[x].tolist() == [4, 4, 4]
        assert here.get_gradients(other.id)[x].tolist() == [6, 6, 6]
        here.release(outer.id)
        here.release(other.id)


def test_a_pass_that_needs_a_field_that_the_one_around_it_has_is_refused(engine, context):
    p, q = leaf(), leaf()
    others = []
    thread = threading.Thread(target=lambda: others.append(engine.new()))
    thread.start()
    thread.join()
    (other,) = others
    inner = (q * 3).sum()
    q.register_post_accumulate_grad_hook(lambda leaf: None)
    p.register_post_accumulate_grad_hook(
        lambda leaf: engine.backward(other.id, [inner], retain_graph=True)
    )
    with pytest.raises(BackwardError, match=r"run the other pass when the first is over"):
        engine.backward(context.id, [(p * q).sum()])
    engine.backward(other.id, [inner])
    assert engine.get_gradients(other.id)[q].tolist() == [3, 3, 3]
    engine.release(other.id)


def test_a_pass_in_inference_mode(engine):
    x, w = leaf(), torch.full((3,), 2.0, requires_grad=True)
    with Cluster(2) as cluster:
        here, there = cluster.engines
        context = here.new()
        loss = cluster.call(0, 1, lambda x: x * w, x).sum()
        with torch.inference_mode():
            here.backward(context.id, [loss])
        assert here.get_gradients(context.id)[x].tolist() == [2, 2, 2]
        assert there.get_gradients(context.id)[w].tolist() == [1, 1, 1]
        here.release(context.id)


def test_a_hook_on_several_tensors_sees_all_their_gradients_at_once():
    """Though those of one depend on another worker, and those of the other do not."""
    seen = []

    def program(x, b, call):
        a = x * 2
        torch.autograd.graph.register_multi_grad_hook(
            (a, b), lambda grads: seen.append([g if g is None else g.tolist() for g in grads])
        )
        return (call(a) * a + b).sum()

    program(leaf(), leaf(), lambda y: y * 3).backward()
    with Cluster(2) as cluster:
        here = cluster.engines[0]
        context = here.new()
        loss = program(leaf(), leaf(), lambda y: cluster.call(0, 1, lambda y: y * 3, y))
        here.backward(context.id, [loss])
        here.release(context.id)
    assert len(seen) == 2
    assert seen[0] == seen[1]


class Once:
    """Gives each saved tensor back once, as what frees host memory does."""

    def __init__(self):
        self._kept = {}

    def pack(self, tensor):
        self._kept[len(self._kept)] = tensor.clone()
        return len(self._kept) - 1

    def unpack(self, number):
        tensor, self._kept[number] = self._kept[number], None
        assert tensor is not None, "unpacked twice"
        return tensor


def test_saved_tensors_beside_a_call_are_unpacked_once():
    def program(x, a, call):
        h = x * 2
        once = Once()
        with torch.autograd.graph.saved_tensors_hooks(once.pack, once.unpack):
            beside = torch.sin(h * a)
        return (call(h) * beside).sum()

    x, a = leaf(), leaf()
    program(x, a, lambda y: y * 3).backward()
    right = x.grad, a.grad
    x.grad = a.grad = None
    with Cluster(2) as cluster:
        here = cluster.engines[0]
        context = here.new()
        loss = program(x, a, lambda y: cluster.call(0, 1, lambda y: y * 3, y))
        here.backward(context.id, [loss])
        gradients = here.get_gradients(context.id)
        assert torch.equal(gradients[x], right[0])
        assert torch.equal(gradients[a], right[1])
        here.release(context.id)


def test_where_saved_tensors_must_be_unpacked_twice_the_error_says_why():
    with Cluster(2) as cluster:
        here = cluster.engines[0]
        context = here.new()
        h = leaf() * 2
        h.register_hook(lambda gradient: None)
        once = Once()
        with torch.autograd.graph.saved_tensors_hooks(once.pack, once.unpack):
            loss = (cluster.call(0, 1, lambda y: y * 3, h) * h).sum()
        with pytest.raises(BackwardError, match="saved tensors are unpacked twice"):
            here.backward(context.id, [loss])
        here.release(context.id)


def test_a_hook_on_a_received_tensor_without_a_gradient_does_not_run():
    calls = []

    def there(a, b):
        b.register_hook(lambda gradient: calls.append(gradient))
        return a * 1

    with Cluster(2) as cluster:
        here = cluster.engines[0]
        context = here.new()
        x = leaf()
        here.backward(context.id, [cluster.call(0, 1, there, x * 1, leaf() * 1).sum()])
        assert here.get_gradients(context.id)[x] is not None
        here.release(context.id)
    assert not calls


def test_a_hook_on_several_tensors_counts_the_result_of_a_call():
    """Torch's engine does not count the root of a pass, and the callee's part begins at it."""
    seen = []

    def there(x):
        a = x * 2
        b = a * 3
        torch.autograd.graph.register_multi_grad_hook(
            (a, b), lambda grads: seen.append([g is not None for g in grads])
        )
        return b

    with Cluster(2) as cluster:
        here = cluster.engines[0]
        context = here.new()
        here.backward(context.id, [cluster.call(0, 1, there, leaf() * 1).sum()])
        here.release(context.id)
    assert seen == [[True, True]]
