"""Faults as data, and what telegrad does under them. Real processes where they matter."""

from __future__ import annotations

import gc
import pickle
import threading
import time

import pytest
import torch

from telegrad import rpc
from telegrad.errors import RpcTimeout, WorkerLost
from telegrad.rpc.connections import peer as peer_module
from telegrad.rpc.connections import receipts as receipts_module
from telegrad.rpc.group import current
from telegrad.testing.cluster import cluster
from telegrad.testing.faults import Faults
from telegrad.testing.transport_contract import TransportContract, joined
from telegrad.transport.base import TransportTimeout
from telegrad.transport.inproc import InprocTransport
from telegrad.transport.sockets import UnixTransport
from telegrad.wire.frames import Kind, Limits
from telegrad.wire.tensor_table.memory import BufferPool

PATIENCE = 15.0


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# -- the rules


def fates(faults, kind, count):
    return [fate and fate.action for fate in (faults.fate_of(kind) for _ in range(count))]


def test_a_rule_strikes_so_many_times_after_so_many():
    faults = Faults().drop(Kind.CALL, times=2, after=1)
    assert fates(faults, Kind.CALL, 5) == [None, "drop", "drop", None, None]
    assert fates(faults, Kind.REPLY, 2) == [None, None]
    assert faults.struck == {("drop", Kind.CALL): 2}


def test_the_first_rule_that_applies_decides():
    faults = Faults().drop(Kind.CALL, times=1).delay(Kind.CALL, seconds=1, times=1)
    faults = faults.duplicate(Kind.CALL)
    assert fates(faults, Kind.CALL, 4) == ["drop", "delay", "duplicate", "duplicate"]


def test_chances_come_from_the_seed():
    def run(seed):
        return fates(Faults(seed=seed).drop(Kind.CALL, chance=0.5), Kind.CALL, 100)

    assert run(1) == run(1) != run(2)
    assert 25 < run(1).count("drop") < 75


def test_faults_are_values():
    base = Faults(seed=3)
    faults = base.drop(Kind.CALL, times=1)
    assert base.rules == ()
    fates(faults, Kind.CALL, 1)
    copy = pickle.loads(pickle.dumps(faults))
    assert copy == faults
    assert copy.struck == {}  # each process counts for itself
    assert fates(copy, Kind.CALL, 2) == ["drop", None]


def test_a_rule_for_a_worker_strikes_no_other():
    faults = Faults().drop(Kind.CALL, on="worker1")
    assert fates(faults, Kind.CALL, 2) == [None, None]


@pytest.mark.parametrize("wrong", [{"chance": 2}, {"times": -1}, {"after": -1}])
def test_impossible_rules_are_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        Faults().drop(Kind.CALL, **wrong)


