"""One connection that carries many calls: who settles them, and on which thread."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import pytest
import torch

from telegrad import rpc
from telegrad.errors import RpcTimeout, WorkerLost
from telegrad.rpc.connections import multiplex as multiplex_module
from telegrad.rpc.connections.multiplex import Multiplex, PendingCall
from telegrad.rpc.connections.peer import Peer
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.testing.cluster import cluster
from telegrad.testing.transport_contract import joined
from telegrad.transport.base import ConnectionClosed
from telegrad.transport.inproc import InprocTransport
from telegrad.wire.frames import Kind

PATIENCE = 15.0


class Call(PendingCall):
    __slots__ = ("_on_reply", "outcome", "settled")

    def __init__(self, deadline=float("inf"), on_reply=lambda: None):
        self.deadline = deadline
        self.outcome = []
        self.settled = threading.Event()
        self._on_reply = on_reply

    def succeed(self, frame):
        self._on_reply()
        self._settle("reply")

    def fail(self, reason):
        self._settle("lost")

    def expire(self):
        self._settle("expired")

    def _settle(self, outcome):
        self.outcome.append(outcome)
        self.settled.set()


def run_soon(task):
    threading.Thread(target=task).start()


@pytest.fixture
def link():
    """A multiplex and the bare end of its connection."""
    requests, closed = [], []
    with joined(InprocTransport()) as (here, there):
        multiplex = Multiplex(
            here,
            "test",
            lambda _, frame: requests.append(frame),
            lambda _, reason: closed.append(reason),
            lambda: None,
            run_soon,
        )
        multiplex.requests, multiplex.closed = requests, closed
        multiplex.start()
        yield multiplex, there
        multiplex.interrupt()
        multiplex.join(PATIENCE)


def test_replies_find_their_calls_in_any_order(link):
    multiplex, there = link
    calls = {number: Call() for number in range(20)}
    for number, call in calls.items():
        multiplex.expect(number, call)
    for number in reversed(range(20)):
        there.send(Kind.REPLY if number % 2 else Kind.ERROR, call_id=number)
    assert all(call.settled.wait(PATIENCE) for call in calls.values())
    assert all(call.outcome == ["reply"] for call in calls.values())
    assert multiplex.pending_count == 0


def test_a_call_that_begins_while_others_expire_expires_in_its_turn(link, monkeypatch):
    """The clock has looked at all calls, and is about to note when the next one is due."""
    multiplex, _ = link
    multiplex.expect(1, Call(deadline=10.0))
    multiplex.expect(2, Call(deadline=100.0))
    late = Call(deadline=50.0)
    caller = threading.Thread(target=multiplex.expect, args=(3, late))
    comparisons = itertools.count(1)

    def slow_min(*values):
        least = min(values)
        if next(comparisons) == 2:  # the first is between the calls that are left
            caller.start()
            caller.join(0.2)  # it may have to wait for the clock
        return least

    monkeypatch.setattr(multiplex_module, "min", slow_min, raising=False)
    multiplex.tick(20.0)
    caller.join(PATIENCE)
    assert not late.outcome
    multiplex.tick(60.0)
    assert late.settled.wait(PATIENCE)
    assert late.outcome == ["expired"]


def test_signs_of_life_do_not_queue_up_behind_a_long_message():
    begun, may_end = threading.Event(), threading.Event()
    sent = []

    class Slow:
        has_rest = False
        messages_begun = 0

        def send_without_waiting(self, kind, *parts):
            sent.append(kind)
            self.has_rest = kind is Kind.CALL

        def send_rest(self):
            begun.set()
            may_end.wait(PATIENCE)
            self.has_rest = False

    multiplex = Multiplex(Slow(), "test", None, None, None, None)
    message = threading.Thread(target=multiplex.send, args=(Kind.CALL,))
    message.start()
    assert begun.wait(PATIENCE)
    multiplex.send_if_free(Kind.PING)  # returns
    multiplex.say_goodbye(0.001)
    may_end.set()
    message.join()
    multiplex.send_if_free(Kind.PING)
    assert sent == [Kind.CALL, Kind.PING]


def test_a_reply_that_comes_twice_or_to_nobody_is_dropped(link):
    multiplex, there = link
    call = Call()
    multiplex.expect(1, call)
    for number in (1, 1, 9):
        there.send(Kind.REPLY, call_id=number)
    there.send(Kind.REPLY, call_id=2)
    assert call.settled.wait(PATIENCE)
    last = Call()
    multiplex.expect(3, last)
    there.send(Kind.REPLY, call_id=3)
    assert last.settled.wait(PATIENCE)
    assert call.outcome == ["reply"]


def test_calls_expire_at_their_deadline(link):
    multiplex, there = link
    early, late, never = Call(10.0), Call(20.0), Call()
    for number, call in enumerate((early, late, never)):
        multiplex.expect(number, call)
    multiplex.tick(9.0)
    assert multiplex.pending_count == 3
    multiplex.tick(10.0)
    assert early.settled.wait(PATIENCE)
    assert early.outcome == ["expired"]
    assert multiplex.pending_count == 2
    there.send(Kind.REPLY, call_id=0)  # too late
    multiplex.tick(1e9)
    assert late.settled.wait(PATIENCE)
    assert never.outcome == []


def test_an_end_fails_all_that_waits_and_all_that_comes(link):
    multiplex, there = link
    calls = [Call() for _ in range(5)]
    for number, call in enumerate(calls):
        multiplex.expect(number, call)
    there.close()
    assert all(call.settled.wait(PATIENCE) for call in calls)
    assert all(call.outcome == ["lost"] for call in calls)
    assert multiplex.is_closed
    assert len(multiplex.closed) == 1
    with pytest.raises(ConnectionClosed):
        multiplex.expect(9, Call())


def test_a_stuck_reader_is_replaced_and_leaves_when_it_is_free(link):
    multiplex, there = link
    release = threading.Event()
    stuck = Call(on_reply=lambda: release.wait(PATIENCE))
    multiplex.expect(1, stuck)
    there.send(Kind.REPLY, call_id=1)
    for number in range(2, 6):
        call = Call()
        multiplex.expect(number, call)
        there.send(Kind.REPLY, call_id=number)
        end = time.monotonic() + PATIENCE
        while not call.settled.wait(0.005):
            multiplex.tick(time.monotonic())
            assert time.monotonic() < end
    assert len(multiplex._readers) == 2
    release.set()
    assert stuck.settled.wait(PATIENCE)
    end = time.monotonic() + PATIENCE
    while len(multiplex._readers) > 1:
        assert time.monotonic() < end
        time.sleep(0.001)


def no_thread(*_):
    raise RuntimeError("can't start new thread")  # as the system's refusal is told


def test_a_stuck_reader_goes_on_if_there_is_no_thread_in_its_place(link, monkeypatch):
    multiplex, there = link
    begun, release = threading.Event(), threading.Event()
    stuck = Call(on_reply=lambda: (begun.set(), release.wait(PATIENCE)))
    next_one = Call()
    multiplex.expect(1, stuck)
    multiplex.expect(2, next_one)
    there.send(Kind.REPLY, call_id=1)
    there.send(Kind.REPLY, call_id=2)
    assert begun.wait(PATIENCE)
    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", no_thread)
        multiplex.tick(time.monotonic() + 1.0)
    release.set()
    assert next_one.settled.wait(PATIENCE)
    assert len(multiplex._readers) == 1


def test_a_connection_that_nothing_can_read_is_closed(monkeypatch):
    with joined(InprocTransport()) as (here, there):
        multiplex = Multiplex(here, "test", print, print, lambda: None, run_soon)
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(ConnectionClosed, match="can't start new thread"):
            multiplex.start()
        assert multiplex.is_closed
        with pytest.raises(ConnectionClosed):
            there.receive()
        multiplex.join(PATIENCE)


def test_who_cannot_read_what_it_has_opened_waits_until_the_other_end_has_let_go(monkeypatch):
    """It may open another connection then, which is not to be ended with this one."""
    with joined(InprocTransport()) as (here, there):
        multiplex = Multiplex(here, "test", print, print, lambda: None, run_soon)
        heard = []

        def let_go():
            heard.append(there.receive().kind)
            there.close()

        other_end = threading.Thread(target=let_go)
        other_end.start()
        with monkeypatch.context() as scarce:
            scarce.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(ConnectionClosed, match="can't start new thread"):
                multiplex.start(is_opener=True)
        assert heard == [Kind.GOODBYE]
        other_end.join()


def test_readers_never_read_at_once(link):
    """However the clock's look falls between two frames, there is one reader."""
    multiplex, there = link
    inside, worst = [], []
    receive = multiplex._connection.receive

    def watched():
        inside.append(1)
        worst.append(len(inside))
        try:
            return receive()
        finally:
            inside.pop()

    multiplex._connection.receive = watched
    there.send(Kind.PONG)  # the reader comes around, and uses the watched one from now on
    stop = threading.Event()

    def look():
        while not stop.is_set():
            multiplex.tick(time.monotonic() + 1.0)  # every reader seems stuck

    looking = threading.Thread(target=look)
    looking.start()
    calls = []
    for number in range(500):
        calls.append(Call())
        multiplex.expect(number, calls[-1])
        there.send(Kind.REPLY, call_id=number)
    assert all(call.settled.wait(PATIENCE) for call in calls)
    stop.set()
    looking.join()
    assert max(worst) == 1


