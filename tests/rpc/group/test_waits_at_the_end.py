"""A worker that shuts down ends all waits for it, also those of its own threads."""

from __future__ import annotations

import random
import sys
import threading
import time
from functools import partial

import pytest
import torch

import telegrad.autograd as dist_autograd
from telegrad import rpc
from telegrad.errors import NotInitialized, WorkerLost
from telegrad.rpc.calls.async_call import OwnCalls
from telegrad.testing.cluster import cluster

PATIENCE = 20.0
GIVEN_UP = "was given up: this worker has shut down"

gate = threading.Event()


@pytest.fixture(autouse=True)
def _gate():
    gate.clear()
    yield
    gate.set()


def one():
    return 1


def wait_for_gate():
    gate.wait(PATIENCE)


def soon():
    time.sleep(0.1)  # longer than it takes to chain a callback


def for_ever():
    time.sleep(1000)


running = threading.Semaphore(0)


def wait_for_worker1():
    running.release()
    rpc.rpc_async("worker1", for_ever, timeout=0).wait()


class Caught:
    """What a thread ends by."""

    def __init__(self, work):
        self.error = None
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            self._work()
        except Exception as error:
            self.error = error

    def result(self):
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it waits for ever"
        return self.error


def call_again_and_again():
    while True:
        rpc.rpc_sync("worker0", one, timeout=0)


@pytest.mark.parametrize("threads", [1, 4])
def test_calls_to_oneself_end_with_the_worker(threads):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(5):
            with cluster(1):
                callers = [Caught(call_again_and_again) for _ in range(threads)]
                time.sleep(0.01)  # they are in the middle of it
                rpc.shutdown(graceful=False)
                for caller in callers:
                    error = caller.result()
                    assert isinstance(error, WorkerLost | NotInitialized), repr(error)
    finally:
        sys.setswitchinterval(interval)


def test_a_call_to_oneself_that_no_thread_has_begun_ends_with_the_worker():
    with cluster(1, num_worker_threads=1):
        running = rpc.rpc_async("worker0", wait_for_gate, timeout=0)
        queued = rpc.rpc_async("worker0", one, timeout=0)
        waiting = [Caught(future.wait) for future in (running, queued)]
        threading.Timer(0.3, gate.set).start()
        rpc.shutdown(graceful=False)
        for wait in waiting:
            error = wait.result()
            assert isinstance(error, WorkerLost)
            assert error.worker == "worker0"
            assert GIVEN_UP in str(error)


def test_a_graceful_end_waits_for_calls_to_oneself_that_no_thread_has_begun():
    with cluster(1, num_worker_threads=1):
        for _ in range(200):
            future = rpc.rpc_async("worker0", one)
        rpc.shutdown()
        assert future.done()
        assert future.wait() == 1


def test_a_call_after_the_end_of_the_worker_fails_at_once():
    calls = OwnCalls()
    open_call, late_call = object(), object()
    assert calls.add(1, open_call)
    assert len(calls) == 1
    assert calls.close() == [open_call]
    assert calls.take(1) is None
    assert not calls.add(2, late_call)
    assert calls.take(2) is None
    assert len(calls) == 0


def test_a_callback_that_waits_for_a_call_ends_with_the_worker():
    """It keeps the thread that would read the end of the connection, and would read the reply; the
    clock, which gives that another thread, has not noticed yet."""
    with cluster(2, graceful=False) as group:
        group.expect_death("worker1")
        began = threading.Event()

        def call_another(done):
            done.wait()
            another = rpc.rpc_async("worker1", for_ever, timeout=0)
            began.set()
            return another.wait()

        chained = rpc.rpc_async("worker1", soon).then(call_another)
        wait = Caught(chained.wait)
        assert began.wait(PATIENCE)
        rpc.shutdown(graceful=False)
        assert "WorkerLost: worker 'worker1' was lost during the call of" in str(wait.result())
        group.kill("worker1")


def test_what_fails_at_the_end_is_told_though_all_threads_wait_for_that():
    with cluster(2, graceful=False, num_worker_threads=2) as group:
        group.expect_death("worker1")
        asked = [rpc.rpc_async("worker0", wait_for_worker1, timeout=0) for _ in range(2)]
        waits = [Caught(future.wait) for future in asked]
        for _ in asked:
            assert running.acquire(timeout=PATIENCE)
        begun = time.monotonic()
        rpc.shutdown(graceful=False)
        assert time.monotonic() - begun < 4.0  # of the five seconds that threads which run get
        for wait in waits:
            assert isinstance(wait.result(), WorkerLost)
        group.kill("worker1")


weight = torch.ones(3, requires_grad=True)


class Box:
    def look(self):
        return 1


def scale(x):
    return x * weight


def ask(to):
    return rpc.rpc_sync(to, one, timeout=0)


def fetch(rref):
    return rref.to_here(timeout=0)


@rpc.functions.async_execution
def ask_later(to):
    return rpc.rpc_async(to, one, timeout=0).then(lambda done: done.wait())


def burst(to):
    torch.futures.wait_all([rpc.rpc_async(to, one, timeout=0) for _ in range(5)])


def chain(to):
    again = rpc.rpc_async(to, one, timeout=0)
    again.then(lambda _: rpc.rpc_async(to, one, timeout=0).wait()).wait()


def call_methods(to):
    box = rpc.remote(to, Box, timeout=0)
    box.rpc_sync(timeout=0).look()
    box.rpc_async(timeout=0).look().wait()
    box.remote(timeout=0).look().to_here(timeout=0)


def pass_on(to):
    rpc.rpc_sync("worker0", fetch, (rpc.remote(to, one, timeout=0),), timeout=0)


def differentiate(to):
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync(to, scale, (weight,), timeout=0).sum()
        dist_autograd.backward(context_id, [loss])


KINDS = [
    lambda to: rpc.rpc_sync(to, one, timeout=0),
    lambda to: rpc.rpc_sync(to, ask, ("worker0",), timeout=0),
    lambda to: rpc.rpc_sync(to, ask_later, ("worker0",), timeout=0),
    lambda to: rpc.remote(to, one, timeout=0).to_here(timeout=0),
    lambda to: rpc.api._all_gather(1, timeout=0),
    burst,
    chain,
    call_methods,
    pass_on,
    differentiate,
]


@pytest.mark.parametrize("seed", range(12))
def test_threads_in_the_middle_of_all_kinds_of_calls_end_with_the_worker(seed):
    chance = random.Random(seed)

    def repeat(kind, to):
        while True:
            kind(to)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with cluster(2, graceful=False):
            threads = [
                Caught(partial(repeat, chance.choice(KINDS), f"worker{i % 2}")) for i in range(8)
            ]
            time.sleep(chance.random() * 0.1)
            rpc.shutdown(graceful=False)
            for thread in threads:
                assert isinstance(thread.result(), RuntimeError), repr(thread.result())
    finally:
        sys.setswitchinterval(interval)
