"""What the callee has done, in the caller's profile. Torch's own suites ask for the names, too."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.autograd.profiler import record_function
from torch.futures import Future

from telegrad import autograd, rpc
from telegrad.compat.rpc import profiling
from telegrad.compat.rpc.internal import RPCExecMode
from telegrad.compat.rpc.profiling import _server_process_global_profile, profile
from telegrad.errors import RpcTimeout, TelegradError
from telegrad.testing.cluster import cluster

REMOTE = "#remote_op: "


@pytest.fixture(scope="module", autouse=True)
def workers():
    with cluster(3) as running:
        yield running


def call(to, func, *args, mode=RPCExecMode.ASYNC, timeout=30.0):
    return profiling.call(mode, to, func, args, None, timeout)


def key_of(func, from_, to, mode="async"):
    return f"rpc_{mode}#{func.__qualname__}({from_} -> {to})"


def products(x):
    with record_function("two products"):
        return x @ x @ x


@rpc.functions.async_execution
def handed_on(to, x):
    return call(to, products, x).then(lambda future: future.wait() + 1)


def names(made):
    return [event.name for event in made.function_events]


def test_what_the_callee_does_is_inside_of_the_call():
    with profile() as made, record_function("outside"):
        call("worker1", products, torch.ones(2, 2)).wait()
    key = key_of(products, "worker0", "worker1")
    by_name = {event.name: event for event in made.function_events}
    outside, whole, inside = by_name["outside"], by_name[key], by_name[f"{key}{REMOTE}two products"]
    assert (outside.node_id, whole.node_id, inside.node_id) == (0, 0, 1)
    assert (outside.is_remote, whole.is_remote, inside.is_remote) == (False, False, True)
    assert whole.time_range.start < inside.time_range.start
    assert inside.time_range.end < outside.time_range.end
    assert [child.name for child in inside.cpu_children] == [f"{key}{REMOTE}aten::matmul"] * 2
    assert inside.cpu_parent is None
    assert inside.name in {average.key for average in made.key_averages()}


def test_a_call_that_is_handed_on_has_the_names_of_the_whole_way():
    with profile() as made:
        result = call("worker1", handed_on, "worker2", torch.ones(2, 2)).wait()
    assert result.tolist() == [[5, 5], [5, 5]]
    first, second = (
        key_of(handed_on, "worker0", "worker1"),
        key_of(products, "worker1", "worker2"),
    )
    nodes = {event.name: event.node_id for event in made.function_events}
    assert nodes[first] == 0
    assert nodes[f"{first}{REMOTE}{second}"] == 1
    assert nodes[f"{first}{REMOTE}{second}{REMOTE}two products"] == 2


def test_each_profile_gets_its_own():
    found = {}

    def run(to):
        with profile() as made:
            call(to, products, torch.ones(2, 2)).wait()
        found[to] = {event.node_id for event in made.function_events}

    threads = [threading.Thread(target=run, args=(to,)) for to in ("worker1", "worker2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {"worker1": {0, 1}, "worker2": {0, 2}}
    with profile() as made:  # and nothing is left over
        torch.ones(2)
    assert {event.node_id for event in made.function_events} == {0}


def test_the_callee_profiles_as_the_caller_does():
    x = torch.ones(3, 3)
    for options in ({}, {"record_shapes": True, "profile_memory": True}):
        with profile(**options) as made:
            call("worker1", products, x).wait()
        product = next(e for e in made.function_events if e.is_remote and "aten::mm" in e.name)
        assert product.input_shapes == ([[3, 3], [3, 3]] if options else [])
        assert (product.cpu_memory_usage > 0) == bool(options)


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_gradients_are_those_of_the_call(to):
    x = torch.full((2, 2), 2.0, requires_grad=True)
    with autograd.context() as context_id, profile():
        y = call(to, handed_on, "worker2", x).wait()
        autograd.backward(context_id, [y.sum()])
        found = autograd.get_gradients(context_id)
    (right,) = torch.autograd.grad(products(x).sum(), [x])
    torch.testing.assert_close(found[x], right)


def refuse(x):
    raise KeyError(f"no {x}")


@rpc.functions.async_execution
def refuse_later(x):
    future = Future()
    future.set_exception(KeyError(f"no {x}"))
    return future


@pytest.mark.parametrize("func", [refuse, refuse_later])
def test_a_failure_stays_what_it_is(func):
    with profile() as made:
        with pytest.raises(KeyError, match="no thing") as plain:
            rpc.rpc_sync("worker1", func, args=("thing",))
        with pytest.raises(type(plain.value), match="no thing"):
            call("worker1", func, "thing").wait()
    assert key_of(func, "worker0", "worker1") in names(made)


@rpc.functions.async_execution
def leave():
    raise SystemExit(3)


def test_a_function_that_wants_to_leave_fails():
    with profile(), pytest.raises(TelegradError, match="the function ended by SystemExit: 3"):
        call("worker1", leave).wait()


def nap(seconds):
    time.sleep(seconds)


def test_an_error_names_the_function():
    with profile(), pytest.raises(RpcTimeout, match=r"test_profiling\.nap"):
        call("worker1", nap, 5.0, timeout=0.1).wait()


def test_the_making_of_a_remote_value():
    with profile() as made:
        rref = profiling.remote("worker1", products, (torch.ones(2, 2),), None, 30.0)
        rref._get_profiling_future().wait()
        assert rref.to_here().tolist() == [[4, 4], [4, 4]]
    key = key_of(products, "worker0", "worker1", "remote")
    assert f"{key}{REMOTE}two products" in names(made)
    assert rpc.rpc_sync("worker1", len_of_kept) == 0


def len_of_kept():
    return len(profiling._kept)


def test_the_making_of_a_remote_value_that_fails():
    with profile() as made:
        rref = profiling.remote("worker1", refuse, ("thing",), None, 30.0)
        rref._get_profiling_future().wait()
        with pytest.raises(KeyError, match="no thing"):
            rref.to_here()
    assert not any(event.is_remote for event in made.function_events)


def test_events_that_nobody_fetches_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(profiling, "_MOST_KEPT", 3)
    for number in range(5):
        profiling._Profiled(nap, {}, (7, number))(0)
    assert list(profiling._kept) == [(7, 2), (7, 3), (7, 4)]
    profiling._kept.clear()


def test_what_comes_after_the_end_is_left_out():
    with profile() as made:
        future = call("worker1", nap, 0.3)
    before = names(made)
    future.wait()
    assert names(made) == before


def begin_to_watch():
    outer, inner = _server_process_global_profile(), _server_process_global_profile()
    outer.__enter__()
    begin_to_watch.on = [outer, inner]


def watch_closer():
    begin_to_watch.on[1].__enter__()


def end_watching():
    outer, inner = begin_to_watch.on
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    return [
        [{event.name for event in events} for events in each.process_global_function_events]
        for each in (outer, inner)
    ]


def test_all_that_a_worker_does_for_others():
    x = torch.ones(2)
    rpc.rpc_sync("worker1", begin_to_watch)
    rpc.rpc_sync("worker1", torch.mul, args=(x, x))
    rpc.rpc_sync("worker1", watch_closer)
    rpc.rpc_sync("worker1", torch.sub, args=(x, x))
    outer, inner = rpc.rpc_sync("worker1", end_watching)
    assert [events for events in outer if events] == [{"aten::mul"}, {"aten::sub"}]
    assert [events for events in inner if events] == [{"aten::sub"}]
    rpc.rpc_sync("worker1", torch.mul, args=(x, x))
    assert rpc.rpc_sync("worker1", watched_calls) == len(outer)


def watched_calls():
    return len(begin_to_watch.on[0].process_global_function_events)
