"""Profiled calls of a worker that dies."""

from __future__ import annotations

import time

import pytest

from telegrad.compat.rpc import profiling
from telegrad.compat.rpc.internal import RPCExecMode
from telegrad.compat.rpc.profiling import profile
from telegrad.errors import WorkerLost
from telegrad.testing.cluster import cluster


def test_its_death_ends_every_wait():
    with cluster(2, graceful=False) as group, profile() as made:
        future = profiling.call(RPCExecMode.ASYNC, "worker1", time.sleep, (60,), None, 60.0)
        rref = profiling.remote("worker1", time.sleep, (60,), None, 60.0)
        group.kill("worker1")
        with pytest.raises(WorkerLost, match="worker1"):
            future.wait()
        rref._get_profiling_future().wait()
    assert any("rpc_async#sleep" in event.name for event in made.function_events)
