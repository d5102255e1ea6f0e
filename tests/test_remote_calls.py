"""`telegrad.call`, `submit` and `object`: functions and objects on other workers."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
import torch
from torch import nn

import telegrad
from telegrad import rpc
from telegrad.autograd.plain import engine_here, sent_calls
from telegrad.errors import RpcTimeout, TelegradError
from telegrad.rpc.calls import async_call
from telegrad.rpc.group import current
from telegrad.testing.cluster import cluster

PATIENCE = 10.0


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(3) as running:
        yield running


def where():
    return rpc.get_worker_info().name


def double(x, *, plus=0):
    return 2 * x + plus


def fail(text):
    raise KeyError(text)


may_go = threading.Event()


def wait_for_permission(x):
    assert may_go.wait(PATIENCE)
    return x


def permit():
    may_go.set()


def forbid():
    may_go.clear()


async def slowly(x):
    await asyncio.sleep(0)
    return x * 3


async def in_grad_mode():
    modes = [torch.is_grad_enabled()]
    for _ in range(3):
        await asyncio.sleep(0)
        modes.append(torch.is_grad_enabled())
    return modes


def test_a_call_runs_there_and_returns_here():
    assert telegrad.call("worker1", where) == "worker1"
    assert telegrad.call("worker2", double, 3, plus=1) == 7
    assert telegrad.call(2, where) == "worker2"
    assert telegrad.call(rpc.get_worker_info("worker1"), where) == "worker1"
    assert telegrad.call("worker0", where) == "worker0"


def test_an_exception_is_raised_here():
    with pytest.raises(KeyError, match="lost"):
        telegrad.call("worker1", fail, "lost")
    with pytest.raises(KeyError, match="lost"):
        telegrad.submit("worker1", fail, "lost").result()


def test_a_worker_that_does_not_exist_is_named():
    with pytest.raises(TelegradError, match=r"'worker7'.*worker0, worker1, worker2"):
        telegrad.call("worker7", where)


def test_a_future_tells_when_it_is_done():
    telegrad.call("worker1", forbid)
    future = telegrad.submit("worker1", wait_for_permission, 5)
    called = threading.Event()
    future.add_done_callback(lambda f: called.set() if f is future else None)
    assert not future.done()
    assert "running" in repr(future)
    with pytest.raises(RpcTimeout, match=r"worker1.*within 0\.01 seconds"):
        future.result(timeout=0.01)
    assert not called.is_set()
    telegrad.call("worker1", permit)
    assert future.result(timeout=PATIENCE) == 5
    assert called.wait(PATIENCE)
    assert future.done()
    assert future.exception() is None
    assert isinstance(telegrad.submit("worker1", fail, "x").exception(), KeyError)


def test_a_future_can_be_awaited():
    async def main():
        first, second = (telegrad.submit(w, double, 4) for w in ("worker1", "worker2"))
        return await asyncio.gather(first, second)

    assert asyncio.run(main()) == [8, 8]


def test_a_future_stands_for_its_result_as_an_argument():
    x = torch.ones(3, requires_grad=True)
    future = telegrad.submit("worker1", double, x)
    sent = {"deep": [telegrad.submit("worker2", double, future)]}
    result = telegrad.call("worker1", sum_of, sent, y=future)
    result.backward()
    assert result.item() == 3 * (4 + 2)
    assert x.grad.tolist() == [6.0] * 3


def sum_of(tree, y):
    return tree["deep"][0].sum() + y.sum()


def test_a_value_goes_from_worker_to_worker_and_not_through_the_driver():
    # worker2 asks worker1 for it, while this worker sees a future only.
    telegrad.call("worker1", forbid)
    first = telegrad.submit("worker1", wait_for_permission, torch.ones(4))
    second = telegrad.submit("worker2", where_from, first)
    assert not second.done()
    telegrad.call("worker1", permit)
    assert second.result() == ("worker2", 4.0)


def where_from(x):
    return where(), x.sum().item()


def test_a_failed_future_fails_who_uses_it():
    failed = telegrad.submit("worker1", fail, "gone")
    with pytest.raises(KeyError, match="gone"):
        telegrad.call("worker2", double, failed)


def return_future():
    return telegrad.submit("worker2", double, 1)


def test_a_future_cannot_be_returned_or_pickled():
    with pytest.raises(TelegradError, match=r"return future\.result\(\) instead"):
        telegrad.call("worker1", return_future)
    with pytest.raises(TelegradError, match="only be sent as an argument"):
        rpc.rpc_sync("worker1", double, (telegrad.submit("worker1", double, 1),))


def test_coroutine_functions_run_on_the_event_loop_there():
    x = torch.ones(3, requires_grad=True)
    telegrad.call("worker1", slowly, x).sum().backward()
    assert x.grad.tolist() == [3.0] * 3
    with torch.no_grad():
        modes = telegrad.submit("worker1", in_grad_mode)
    assert telegrad.call("worker1", in_grad_mode) == [True] * 4
    assert modes.result() == [False] * 4


def modes_there():
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


def test_grad_mode_and_autocast_travel():
    assert telegrad.call("worker1", modes_there)[:2] == (True, False)
    with torch.no_grad():
        assert telegrad.call("worker1", modes_there)[:2] == (False, False)
    with torch.autocast("cpu", torch.bfloat16):
        assert telegrad.call("worker1", modes_there) == (True, True, torch.bfloat16)
        product = telegrad.call("worker1", torch.mm, torch.ones(2, 2), torch.ones(2, 2))
    assert product.dtype is torch.bfloat16
    assert telegrad.call("worker1", modes_there)[:2] == (True, False)


class Counter:
    def __init__(self, start):
        if start < 0:
            raise ValueError("below zero")
        self.count = start
        self.weight = nn.Parameter(torch.full((3,), 2.0))

    def add(self, n=1):
        self.count += n
        return self.count

    def scale(self, x):
        return x * self.weight

    def gradient(self):
        return self.weight.grad

    async def later(self):
        return self.count

    def __call__(self):
        return where()


def use(counter):
    return type(counter).__name__, counter.add()


def test_methods_of_an_object_run_where_it_is():
    counter = telegrad.object("worker1", Counter, 5)
    assert counter.add() == 6
    assert counter.add(n=4) == 10
    assert counter.add.submit(2).result() == 12
    assert counter.later() == 12
    assert counter() == "worker1"
    assert repr(counter) == "<Counter on worker 'worker1'>"
    assert "scale" in dir(counter)
    assert telegrad.call("worker1", getattr, counter, "count") == 12


def test_gradients_go_through_methods():
    counter = telegrad.object("worker1", Counter, 0)
    x = torch.ones(3, requires_grad=True)
    counter.scale(counter.scale(x)).sum().backward()
    assert x.grad.tolist() == [4.0] * 3
    assert counter.gradient().tolist() == [4.0] * 3


def test_an_object_is_itself_at_home_and_a_stand_in_elsewhere():
    counter = telegrad.object("worker1", Counter, 0)
    assert telegrad.call("worker1", use, counter) == ("Counter", 1)
    assert telegrad.call("worker2", use, counter) == ("RemoteObject", 2)
    assert counter.add() == 3


def test_an_object_that_cannot_be_made_raises_at_once():
    with pytest.raises(ValueError, match="below zero"):
        telegrad.object("worker1", Counter, -1)


def test_what_an_object_does_not_have_is_said():
    counter = telegrad.object("worker1", Counter, 0)
    with pytest.raises(AttributeError, match=r"no public method 'count'.*getattr"):
        counter.count
    with pytest.raises(AttributeError, match=r"fields cannot be set.*setattr"):
        counter.count = 3
    telegrad.call("worker1", setattr, counter, "count", 3)
    assert counter.add() == 4


def test_transforms_of_torch_func_are_refused():
    with pytest.raises(TelegradError, match="do not go through calls on other workers"):
        torch.func.grad(lambda x: telegrad.call("worker1", double, x).sum())(torch.ones(3))
    with pytest.raises(TelegradError, match="do not go through calls on other workers"):
        torch.vmap(lambda x: telegrad.call("worker1", double, x))(torch.ones(2, 3))


def counts():
    gc.collect()
    engine_here().flush()
    return engine_here().counts()


def test_values_end_with_their_futures():
    futures = [telegrad.submit("worker1", torch.ones, 3) for _ in range(10)]
    assert [future.result().sum() for future in futures] == [3] * 10
    assert rpc.rpc_sync("worker1", counts)["values"] >= 10
    del futures
    end = time.monotonic() + PATIENCE
    while rpc.rpc_sync("worker1", counts)["values"] and time.monotonic() < end:
        counts()
    assert rpc.rpc_sync("worker1", counts)["values"] == 0


# --- Many at a time ------------------------------------------------------------------------------


def threads():
    return threading.active_count()


def test_a_pass_through_many_results_does_not_need_a_thread_for_each():
    x = torch.ones(2, requires_grad=True)
    futures = [telegrad.submit("worker1", double, x) for _ in range(300)]
    sum(future.result().sum() for future in futures).backward()
    assert x.grad.tolist() == [600, 600]
    assert telegrad.call("worker1", threads) < 100


def test_results_that_nobody_wants_do_not_stay():
    """Though the future has gone before its function runs."""
    for number in range(2000):
        telegrad.submit("worker1", double, number)
    end = time.monotonic() + PATIENCE
    left = 2000
    while left and time.monotonic() < end:
        gc.collect()
        are_over = current.current().agent.pending_calls() == 0  # before it looks: none comes later
        left = telegrad.call("worker1", counts)["values"] or not are_over
    assert left == 0


def test_a_program_that_outruns_a_worker_is_slowed_down(monkeypatch):
    monkeypatch.setattr(async_call, "_MOST_OPEN", 10)
    monkeypatch.setattr(async_call, "_NO_REPLY", PATIENCE)
    futures = []
    for number in range(200):
        futures.append(telegrad.submit("worker1", double, number))
        assert current.current().agent.pending_calls() <= 10
    assert [future.result() for future in futures] == [2 * number for number in range(200)]


# --- Ctrl-C --------------------------------------------------------------------------------------


class Doubling:
    def double(self, x):
        return 2 * x


def entries():
    return counts()["entries"]


def test_a_result_that_cannot_be_unpacked_leaves_nothing_where_it_was_made(monkeypatch):
    """Because of Ctrl-C, say."""
    x = torch.ones(2, requires_grad=True)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(sent_calls, "apply_post", press_ctrl_c)
        telegrad.call("worker1", double, x)
    end = time.monotonic() + PATIENCE
    while telegrad.call("worker1", entries) and time.monotonic() < end:
        counts()  # tells the worker
    assert telegrad.call("worker1", entries) == 0


def test_a_call_that_ctrl_c_ends_before_it_is_sent_keeps_no_reference(monkeypatch):
    """The object on the worker ends with its stand-in, and the group's end does not wait for it."""
    stand_in = telegrad.object("worker1", Doubling)
    before = rpc._rref_context_get_debug_info()["num_forks"]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(sent_calls, "Record", press_ctrl_c)
        stand_in.double(1)
    del stand_in
    end = time.monotonic() + PATIENCE
    while int(owned_there()) and time.monotonic() < end:
        gc.collect()
    assert before
    assert int(owned_there()) == 0


def press_ctrl_c(*args, **kwargs):
    raise KeyboardInterrupt


def owned_there():
    return rpc.rpc_sync("worker1", rpc._rref_context_get_debug_info)["num_owner_rrefs"]
