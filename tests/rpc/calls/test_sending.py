"""Sending on the connection that all asynchronous calls share: who waits, and for what.

Destructors and signal handlers may send while their thread is sending; a worker may have stopped
reading; Ctrl-C may come in the middle of a message. Real processes but for the first few.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import threading
import time
from functools import partial

import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.errors import RpcTimeout, TelegradError
from telegrad.rpc.connections.multiplex import Multiplex
from telegrad.rpc.group import current
from telegrad.testing.cluster import cluster
from telegrad.transport.base import ConnectionClosed, TransportTimeout
from telegrad.transport.stream import SocketConnection
from telegrad.wire.frames import Kind

PATIENCE = 20.0
LARGE = 1 << 24


class Wire:
    """A connection that takes what is sent, and runs something in the middle of it."""

    reads = 0
    has_rest = False

    def __init__(self, in_the_middle=lambda call_id: None):
        self.sent = []
        self.messages_begun = 0
        self._in_the_middle = in_the_middle

    def send_without_waiting(self, kind, flags=0, call_id=0, *parts):
        self.messages_begun += 1
        self._in_the_middle(call_id)
        self.sent.append(call_id)


def multiplex_on(wire):
    return Multiplex(wire, "test", None, None, None, lambda task: task())


def test_what_a_destructor_sends_in_the_middle_of_a_message_follows_it():
    def destructor(call_id):
        if call_id < 3:
            multiplex.send(Kind.CALL, 0, call_id + 1)

    wire = Wire(destructor)
    multiplex = multiplex_on(wire)
    multiplex.send(Kind.CALL, 0, 1)
    assert wire.sent == [1, 2, 3]


def test_what_it_sends_to_another_worker_does_not_wait_for_room_there():
    full = Full()
    other = multiplex_on(full)
    other.send(Kind.CALL, 0, 7, until=time.monotonic() + 0.01)
    multiplex = multiplex_on(Wire(lambda _: other.send(Kind.CALL, 0, 8)))
    multiplex.send(Kind.CALL, 0, 1)
    assert full.sent == [7]
    full.may_read.set()
    other.send(Kind.CALL, 0, 9)
    assert full.sent == [7, 8, 9]


def test_what_it_sends_is_as_it_was_then():
    kept = []

    class Keeping(Wire):
        def send_without_waiting(self, kind, flags, call_id, context, message, body, buffers):
            super().send_without_waiting(kind, flags, call_id)
            kept.append([bytes(buffer) for buffer in buffers])

    memory = bytearray(b"before")

    def destructor(call_id):
        if call_id == 1:
            multiplex.send(Kind.CALL, 0, 2, buffers=[memoryview(memory)])
            memory[:] = b"after!"

    multiplex = multiplex_on(Keeping(destructor))
    multiplex.send(Kind.CALL, 0, 1)
    assert kept == [[], [b"before"]]


def test_what_is_left_when_ctrl_c_comes_is_sent_by_the_clock():
    def handler(call_id):
        if call_id == 1:
            multiplex.send(Kind.CALL, 0, 2)
            raise KeyboardInterrupt

    wire = Wire(handler)
    multiplex = multiplex_on(wire)
    with pytest.raises(KeyboardInterrupt):
        multiplex.send(Kind.CALL, 0, 1)
    multiplex.tick(0.0)
    assert wire.sent == [2]


class Full(Wire):
    """A connection to a peer that does not read until it may."""

    def __init__(self):
        super().__init__()
        self.may_read = threading.Event()
        self.waits = threading.Event()

    def send_without_waiting(self, kind, flags=0, call_id=0, *parts):
        super().send_without_waiting(kind, flags, call_id)
        self.has_rest = True

    def send_rest(self):
        self.waits.set()
        assert self.may_read.wait(PATIENCE)
        self.has_rest = False


def test_a_message_that_does_not_fit_is_waited_for_until_its_deadline():
    wire = Full()
    multiplex = multiplex_on(wire)
    multiplex.send(Kind.CALL, 0, 1, until=time.monotonic() + 0.01)  # it is on its way
    with pytest.raises(TransportTimeout):
        multiplex.send(Kind.CALL, 0, 2, until=time.monotonic() + 0.01)
    multiplex.send_if_free(Kind.PING)  # returns
    waiting = threading.Thread(target=multiplex.send, args=(Kind.CALL, 0, 3))
    waiting.start()
    wire.may_read.set()
    waiting.join(PATIENCE)
    assert wire.sent == [1, 3]


def test_what_a_destructor_sends_on_the_thread_that_sends_the_rest_follows_it():
    class Collecting(Full):
        def send_rest(self):
            if self.sent == [1]:
                multiplex.send(Kind.CALL, 0, 2)  # does not wait for the rest, which is its own
            super().send_rest()

    wire = Collecting()
    wire.may_read.set()
    multiplex = multiplex_on(wire)
    multiplex.send(Kind.CALL, 0, 1, until=time.monotonic() + PATIENCE)
    multiplex.send(Kind.CALL, 0, 3)
    assert wire.sent == [1, 2, 3]


def test_a_destructor_on_the_thread_that_reads_does_not_wait_for_room():
    """The other end makes room when its answers are read, that is, when the destructor is over."""
    has_run = threading.Event()

    class Collecting(Full):
        def receive(self):
            if self.sent == [1]:
                multiplex.send(Kind.CALL, 0, 2)
                has_run.set()
            raise ConnectionClosed("over")

        def close(self):
            pass

    wire = Collecting()
    multiplex = Multiplex(wire, "test", None, print, lambda: None, lambda task: task())
    multiplex.send(Kind.CALL, 0, 1, until=time.monotonic() + 0.01)
    multiplex.start()
    assert has_run.wait(PATIENCE)
    wire.may_read.set()
    multiplex.send(Kind.CALL, 0, 3)
    assert wire.sent == [1, 2, 3]


def test_a_destructor_on_the_thread_that_reads_does_not_wait_for_who_waits_for_it():
    """Over TLS, reading and writing take turns: whoever sends may wait for the reader."""
    turn, is_sending, has_run = threading.Lock(), threading.Event(), threading.Event()

    class TakingTurns(Wire):
        def send_without_waiting(self, kind, flags=0, call_id=0, *parts):
            is_sending.set()
            assert turn.acquire(timeout=PATIENCE)
            super().send_without_waiting(kind, flags, call_id)
            turn.release()

        def receive(self):
            with turn:
                is_reading.set()
                assert is_sending.wait(PATIENCE)
                multiplex.send(Kind.CALL, 0, 2)
                has_run.set()
            raise ConnectionClosed("over")

        def close(self):
            pass

    is_reading = threading.Event()
    wire = TakingTurns()
    multiplex = Multiplex(wire, "test", None, print, lambda: None, lambda task: task())
    multiplex.start()
    assert is_reading.wait(PATIENCE)
    multiplex.send(Kind.CALL, 0, 1)
    assert has_run.wait(PATIENCE)
    assert wire.sent == [1, 2]


@pytest.mark.parametrize("is_begun", [True, False])
def test_ctrl_c_tells_what_has_not_begun_to_leave(is_begun):
    class Interrupted(Wire):
        def send_without_waiting(self, *_):
            self.messages_begun += is_begun
            raise KeyboardInterrupt

    begun = []
    multiplex = multiplex_on(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        multiplex.send(Kind.CALL, 0, 1, begun=begun)
    assert bool(begun) == is_begun


# -- real workers


def same(x):
    return x


def total(x):
    return x.sum().item()


def make_collector_eager():
    gc.set_threshold(50, 2, 2)


def let_go(number):
    Handle(partial(rpc.rpc_async, "worker0", same, (number,)))
    return number


class Handle:
    """In a cycle, so that the collector ends it, wherever it comes."""

    def __init__(self, end):
        self.me = self
        self._end = end

    def __del__(self):
        self._end()


@pytest.fixture
def eager_collector():
    before = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    yield
    gc.set_threshold(*before)


def test_destructors_may_call_other_workers(eager_collector):
    with cluster(2):
        ended = queue.SimpleQueue()  # the collector runs on any thread, and is at it when this ends

        def end():
            rpc.rpc_async("worker1", same, (1,))
            ended.put(rpc.rpc_sync("worker1", same, (2,)))

        for number in range(300):
            Handle(end)
            assert rpc.rpc_async("worker1", same, (number,)).wait() == number
        gc.collect()
        assert [ended.get(timeout=PATIENCE) for _ in range(300)] == [2] * 300


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_destructors_on_both_sides_may_call_while_many_calls_travel(transport, eager_collector):
    with cluster(2, transport=transport):
        rpc.rpc_sync("worker1", make_collector_eager)
        for number in range(2000):
            Handle(partial(rpc.rpc_async, "worker1", same, (number,)))
            future = rpc.rpc_async("worker1", let_go, (number,))
        assert future.wait() == 1999


def test_a_destructor_may_call_while_its_thread_opens_the_first_connection():
    with cluster(2):
        peer = current.current().agent.network.members.peer(1)
        connect, outcomes = peer._connect, []

        def interrupted(*args):
            if not outcomes:
                outcomes.append(None)
                future = rpc.rpc_async("worker1", same, (1,))  # as a `__del__` would in here
                connection = connect(*args)
                outcomes.append(future.wait())
                return connection
            return connect(*args)

        peer._connect = interrupted
        assert rpc.rpc_async("worker1", same, (2,)).wait() == 2
        assert outcomes == [None, 1]
        assert rpc.rpc_sync("worker1", same, (3,)) == 3
        assert not peer.is_lost


def test_a_destructor_in_the_middle_of_receiving_is_told_that_it_cannot_wait(monkeypatch):
    """It would wait for an answer that only its own thread can read."""
    ends = {
        "future": lambda: rpc.rpc_async("worker1", same, (1,)).wait(),
        "plain": lambda: telegrad.submit("worker1", same, 1).result(),
        "reference": lambda: rpc.remote("worker1", same, (1,)).to_here(),
        "own": lambda: rpc.remote("worker0", time.sleep, (0.5,)).to_here(),
        "call": lambda: rpc.rpc_sync("worker1", same, (2,)),
    }
    outcomes = {}

    def interrupted(connection):
        frame = receive(connection)
        while ends:
            name, end = ends.popitem()
            try:
                outcomes[name] = end()  # as a `__del__` would in here
            except TelegradError as error:
                outcomes[name] = str(error)
        return frame

    with cluster(2):
        rpc.rpc_async("worker1", same, (1,)).wait()
        receive = SocketConnection.receive
        with monkeypatch.context() as during:
            during.setattr(SocketConnection, "receive", interrupted)
            assert rpc.rpc_async("worker1", same, (3,)).wait() == 3
            assert rpc.rpc_async("worker1", same, (4,)).wait() == 4
        assert outcomes.pop("call") == 2
        assert len(outcomes) == 4
        assert all("a destructor cannot wait for" in text for text in outcomes.values())


def test_signal_handlers_may_call_other_workers():
    with cluster(2):
        futures, is_inside = [], []

        def report(*_):
            if not is_inside:
                is_inside.append(True)
                futures.append(rpc.rpc_async("worker1", same, (len(futures),)))
                is_inside.clear()

        before = signal.signal(signal.SIGALRM, report)
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        try:
            while len(futures) < 200:
                for _ in range(20):
                    future = rpc.rpc_async("worker1", same, (-1,))
                assert future.wait() == -1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert [future.wait() for future in futures] == list(range(len(futures)))


@pytest.mark.parametrize("options", [{"transport": "tcp"}, {"shared_memory": False}])
def test_a_call_to_a_worker_that_does_not_read_ends_in_its_own_time(options):
    with cluster(2, graceful=False, **options) as group:
        rpc.rpc_async("worker1", same, (1,)).wait()
        group.pause("worker1")
        begun = time.monotonic()
        large = rpc.rpc_async("worker1", total, (torch.ones(LARGE),), timeout=0.3)
        small = rpc.rpc_async("worker1", same, (1,), timeout=0.3)
        for future in (large, small):
            with pytest.raises(RpcTimeout):
                future.wait()
        assert time.monotonic() - begun < 10  # the heartbeat would end it after 30 s
        group.resume("worker1")
        assert rpc.rpc_async("worker1", same, (2,)).wait() == 2


@pytest.mark.parametrize("options", [{"transport": "tcp"}, {"shared_memory": False}])
def test_ctrl_c_in_the_middle_of_a_message_leaves_the_worker_and_its_references(options):
    with cluster(2, graceful=False, **options) as group:
        reference = rpc.remote("worker1", torch.ones, (3,))
        assert reference.to_here().sum() == 3
        rpc.rpc_async("worker1", same, (1,)).wait()
        group.pause("worker1")
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            rpc.rpc_async("worker1", total, (torch.ones(LARGE),))
            time.sleep(PATIENCE)
        timer.join()
        group.resume("worker1")
        assert rpc.rpc_async("worker1", same, (2,)).wait() == 2
        assert reference.to_here().sum() == 3