class Ending:
    """As much of a multiplex as a peer asks for."""

    is_closed = False

    def __init__(self):
        self.heard_at = time.monotonic()

    def start(self, *, is_opener):
        pass


def test_a_worker_is_lost_with_the_last_multiplex_and_not_by_one_of_before():
    losses = []

    def lost(peer, loss):
        losses.append(loss.reason)

    peer = Peer(WorkerInfo("other", 1), b"", None, None, lost, None, (1.0, 10.0), print)
    first, second, third = Ending(), Ending(), Ending()
    peer.adopt(first)
    peer.adopt(second)
    first.is_closed = True
    peer.multiplex_ended(first, "first")
    assert losses == []
    second.is_closed = True
    peer.multiplex_ended(second, "second")
    assert losses == ["second"]
    peer.adopt(third)
    peer.multiplex_ended(second, "of before")
    assert losses == ["second"]
    assert not peer.is_lost


# -- between processes


def add(a, b):
    return a + b


def sleep(seconds):
    time.sleep(seconds)


def test_a_callback_of_a_failed_call_may_wait_for_another_that_fails_with_it():
    with cluster(2) as group:
        futures = [rpc.rpc_async("worker1", sleep, (60,)) for _ in range(6)]
        # each waits for its neighbour to the left and to the right
        chained = [
            future.then(lambda f, i=i: wait_for_both(futures[i - 1], futures[(i + 1) % 6]))
            for i, future in enumerate(futures)
        ]
        group.kill("worker1")
        assert torch.futures.wait_all(chained) == [2] * 6