def test_counting_is_safe_between_threads():
    faults = Faults().drop(Kind.CALL, times=50)
    threads = [threading.Thread(target=fates, args=(faults, Kind.CALL, 50)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults.struck[("drop", Kind.CALL)] == 50


class TestWithoutRules(TransportContract):
    """A faulty transport without faults is a transport like any other."""

    def make_transport(self):
        return Faults()(UnixTransport(BufferPool(), Limits()))


@pytest.mark.parametrize("make", [InprocTransport, lambda: UnixTransport(BufferPool(), Limits())])
def test_messages_meet_their_fate(make):
    faults = (
        Faults()
        .drop(Kind.CALL, times=1)
        .duplicate(Kind.PING, times=1)
        .delay(Kind.REPLY, seconds=0.05, times=1)
    )
    with joined(faults(make())) as (a, b):
        b.set_timeout(PATIENCE)
        a.send(Kind.CALL, call_id=1)
        a.send(Kind.CALL, call_id=2)
        assert b.receive().call_id == 2
        a.send(Kind.PING, call_id=3)
        assert [b.receive().call_id, b.receive().call_id] == [3, 3]
        memory = bytearray(b"before")
        a.send(Kind.REPLY, call_id=4, body=[b"x"], buffers=[memoryview(memory)])
        memory[:] = b"after!"
        a.send(Kind.CALL, call_id=5)
        assert b.receive().call_id == 5  # it was overtaken
        late = b.receive()
        assert (late.call_id, late.body, bytes(late.buffers[0])) == (4, b"x", b"before")
        b.set_timeout(0.01)
        with pytest.raises(TransportTimeout):
            b.receive()


# -- a group under faults


def add(a, b):
    return a + b


runs = []


def run_and_count():
    runs.append(1)
    return len(runs)


def count_runs():
    return len(runs)


held = []


def hold(rref):
    held.append(rref)


def release():
    held.clear()
    gc.collect()


def debug_info():
    return rpc._rref_context_get_debug_info()


def test_a_dropped_call_ends_in_its_timeout_and_the_next_one_works():
    faults = Faults().drop(Kind.CALL, times=1, on="worker0")
    with cluster(2, wrap_transport=faults):
        with pytest.raises(RpcTimeout):
            rpc.rpc_sync("worker1", add, (1, 1), timeout=0.1)
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        assert faults.struck[("drop", Kind.CALL)] == 1


def test_a_dropped_reply_ends_in_the_calls_timeout():
    faults = Faults().drop(Kind.REPLY, times=2, on="worker1")
    with cluster(2, wrap_transport=faults):
        with pytest.raises(RpcTimeout):
            rpc.rpc_sync("worker1", run_and_count, timeout=0.2)
        with pytest.raises(RpcTimeout):
            rpc.rpc_async("worker1", run_and_count, timeout=0.2).wait()
        assert rpc.rpc_sync("worker1", count_runs) == 2


def test_calls_and_replies_that_come_twice_are_not_taken_for_others():
    faults = Faults().duplicate(Kind.CALL).duplicate(Kind.REPLY)
    with cluster(2, wrap_transport=faults):
        assert [rpc.rpc_sync("worker1", add, (i, 1)) for i in range(50)] == list(range(1, 51))
        futures = [rpc.rpc_async("worker1", add, (i, 1)) for i in range(50)]
        assert torch.futures.wait_all(futures) == list(range(1, 51))


def test_a_delayed_call_takes_longer():
    faults = Faults().delay(Kind.CALL, seconds=0.1, on="worker0")
    with cluster(2, wrap_transport=faults):
        begun = time.monotonic()
        assert rpc.rpc_sync("worker1", add, (torch.ones(2), 1)).sum() == 4
        assert rpc.rpc_async("worker1", add, (1, 1)).wait() == 2
        assert time.monotonic() - begun >= 0.2


def test_a_worker_can_be_killed_at_a_point():
    faults = Faults().kill_at(Kind.REPLY, after=2, on="worker1")
    with cluster(2, wrap_transport=faults, graceful=False) as group:
        group._expected_dead.add("worker1")
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        with pytest.raises(WorkerLost, match="worker1"):
            rpc.rpc_sync("worker1", add, (1, 1))


RREF_KINDS = [
    Kind.RREF_FORK,
    Kind.RREF_FORK_ACCEPTED,
    Kind.RREF_CHILD_ACCEPTED,
    Kind.RREF_CHILD_ACKNOWLEDGED,
    Kind.RREF_DELETE,
    Kind.RREF_DELETED,
]


def every(act):
    faults = Faults(seed=7)
    for kind in RREF_KINDS:
        faults = act(faults, kind)
    return faults


@pytest.mark.parametrize(
    "faults",
    [
        every(lambda f, kind: f.drop(kind, times=1)),
        every(lambda f, kind: f.duplicate(kind)),
        every(lambda f, kind: f.delay(kind, seconds=0.05, chance=0.5)),
        every(
            lambda f, kind: (
                f.drop(kind, times=2, chance=0.3)
                .duplicate(kind, chance=0.3)
                .delay(kind, seconds=0.03, chance=0.3)
            )
        ),
    ],
    ids=["drop", "duplicate", "delay", "all"],
)
def test_the_life_of_references_stays_exact(faults):
    """Every value lives while somebody holds it and dies afterwards, whatever the network does."""
    with cluster(3, wrap_transport=faults):
        mine = [rpc.RRef(torch.full((2,), float(i))) for i in range(3)]
        theirs = [rpc.remote("worker1", add, (torch.ones(2), i)) for i in range(3)]
        for rref in mine + theirs:
            rpc.rpc_sync("worker2", hold, (rref,))
        assert [float(rref.to_here()[0]) for rref in theirs] == [1.0, 2.0, 3.0]
        # nothing that worker2 holds may die with our references
        del mine, theirs, rref
        gc.collect()
        kept = rpc.rpc_sync("worker2", fetch_held)
        assert kept == [0.0, 1.0, 2.0, 1.0, 2.0, 3.0]
        rpc.rpc_sync("worker2", release)
        for worker in ("worker0", "worker1", "worker2"):
            until(lambda worker=worker: rpc.rpc_sync(worker, debug_info)["num_owner_rrefs"] == "0")


def fetch_held():
    return [float(rref.to_here()[0]) for rref in held]


def test_lanes_whose_receipts_never_come_are_closed_after_a_while(monkeypatch):
    monkeypatch.setattr(receipts_module, "_SECONDS", 0.2)
    faults = Faults().drop(Kind.CONTEXT_RELEASE).drop(Kind.RREF_DELETED)
    with cluster(2, wrap_transport=faults, graceful=False):
        agent = current.current().agent
        peer = agent.network.members.peer(1)
        for _ in range(100):  # nobody ever hears of these
            agent.post(1, Kind.RREF_DELETED, None)
        assert faults.struck[("drop", Kind.RREF_DELETED)] == 100
        assert len(peer._receipts) <= peer_module._MOST_POSTED
        until(lambda: not len(peer._receipts))
        until(lambda: len(peer._connections) <= 2)
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
