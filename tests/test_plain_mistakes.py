"""Mistakes on the plain face: each gets an error that says what happened, to what, what to do."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import os
import pickle
import threading
import time

import pytest
import torch
from torch import nn

import telegrad
from telegrad.errors import SerializationError, TelegradError, WorkerLost
from telegrad.testing.cluster import cluster

PATIENCE = 20.0


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(3, graceful=False) as running:
        yield running


def double(x):
    return 2 * x


def fail(text):
    raise ValueError(text)


class Shelf:
    def __init__(self, items=()):
        self.items = list(items)

    def put(self, item):
        self.items.append(item)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, place):
        return self.items[place]

    def __setitem__(self, place, item):
        self.items[place] = item

    def __contains__(self, item):
        return item in self.items


MAKERS = {
    "call": lambda worker: telegrad.call(worker, double, 1),
    "submit": lambda worker: telegrad.submit(worker, double, 1),
    "object": lambda worker: telegrad.object(worker, Shelf),
    "module": lambda worker: telegrad.module(worker, nn.Linear, 1, 1),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("worker", [None, True, 1.0, ["worker1"], double, nn.Linear, object()])
def test_the_worker_comes_first(name, worker):
    with pytest.raises(TypeError, match=rf"telegrad\.{name}\(\) needs the worker first"):
        MAKERS[name](worker)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("worker", ["worker7", 7, -1])
def test_a_worker_that_does_not_exist_is_named(name, worker):
    with pytest.raises(TelegradError, match=rf"{worker!r}.*worker0, worker1, worker2"):
        MAKERS[name](worker)


def test_the_function_is_passed_and_not_its_result():
    with pytest.raises(TypeError, match=r"got a Tensor for the function.*f, x\) runs f\(x\) there"):
        telegrad.call("worker1", double(torch.ones(2)))
    with pytest.raises(TypeError, match="got 2 for the function"):
        telegrad.submit("worker1", double(1))
    with pytest.raises(TypeError, match="got a list for the function"):
        telegrad.object("worker1", [1, 2])


def test_a_class_is_passed_and_not_an_object():
    with pytest.raises(TypeError, match=r"got a Linear\. Pass the class and its arguments apart"):
        telegrad.module("worker1", nn.Linear(3, 3))
    with pytest.raises(TypeError, match="got the class dict"):
        telegrad.module("worker1", dict)
    with pytest.raises(TypeError, match=r"double returned a int"):
        telegrad.module("worker1", double, 3)
    with pytest.raises(TypeError, match=r"'weight' of a LazyLinear has no shape before"):
        telegrad.module("worker1", nn.LazyLinear, 3)
    with pytest.raises(TypeError, match="got one, a Linear: pass its class"):
        telegrad.object("worker1", nn.Linear(3, 3))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_what_cannot_be_sent_is_named_by_its_place(mode):
    lock = threading.Lock()
    shelf = telegrad.object("worker1", Shelf)
    layer = telegrad.module("worker1", nn.Linear, 3, 3)
    with mode():
        for attempt, path in (
            (lambda: telegrad.call("worker1", double, lock), r"args\[0\]"),
            (lambda: telegrad.call("worker1", max, 1, {"x": [lock]}), r"args\[1\]\['x'\]\[0\]"),
            (lambda: telegrad.submit("worker1", double, x=lock), r"kwargs\['x'\]"),
            (lambda: telegrad.object("worker1", Shelf, lock), r"args\[0\]"),
            (lambda: shelf.put(lock), r"args\[0\]"),
            (lambda: shelf.put.submit(lock), r"args\[0\]"),
            (lambda: telegrad.module("worker1", nn.Linear, 3, lock), r"args\[1\]"),
            (lambda: layer(lock), r"args\[0\]"),
            (lambda: layer(x=lock), r"kwargs\['x'\]"),
            (lambda: setattr(layer, "note", lock), "value"),
        ):
            with pytest.raises(SerializationError, match=rf"^{path} \(_thread\.lock\)"):
                attempt()


def test_a_failure_that_nobody_asks_for_is_logged(caplog):
    caplog.set_level(logging.ERROR, "telegrad.rpc")

    def texts():
        gc.collect()
        return [record.getMessage() for record in caplog.records]

    telegrad.submit("worker1", fail, "it burns")
    end = time.monotonic() + PATIENCE
    while not texts():
        assert time.monotonic() < end
        time.sleep(0.01)
    (text,) = texts()
    assert text.startswith(f"the call of {__name__}.fail on worker 'worker1' has failed")
    caplog.clear()

    for hear in (
        lambda: telegrad.submit("worker1", fail, "a").result(),
        lambda: asyncio.run(awaited(telegrad.submit("worker1", fail, "b"))),
        lambda: telegrad.call("worker2", double, telegrad.submit("worker1", fail, "c")),
    ):
        with pytest.raises(ValueError):
            hear()
    assert isinstance(telegrad.submit("worker1", fail, "d").exception(), ValueError)
    assert texts() == []


async def awaited(future):
    return await future


def test_a_future_that_is_taken_for_its_result_says_so():
    future = telegrad.submit("worker1", double, torch.ones(1))
    with pytest.raises(AttributeError, match=r"future\.result\(\)\.item"):
        future.item()
    assert future.result().item() == 2


async def calls_its_own_worker(blocks):
    if blocks:
        return telegrad.call("worker1", awaits_nothing)
    return await telegrad.submit("worker1", awaits_nothing)


async def waits_for_a_future():
    return telegrad.submit("worker1", awaits_nothing).result()


async def awaits_nothing():
    return "done"


def test_an_async_function_cannot_block_its_event_loop():
    with pytest.raises(TelegradError, match=r"block the event loop of worker 'worker1'.*await"):
        telegrad.call("worker1", calls_its_own_worker, True)
    with pytest.raises(TelegradError, match="block the event loop"):
        telegrad.call("worker1", waits_for_a_future)
    assert telegrad.call("worker1", calls_its_own_worker, False) == "done"


def test_a_stand_in_is_as_long_and_as_true_as_its_object():
    shelf = telegrad.object("worker1", Shelf)
    assert not shelf
    shelf.put("a")
    assert shelf
    assert len(shelf) == 1
    assert shelf[0] == "a"
    shelf[0] = "b"
    assert "b" in shelf
    assert "a" not in shelf
    assert telegrad.object("worker1", threading.Semaphore)  # has neither length nor truth


def test_what_a_stand_in_cannot_do_it_says():
    shelf = telegrad.object("worker1", Shelf)
    with pytest.raises(TypeError, match=r"iterated over.*telegrad\.call\('worker1', list, it\)"):
        list(shelf)
    with pytest.raises(TypeError, match="Shelf on worker 'worker1' is not callable"):
        shelf()
    plain = telegrad.object("worker1", threading.Semaphore)
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(plain)
    with pytest.raises(TypeError, match="not subscriptable"):
        plain[0]
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="stand-in, which cannot be pickled or copied"):
            attempt(shelf)


def test_what_is_made_on_a_worker_is_not_made_of_a_tensor_with_a_history():
    leaf = torch.ones(3, requires_grad=True)
    for make in (telegrad.object, telegrad.module):
        with pytest.raises(TelegradError, match=r"history.*MulBackward0.*pass tensor\.detach\(\)"):
            make("worker1", nn.ParameterList, [leaf * 2])
        make("worker1", nn.ParameterList, [(leaf * 2).detach(), leaf])


def test_join_is_called_once():
    with pytest.raises(TelegradError, match=r"this process is 'worker0' of a group already: join"):
        telegrad.join()
    with pytest.raises(TelegradError, match="this process is 'worker1' of a group already"):
        telegrad.call("worker1", telegrad.join)


def test_what_a_lost_worker_had_is_named(group):
    shelf = telegrad.object("worker2", Shelf)
    future = telegrad.submit("worker2", double, 1)
    layer = telegrad.module("worker2", nn.Linear, 3, 3)
    assert future.exception() is None
    group.expect_death("worker2")
    with pytest.raises(WorkerLost, match=r"during the call of \w+\._exit"):
        telegrad.call("worker2", os._exit, 3)
    with pytest.raises(
        WorkerLost, match=r"<Shelf on worker 'worker2'> is gone|Shelf\.put"
    ) as caught:
        shelf.put(1)
    assert caught.value.worker == "worker2"
    with pytest.raises(WorkerLost, match=r"worker2.*the fetch of a result was not sent"):
        future.result()
    with pytest.raises(WorkerLost, match="tensors on worker 'worker2'"):
        layer(torch.ones(1, 3))


def test_a_step_without_gradients_because_of_no_grad_warns():
    body, head = telegrad.module("worker1", nn.Linear, 2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    with torch.no_grad():
        y = body(torch.ones(1, 2))
    head(y).sum().backward()
    with pytest.warns(UserWarning, match="no parameter on worker 'worker1' has a gradient") as seen:
        optimizer.step()
    assert seen[0].filename == __file__
    optimizer.zero_grad()
    head(body(torch.ones(1, 2))).sum().backward()
    with torch.no_grad():
        body(torch.ones(1, 2))  # an evaluation before the step is no mistake
    optimizer.step()
