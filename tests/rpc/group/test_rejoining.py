"""References when workers leave and come back under their rank, or are silent and go on. Real
processes."""

from __future__ import annotations

import time

import pytest
import torch

from lined_processes import PATIENCE
from telegrad import rpc
from telegrad.errors import WorkerLost
from telegrad.ids import MAX_LIVES
from telegrad.rpc.group import current
from telegrad.rpc.group.directory import Directory
from telegrad.testing.cluster import cluster

kept = {}


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def own(value):
    return rpc.RRef(value)


def value(number):
    return number


def keep(rref):
    kept["rref"] = rref


def use_kept():
    return kept["rref"].to_here()


def make_for_worker2(number):
    """Makes a value on worker0 and gives worker2 a reference to it."""
    rref = rpc.remote("worker0", value, args=(number,))
    rpc.rpc_sync("worker2", keep, args=(rref,))
    return rref.to_here()


def make_and_keep(number):
    kept["rref"] = rpc.remote("worker0", value, args=(number,))
    return kept["rref"].to_here()


def use(rref):
    return rref.to_here()


def pass_on(rref):
    return rpc.rpc_sync(rref.owner(), use, args=(rref,))


def replace(group, name, rank, way):
    if way == "leave":
        group.end(name)
    else:
        group.kill(name)
    group.start(name, rank)
    group.wait_until_ready(name)


@pytest.mark.parametrize("way", ["leave", "kill"])
def test_ids_of_one_that_comes_back_are_not_those_of_before(way):
    with cluster(2, open_group=True, graceful=False) as group:
        old = [rpc.rpc_sync("worker1", own, args=(n,)) for n in range(3)]
        replace(group, "worker1", 1, way)
        new = [rpc.rpc_sync("worker1", own, args=(n,)) for n in (10, 11, 12)]
        assert not {rref.rref_id for rref in old} & {rref.rref_id for rref in new}
        assert [rref.to_here() for rref in new] == [10, 11, 12]
        for rref in old:
            with pytest.raises(WorkerLost):
                rref.to_here()


@pytest.mark.parametrize("way", ["leave", "kill"])
def test_a_value_that_a_former_worker_has_made_is_not_taken_for_a_new_one(way):
    with cluster(3, open_group=True, graceful=False) as group:
        assert rpc.rpc_sync("worker1", make_for_worker2, args=(1,)) == 1
        replace(group, "worker1", 1, way)
        assert rpc.rpc_sync("worker1", make_and_keep, args=(100,)) == 100
        assert rpc.rpc_sync("worker2", use_kept) == 1


def test_every_life_of_a_rank_has_ids_of_its_own():
    store = torch.distributed.HashStore()
    lives = []
    for _ in range(3):
        directory = Directory(store, 1, 0)
        directory.declare()
        lives.append(directory.life)
    assert lives == [0, 1, 2]
    store.add("turns/1", MAX_LIVES)
    with pytest.raises(Exception, match="no more ids"):
        Directory(store, 1, 0).declare()


def is_lost(worker):
    return current.current().agent.network.members.is_lost(worker)


def keeps_values(name):
    """Whether a worker has noticed all that happened while it was silent."""
    try:
        return rpc.remote(name, value, args=(True,)).to_here()
    except WorkerLost:
        return False


def test_new_references_to_one_that_was_silent_work_everywhere():
    """The third worker has counted it as lost, and has not been in touch with it since."""
    options = {"heartbeat_interval": 0.1, "heartbeat_timeout": 0.5}
    with cluster(3, open_group=True, graceful=False, **options) as group:
        old = rpc.remote("worker2", value, args=(1,))
        assert rpc.rpc_sync("worker1", pass_on, args=(old,)) == 1
        rpc.rpc_sync("worker1", keep, args=(old,))
        group.pause("worker2")
        try:
            until(lambda: is_lost(2) and rpc.rpc_sync("worker1", is_lost, args=(2,)))
        finally:
            group.resume("worker2")
        until(lambda: keeps_values("worker2"))
        for function in (use, pass_on):
            made = rpc.remote("worker2", value, args=(3,))
            assert made.to_here() == 3
            assert rpc.rpc_sync("worker1", function, args=(made,)) == 3
        with pytest.raises(WorkerLost, match="owner worker2 was lost"):
            rpc.rpc_sync("worker1", use_kept)
        with pytest.raises(WorkerLost, match="owner worker2 was lost"):
            old.to_here()
