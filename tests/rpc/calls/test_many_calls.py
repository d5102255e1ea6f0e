"""More calls than a worker can run at a time. Real processes."""

from __future__ import annotations

import os
import threading
import time

import pytest

import telegrad
from lined_processes import PATIENCE
from telegrad import rpc
from telegrad.rpc.calls import async_call
from telegrad.rpc.group import current
from telegrad.testing.cluster import cluster

BOUND = 64 + 40  # threads that block in calls, and all others of a worker

opened = threading.Event()


def threads():
    return len(os.listdir("/proc/self/task"))


def block():
    return opened.wait(PATIENCE)


def unblock():
    opened.set()


def value(number):
    return number


def there_and_back(depth, way):
    """Calls itself on the other worker, so many times."""
    if not depth:
        return 0
    other = "worker1" if rpc.get_worker_info().name == "worker0" else "worker0"
    if way == "async":
        return 1 + rpc.rpc_async(other, there_and_back, args=(depth - 1, way)).wait()
    if way == "remote":
        return 1 + rpc.remote(other, there_and_back, args=(depth - 1, way)).to_here()
    if way == "submit":
        return 1 + telegrad.submit(other, there_and_back, depth - 1, way).result()
    return 1 + rpc.rpc_sync(other, there_and_back, args=(depth - 1, way))


def asynchronous(function, *args):
    return rpc.rpc_async("worker1", function, args=args, timeout=0).wait


def submitted(function, *args):
    return telegrad.submit("worker1", function, *args).result


BEGIN = pytest.mark.parametrize("begin", [asynchronous, submitted])


@BEGIN
def test_calls_that_block_do_not_have_a_thread_each(begin):
    with cluster(2, graceful=False):
        results = [begin(block) for _ in range(1000)]
        most, end = 0, time.monotonic() + 5.0  # a pool without a limit grows in steps
        while time.monotonic() < end:
            most = max(most, rpc.rpc_sync("worker1", threads))
        assert most < BOUND
        rpc.rpc_sync("worker1", unblock)
        assert all(result() for result in results)


@BEGIN
def test_calls_that_wait_for_a_later_one_go_on(begin):
    with cluster(2, graceful=False, num_worker_threads=1):
        results = [begin(block) for _ in range(20)]
        begin(unblock)()
        assert all(result() for result in results)


@pytest.mark.parametrize("way", ["sync", "async", "remote", "submit"])
def test_nested_calls_of_any_depth_find_threads(way):
    with cluster(2, graceful=False, num_worker_threads=1):
        chains = [
            rpc.rpc_async("worker1", there_and_back, args=(depth, way)) for depth in (5, 12, 25)
        ]
        assert [chain.wait() for chain in chains] == [5, 12, 25]


def test_many_references_do_not_need_many_threads():
    with cluster(2, graceful=False):
        most = 0
        for _ in range(5):
            rrefs = [rpc.remote("worker1", value, args=(n,)) for n in range(500)]
            del rrefs
            most = max(most, rpc.rpc_sync("worker1", threads))
        assert most < 40


def test_a_program_that_outruns_a_worker_is_slowed_down(monkeypatch):
    monkeypatch.setattr(async_call, "_MOST_OPEN", 10)
    monkeypatch.setattr(async_call, "_NO_REPLY", PATIENCE)
    with cluster(2, graceful=False):
        calls = []
        for n in range(200):
            calls.append(rpc.rpc_async("worker1", value, args=(n,)))
            assert current.current().agent.pending_calls() <= 10
        assert [call.wait() for call in calls] == list(range(200))


def test_one_that_cannot_be_slowed_down_goes_on(monkeypatch):
    """What it would wait for waits for what it does next."""
    monkeypatch.setattr(async_call, "_MOST_OPEN", 5)
    monkeypatch.setattr(async_call, "_NO_REPLY", 0.01)
    with cluster(2, graceful=False):
        calls = [rpc.rpc_async("worker1", block, timeout=0) for _ in range(12)]
        rpc.rpc_sync("worker1", unblock)
        assert all(call.wait() for call in calls)
