"""Meetings of workers: all are told before the leader goes on, which may leave then."""

from __future__ import annotations

import itertools
import os
import sys
import threading

import pytest

from telegrad import rpc
from telegrad.errors import WorkerLost
from telegrad.rpc.calls.service import Service
from telegrad.rpc.group.gather import Gatherings
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.testing.cluster import processes
from telegrad.wire.codec import Codec
from telegrad.wire.frames import Frame, Kind

PATIENCE = 30.0
WORKERS = 4


class Leader:
    """What a gathering's leader needs of an agent; nobody is lost."""

    worker_id = 0

    def __init__(self):
        self.codec = Codec()
        self.service = Service(WorkerInfo("worker0", 0), self.codec, peer_of=lambda _: None)
        self.network = self.members = self.work = self
        self.answered = []

    def watch_losses(self, callback):
        self.lose = callback

    def submit(self, work):
        work()

    def watch(self, worker):
        pass  # whom a test wants to be lost, it loses

    def name_of(self, worker):
        return f"worker{worker}"

    def is_lost(self, worker):
        return True

    def hear(self, source, value, number=0, before=None):
        """A participant's request comes in."""
        body = self.codec.encode((((0, 1, 2), number), False, value, before), source).payload
        frame = Frame(Kind.GATHER, 0, source, -1, -1, body, [])
        self.service.serve(source, frame, self.send)

    def send(self, kind, flags, call_id, context, message, body, buffers):
        content = self.codec.decode(b"".join(body), buffers)
        self.answered.append((call_id, content if kind is Kind.REPLY else content.text))


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_the_leader_is_answered_last(order):
    leader = Leader()
    Gatherings(leader)
    for worker in order:
        assert leader.answered == []
        leader.hear(worker, f"from {worker}")
    everything = {worker: f"from {worker}" for worker in range(3)}
    assert sorted(leader.answered) == [(worker, everything) for worker in range(3)]
    assert leader.answered[-1][0] == 0


def test_the_leader_is_told_last_that_a_worker_is_lost():
    leader = Leader()
    Gatherings(leader)
    leader.hear(0, None)
    leader.hear(1, None)
    leader.lose(2, "killed")
    text = "worker 'worker2' was lost before all workers had met"
    assert leader.answered == [(1, text), (0, text)]


def test_who_has_told_is_answered_though_its_thread_is_held_up(monkeypatch):
    """The thread that heard of worker 1 stands still: the leader's must answer it."""
    leader = Leader()
    gatherings = Gatherings(leader)
    proceed = gatherings._proceed
    goes_on = threading.Event()
    arrived = threading.Event()

    def stand_still():
        if threading.current_thread() is held:
            arrived.set()
            assert goes_on.wait(PATIENCE)
        proceed()

    monkeypatch.setattr(gatherings, "_proceed", stand_still)
    held = threading.Thread(target=leader.hear, args=(1, None))
    held.start()
    assert arrived.wait(PATIENCE)
    leader.hear(2, None)
    leader.hear(0, None)
    assert sorted(leader.answered[:2]) == [
        (1, dict.fromkeys(range(3))),
        (2, dict.fromkeys(range(3))),
    ]
    assert leader.answered[2][0] == 0
    goes_on.set()
    held.join(PATIENCE)
    assert len(leader.answered) == 3


def meet_and_end(rank, init_method, found):
    """The leader's process ends as soon as it has what the others have told."""
    sys.setswitchinterval(1e-6)  # its threads come in each other's way wherever they can
    options = rpc.RpcOptions(init_method=init_method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS, rpc_backend_options=options)
    told = rpc._all_gather(rank)
    if rank > 0:
        found.send(told)
    os._exit(0)


def run_group(target, *args):
    """Runs it with each rank and `args`; all must end, and well."""
    group = [processes.Process(target=target, args=(rank, *args)) for rank in range(WORKERS)]
    for process in group:
        process.start()
    for process in group:
        process.join(PATIENCE)
    stuck = [rank for rank, process in enumerate(group) if process.is_alive()]
    for rank in stuck:
        group[rank].kill()
    assert stuck == []
    assert [process.exitcode for process in group] == [0] * WORKERS


@pytest.mark.parametrize("attempt", range(5))
def test_a_leader_that_ends_at_once_has_answered_everybody(tmp_path, attempt):
    here, there = processes.Pipe(duplex=False)
    run_group(meet_and_end, f"file://{tmp_path}/store", there)
    for _ in range(WORKERS - 1):
        assert here.recv() == {f"worker{rank}": rank for rank in range(WORKERS)}


# -- the leader's death


def end_together(rank, init_method, answers, is_over):
    """A graceful end, in which the leader dies when it has answered so many of the others."""
    options = rpc.RpcOptions(init_method=init_method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS, rpc_backend_options=options)
    rpc._all_gather(rank)
    if rank == 0:
        answer = Service.answer
        left = itertools.count(answers, -1)

        def answer_or_die(service, source, frame, *args):
            if frame.kind is Kind.GATHER and not next(left):
                os._exit(0)
            answer(service, source, frame, *args)

        Service.answer = answer_or_die
    rpc.shutdown()
    is_over.send(rank)


@pytest.mark.parametrize("answers", range(3 * WORKERS))  # as many as there are
def test_all_others_end_though_the_leader_has_answered_only_some(tmp_path, answers):
    here, there = processes.Pipe(duplex=False)
    run_group(end_together, f"file://{tmp_path}/store", answers, there)
    assert sorted(here.recv() for _ in range(WORKERS - 1)) == [1, 2, 3]


def meet_without_a_leader(rank, init_method, found):
    options = rpc.RpcOptions(init_method=init_method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS, rpc_backend_options=options)
    rpc._all_gather(rank)
    if rank == 0:
        os._exit(0)
    try:
        found.send(rpc._all_gather(rank))
    except WorkerLost as error:
        found.send(error.worker)
    rpc.shutdown()


def test_where_losses_are_not_forgiven_that_of_the_leader_is_told(tmp_path):
    here, there = processes.Pipe(duplex=False)
    run_group(meet_without_a_leader, f"file://{tmp_path}/store", there)
    assert [here.recv() for _ in range(WORKERS - 1)] == ["worker0"] * (WORKERS - 1)


def test_who_has_gone_on_brings_along_what_the_leader_had_told_it():
    """Worker 2 has had its answer, worker 1 and this one have not; worker 1 comes twice."""
    leader = Leader()
    Gatherings(leader)
    told = {0: "a", 1: "b", 2: "c"}
    leader.hear(1, "b")
    assert leader.answered == []
    leader.hear(2, "d", number=1, before=(0, told))
    assert leader.answered == [(1, told)]
    leader.hear(0, "a")
    assert leader.answered == [(1, told), (0, told)]
    leader.hear(1, "e", number=1, before=(0, told))  # which is known, and answers nobody again
    leader.hear(0, "f", number=1, before=(0, told))
    assert sorted(leader.answered[2:]) == [(n, {0: "f", 1: "e", 2: "d"}) for n in range(3)]


def test_who_was_taken_for_lost_is_told_that_the_others_have_met():
    leader = Leader()
    gatherings = Gatherings(leader)
    gatherings._learn((0, 1, 2), 1, {0: None, 1: None})
    leader.hear(2, None)  # to the one before
    ((call, text),) = leader.answered
    assert call == 2
    assert "have met without this worker" in text
