"""Calls that fail, and whose futures go without that anybody has asked how they ended."""

from __future__ import annotations

import gc
import logging
import threading
import time

import pytest
import torch

from telegrad import rpc
from telegrad.compat import futures as compat_futures
from telegrad.testing.cluster import cluster

UNHEARD = "has failed, and its result was never read"


def fail(text):
    raise ValueError(text)


class Failing:
    def fail(self, text):
        raise ValueError(text)


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(3, graceful=False) as group:
        yield group


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.ERROR, "telegrad.rpc")

    def texts():
        gc.collect()
        return [record.getMessage() for record in caplog.records if UNHEARD in record.message]

    return texts


def wait_until_logged(logged):
    end = time.monotonic() + 20
    while not logged():
        assert time.monotonic() < end
        time.sleep(0.01)
    return logged()


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_the_log_tells_of_a_failure_that_nobody_hears(to, logged, caplog):
    rpc.rpc_async(to, fail, ("it burns",))
    (text,) = wait_until_logged(logged)
    assert text == f"the call of {__name__}.fail on worker '{to}' {UNHEARD}"
    assert "ValueError: it burns" in caplog.text
    assert "raise ValueError(text)" in caplog.text  # where it was raised


def test_and_of_that_of_a_method(logged):
    rpc.remote("worker1", Failing).rpc_async().fail("it burns")
    assert "method 'fail'" in wait_until_logged(logged)[0]


def test_and_of_that_of_a_callback(logged):
    rpc.rpc_async("worker1", torch.ones, (2,)).then(lambda done: fail("it burns"))
    assert wait_until_logged(logged) == [f"the callback of a call {UNHEARD}"]


def heard_in_a_callback(future):
    heard = []

    def callback(done):
        try:
            done.value()
        except ValueError as error:
            heard.append(error)

    future.add_done_callback(callback)
    while not heard:
        time.sleep(0.01)
    raise heard[0]


@pytest.mark.parametrize(
    "hear",
    [
        lambda future: future.wait(),
        lambda future: torch.futures.wait_all([future]),
        lambda future: torch.futures.collect_all([future]).wait()[0].wait(),
        lambda future: compat_futures.wait_all([future]),
        lambda future: future.then(lambda done: done.wait()).wait(),
        heard_in_a_callback,
    ],
    ids=["wait", "wait_all", "collect_all", "compat", "then", "callback"],
)
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_what_somebody_hears_of_is_not_logged(to, hear, logged):
    with pytest.raises((ValueError, RuntimeError), match="it burns"):
        hear(rpc.rpc_async(to, fail, ("it burns",)))
    assert logged() == []


def test_losses_and_timeouts_are_not_logged_for_each_call(group, logged):
    """There are as many of them as calls were open."""
    late = rpc.rpc_async("worker1", time.sleep, (0.5,), timeout=0.05)
    lost = rpc.rpc_async("worker2", time.sleep, (60.0,))
    ended = threading.Semaphore(0)
    for future in (late, lost):
        future.add_done_callback(lambda _: ended.release())
    group.kill("worker2")
    for _ in range(2):
        assert ended.acquire(timeout=20)
    del late, lost, future
    assert logged() == []
