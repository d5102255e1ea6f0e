"""The autograd context goes with a script function, wherever that runs; gradients inside of
scripts."""

from __future__ import annotations

import threading

import pytest
import script_functions as script
import torch

import telegrad.autograd as dist_autograd
from telegrad import rpc
from telegrad.testing.cluster import cluster


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(3) as running:
        yield running


@pytest.fixture(autouse=True)
def seen():
    script.threads_seen.clear()
    return script.threads_seen


def leaves(count=2):
    return [torch.full((2,), float(n + 1), requires_grad=True) for n in range(count)]


def is_context_in_torchs_state():
    return torch._C._is_key_in_tls("telegrad.autograd.context")


def test_gradients_have_the_leaves_themselves_as_keys():
    a, b = leaves()
    with dist_autograd.context() as context_id:
        loss = script.add_sync("worker1", a * 2, b).sum()
        gradients = script.backward_in_script(context_id, loss)
        assert gradients.keys() == {a, b}
        assert any(key is a for key in gradients)
        assert gradients[a].tolist() == [2, 2]
        assert gradients[b].tolist() == [1, 1]
    assert a.grad is None


def test_backward_takes_the_same_options():
    a, b = leaves()
    with dist_autograd.context() as context_id:
        loss = script.add_async("worker1", a, b).sum()
        script.keep_and_go_again(context_id, loss)
        assert dist_autograd.get_gradients(context_id)[a].tolist() == [2, 2]


def test_an_unknown_context_is_an_error():
    (a,) = leaves(1)
    with pytest.raises(RuntimeError, match="autograd context"):
        script.backward_in_script(12345, a.sum())


def test_the_context_follows_onto_another_thread(seen):
    a, b = leaves()
    with dist_autograd.context() as context_id:
        loss = script.switching("worker1", a, b)
        assert seen[0] == threading.get_native_id()
        assert seen[1] != seen[0], "the script went on where it was: the test shows nothing"
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)
    assert gradients[a].tolist() == [2, 2]
    assert gradients[b].tolist() == [1, 1]


def test_and_into_forks():
    (a,) = leaves(1)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [script.forked("worker1", a).sum()])
        assert dist_autograd.get_gradients(context_id)[a].tolist() == [4, 4]


def test_and_into_what_goes_on_after_the_call_has_returned(seen):
    """Meanwhile its caller leaves torch's state, and calls in another way."""
    (a,) = leaves(1)
    with dist_autograd.context() as context_id:
        future = script.chained_in_background("worker1", a)
        assert not is_context_in_torchs_state()
        assert script.add_sync("worker2", a, a).tolist() == [2, 2]
        dist_autograd.backward(context_id, [future.wait().sum()])
        assert len(set(seen)) == 2 or threading.get_native_id() not in seen
        assert dist_autograd.get_gradients(context_id)[a].tolist() == [2, 2]


def test_nothing_of_it_stays_in_torchs_state():
    a, b = leaves()
    with dist_autograd.context():
        script.switching("worker1", a, b)
        assert not is_context_in_torchs_state()
    assert not is_context_in_torchs_state()


def test_without_a_context_nothing_is_recorded():
    a, b = leaves()
    with dist_autograd.context():
        script.switching("worker1", a, b)
    outside = script.switching("worker1", a, b)
    assert torch.autograd.grad(outside, [a, b], allow_unused=True) == (None, None)


def test_threads_with_contexts_of_their_own_do_not_mix():
    results, failures = {}, []

    def work(number):
        try:
            a, b = leaves()
            for _ in range(5):
                with dist_autograd.context() as context_id:
                    loss = script.switching("worker1", a * number, b)
                    gradients = script.backward_in_script(context_id, loss)
                    results.setdefault(number, set()).add(gradients[a][0].item())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert results == {n: {2.0 * n} for n in range(1, 5)}


def test_a_called_script_function_records_too():
    """The pass goes from here through worker1's script function to worker2."""
    (a,) = leaves(1)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", script.add_async, ("worker2", a, a * 2)).sum()
        dist_autograd.backward(context_id, [loss])
        assert dist_autograd.get_gradients(context_id)[a].tolist() == [3, 3]


def owned():
    return torch.full((2,), 5.0, requires_grad=True)


def gradient_there(context_id, rref):
    return dist_autograd.get_gradients(context_id)[rref.local_value()]


def test_gradients_flow_through_references():
    (a,) = leaves(1)
    rref = rpc.remote("worker1", owned)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [script.through_reference(rref, a)])
        assert dist_autograd.get_gradients(context_id)[a].tolist() == [5, 5]
        assert rpc.rpc_sync("worker1", gradient_there, (context_id, rref)).tolist() == [1, 1]


def test_a_module_that_calls_is_trained_like_any_other():
    module = torch.jit.script(script.CallingModule("worker1"))
    x = torch.ones(2)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [module(x).sum()])
        assert dist_autograd.get_gradients(context_id)[module.weight].tolist() == [1, 1]
