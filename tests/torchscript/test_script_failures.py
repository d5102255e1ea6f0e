"""A worker dies while a script function waits for it: the function fails, at once, and says so."""

from __future__ import annotations

import threading
import time

import pytest
import script_functions as script
import torch

from telegrad import rpc
from telegrad.testing.cluster import cluster

X = torch.ones(2)
LONG = 60.0


def kill_when_busy(group, name):
    """Kills a worker once it runs the slow function."""
    while rpc.rpc_sync(name, busy_count) == 0:
        time.sleep(0.001)
    group.kill(name)


def busy_count():
    return len(script.sleeping)


@pytest.mark.parametrize(
    "call", [script.slow_async, script.slow_sync, script.slow_remote], ids=lambda f: f.name
)
def test_a_dead_worker_ends_the_wait_of_a_script(call):
    with cluster(2) as group:
        killer = threading.Thread(target=kill_when_busy, args=(group, "worker1"))
        killer.start()
        with pytest.raises(RuntimeError) as caught:
            call("worker1", X, LONG, 0.0)
        killer.join()
        text = str(caught.value)
        assert "worker 'worker1' was lost during" in text
        called = "RRef.to_here()" if call is script.slow_remote else "script_functions.slowly"
        assert called in text


def test_a_worker_that_is_gone_cannot_be_called():
    with cluster(2) as group:
        group.kill("worker1")
        with pytest.raises(RuntimeError) as caught:
            script.add_async("worker1", X, X)
        assert "worker 'worker1' cannot be reached" in str(caught.value)
        assert "return rpc_async(dst, add, (x, y))" in str(caught.value)


def test_a_future_that_waits_in_python_fails_too():
    with cluster(2) as group:
        group.pause("worker1")
        future = script.future_of("worker1", X)
        group.kill("worker1")
        with pytest.raises(RuntimeError, match="worker1"):
            future.wait()


def test_shutdown_ends_the_wait_of_a_script():
    failed = []

    def wait():
        try:
            script.slow_async("worker1", X, LONG, 0.0)
        except RuntimeError as error:
            failed.append(error)

    with cluster(2, graceful=False) as group:
        waiting = threading.Thread(target=wait)
        waiting.start()
        while rpc.rpc_sync("worker1", busy_count) == 0:
            time.sleep(0.001)
        rpc.shutdown(graceful=False)
        waiting.join(20)
        assert not waiting.is_alive()
        group.kill("worker1")
    assert len(failed) == 1
