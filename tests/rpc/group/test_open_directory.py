"""The directory of an open group, when workers or its store end at the wrong moment."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from telegrad.errors import WorkerLost
from telegrad.rpc.connections.network import Network
from telegrad.rpc.group.directory import Directory, Record
from telegrad.rpc.group.options import RpcOptions
from telegrad.rpc.group.worker_info import WorkerInfo


def record(worker_id):
    return Record(name=f"w{worker_id}", id=worker_id, incarnation="", host="", addresses=[])


def test_one_that_dies_while_it_joins_keeps_nobody_out():
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    early, late = Directory(store, 0, 0), Directory(store, 2, 0)
    early.publish(record(0))
    dying = store.add("slots", 1)  # and it is dead
    late.publish(record(2))
    assert [each.id for each in late.everybody()] == [0, 2]
    assert [each.id for each in early.newcomers()] == [0, 2]
    store.set("worker/1", store.get("worker/2"))  # it was just slow
    store.set(f"slot/{dying}", "1")
    assert len(early.newcomers()) == 1
    assert early.newcomers() == []


class EndedStore(torch.distributed.HashStore):
    """As a store is to the others when the worker that kept it has left."""

    is_there = True

    def check(self, keys):
        self._complain()
        return super().check(keys)

    def add(self, key, amount):
        self._complain()
        return super().add(key, amount)

    def _complain(self):
        if not self.is_there:
            raise torch.distributed.DistNetworkError("Broken pipe")


def test_workers_go_on_when_the_store_has_ended():
    store = EndedStore()
    directory = Directory(store, 1, 0)
    directory.publish(record(1))
    assert directory.record_of(1) == record(1)
    store.is_there = False
    assert directory.newcomers() == []
    assert directory.record_of(1) is None
    directory.withdraw()


def test_one_that_leaves_is_lost_and_takes_no_name_from_its_successor():
    directory = Directory(torch.distributed.HashStore(), 0, 0)
    unused = [None] * 5
    network = Network(WorkerInfo("w0", 0), b"", b"", RpcOptions(), directory, *unused)
    for worker_id in (1, 2):
        network.members.introduce(replace(record(worker_id), name="server"))
    former = network.members.peer(1)
    network.members.forget(1)
    assert former.is_lost
    with pytest.raises(WorkerLost, match="worker 'server' cannot be called: it has left the group"):
        former.multiplex()  # somebody was about to call it
    assert network.members.id_of("server") == 2
    assert network.members.last_name_of(1) == "server"