def wait_for_both(*futures):
    lost = 0
    for future in futures:
        try:
            future.wait()
        except WorkerLost:
            lost += 1
    return lost


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_a_callback_of_a_late_call_does_not_stop_the_clock(to):
    with cluster(2):
        release = threading.Event()
        slow = rpc.rpc_async(to, sleep, (1.0,), timeout=0.05)
        held_up = slow.then(lambda f: release.wait(PATIENCE))
        begun = time.monotonic()
        with pytest.raises(RpcTimeout):
            rpc.rpc_async(to, sleep, (1.0,), timeout=0.1).wait()
        assert time.monotonic() - begun < 0.9
        release.set()
        assert held_up.wait()


@contextlib.contextmanager
def no_threads(worker):
    """While this runs, the system gives the worker no thread."""
    rpc.rpc_sync(worker, give_threads, (False,))
    try:
        yield
    finally:
        rpc.rpc_sync(worker, give_threads, (True,))


start_thread = threading.Thread.start


def give_threads(yes):
    threading.Thread.start = start_thread if yes else no_thread


def test_calls_wait_for_a_thread_and_the_worker_is_not_lost():
    with cluster(2):
        reference = rpc.remote("worker1", add, (1, 2))
        rpc.rpc_sync("worker1", add, (1, 2))
        for worker in ("worker1", "worker0"):
            with no_threads(worker):
                futures = [rpc.rpc_async(worker, sleep, (0.01,)) for _ in range(4)]
                assert torch.futures.wait_all(futures) == [None] * 4
        assert reference.to_here() == 3


def test_a_worker_that_has_no_thread_for_a_connection_says_so_and_is_reached_later():
    with cluster(2):
        give_threads(False)
        try:
            with pytest.raises(WorkerLost, match=r"worker1.*can't start new thread"):
                rpc.rpc_sync("worker1", add, (1, 2))
        finally:
            give_threads(True)
        assert rpc.rpc_sync("worker1", add, (1, 2)) == 3
        assert rpc.rpc_async("worker1", add, (1, 2)).wait() == 3
