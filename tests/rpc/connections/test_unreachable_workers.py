"""Workers that are stopped, or gone: what was sent to them, and how long a call to them takes."""

from __future__ import annotations

import gc
import logging
import time

import pytest
import torch

from telegrad import rpc
from telegrad.errors import RpcTimeout, TelegradError, WorkerLost
from telegrad.rpc.api import _rref_context_get_debug_info
from telegrad.rpc.group import current
from telegrad.rpc.references import fetch
from telegrad.testing.cluster import cluster


def open_references():
    gc.collect()
    info = _rref_context_get_debug_info()
    return int(info["num_owner_rrefs"]) + int(info["num_forks"])


def owned():
    return rpc.RRef(torch.zeros(10))


def user():
    return rpc.remote("worker2", torch.zeros, args=(10,))


def by_sync(rref):
    rpc.rpc_sync("worker1", type, args=(rref,))


def by_async(rref):
    rpc.rpc_async("worker1", type, args=(rref,)).wait()


def by_remote(rref):
    rpc.remote("worker1", type, args=(rref,)).to_here()


def is_lost(call, make):
    try:
        call(make())
    except WorkerLost:
        return True


def wait_until_references_ended(*others):
    end = time.monotonic() + 10
    while any(counts := [open_references(), *(rpc.rpc_sync(o, open_references) for o in others)]):
        assert time.monotonic() < end, counts
        time.sleep(0.02)


def test_references_for_a_worker_that_is_gone_end():
    with cluster(3, graceful=False) as group:
        rpc.rpc_sync("worker1", torch.ones, args=(2,))
        group.kill("worker1")
        for make in (owned, user):
            for call in (by_sync, by_async, by_remote):
                assert is_lost(call, make)
        wait_until_references_ended("worker2")


def ask_in_vain(call):
    """How a call with a reference ends that has a tenth of a second."""
    rref = owned()
    try:
        if call == "sync":
            rpc.rpc_sync("worker1", type, args=(rref,), timeout=0.1)
        elif call == "async":
            rpc.rpc_async("worker1", type, args=(rref,), timeout=0.1).wait()
        else:
            rpc.remote("worker1", type, args=(rref,), timeout=0.1).to_here()
    except TelegradError as error:
        return error.with_traceback(None)  # its frames hold the reference


@pytest.mark.parametrize("call", ["sync", "async", "remote"])
def test_references_for_a_worker_to_which_no_connection_is_opened_in_time_end(call):
    patience = {"connect_timeout": 60.0, "heartbeat_timeout": 60.0}
    with cluster(3, graceful=False, **patience) as group:
        group.pause("worker1")
        error = rpc.rpc_sync("worker2", ask_in_vain, args=(call,))
        assert "within 0.1 s" in str(error)
        assert call == "remote" or not error.was_sent
        wait_until_references_ended("worker2")
        group.resume("worker1")


def test_a_call_that_has_left_says_so():
    with cluster(2, graceful=False, heartbeat_timeout=60.0) as group:
        rpc.rpc_sync("worker1", torch.ones, args=(2,))
        group.pause("worker1")
        assert ask_in_vain("sync").was_sent
        assert ask_in_vain("async").was_sent
        group.resume("worker1")
        wait_until_references_ended()  # by the replies, which come late


def keep(rref):
    keep.kept = rref


def do_not_tell():
    """This worker will end without a word about its references."""
    current.current().references.flush = lambda timeout: None


def test_a_shutdown_goes_on_though_a_reference_does_not_end(monkeypatch, caplog):
    """Whatever it is that keeps it: nothing changes any more."""
    monkeypatch.setattr(fetch, "_PATIENCE", 0.5)
    with cluster(2, graceful=False) as group:
        rref = owned()
        rpc.rpc_sync("worker1", keep, args=(rref,))
        rpc.rpc_sync("worker1", do_not_tell)
        group._lines["worker1"].send("finish")
        with caplog.at_level(logging.WARNING):
            rpc.shutdown()
    assert "references that did not end" in caplog.text
    assert "worker 1 still holds" in caplog.text


def test_a_timeout_holds_for_new_connections_too():
    with cluster(2, graceful=False, connect_timeout=60.0, heartbeat_timeout=60.0) as group:
        rpc.rpc_sync("worker1", torch.ones, args=(2,))
        group.pause("worker1")
        begun = time.monotonic()
        for _ in range(3):
            with pytest.raises(RpcTimeout, match="worker1"):
                rpc.rpc_sync("worker1", torch.ones, args=(2,), timeout=0.3)
            with pytest.raises(RpcTimeout, match="worker1"):
                rpc.rpc_async("worker1", torch.ones, args=(2,), timeout=0.3).wait()
        assert time.monotonic() - begun < 30
        group.resume("worker1")
        assert rpc.rpc_sync("worker1", torch.ones, args=(2,)).tolist() == [1, 1]


def test_a_loss_ends_the_opening_of_a_connection():
    with cluster(2, graceful=False, connect_timeout=60.0, heartbeat_timeout=3.0) as group:
        rpc.rpc_sync("worker1", torch.ones, args=(2,))
        group.pause("worker1")
        begun = time.monotonic()
        with pytest.raises(RpcTimeout):
            rpc.rpc_sync("worker1", torch.ones, args=(2,), timeout=0.1)  # keeps the only lane
        with pytest.raises(WorkerLost, match="no sign of life"):
            rpc.rpc_sync("worker1", torch.ones, args=(2,))
        assert time.monotonic() - begun < 30
        group.resume("worker1")


def test_short_timeouts_do_not_keep_a_connection_from_being_opened():
    with cluster(2):
        for _ in range(3):
            with pytest.raises(RpcTimeout, match="worker1"):
                rpc.rpc_sync("worker1", time.sleep, args=(0.2,), timeout=1e-6)
            with pytest.raises(RpcTimeout, match="worker1"):
                rpc.rpc_async("worker1", time.sleep, args=(0.2,), timeout=1e-6).wait()
        peer = current.current().agent.network.members.peer(1)
        assert [m for m in peer._multiplexes if not m.is_closed]
