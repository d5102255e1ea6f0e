"""Who serves a lane: its own thread, or the host that serves many."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from telegrad.errors import ProtocolError
from telegrad.rpc.connections import lane_server
from telegrad.rpc.connections.begun_requests import BegunRequests
from telegrad.rpc.connections.lane_server import Reception
from telegrad.transport.base import ConnectionClosed
from telegrad.transport.same_host import mailbox, processors
from telegrad.transport.same_host.mailbox import is_available as has_mailboxes
from telegrad.transport.same_host.shm import SharedMemory
from telegrad.transport.stream import SocketConnection
from telegrad.wire.frames import Flags, Kind, Limits
from telegrad.wire.tensor_table.memory import BufferPool

PATIENCE = 20.0


class Worker:
    """One whose functions are: `who`, which says by which thread it is served; `slow`, the same;
    and `wait`, which waits until it is let go."""

    def __init__(self, busy_wait=500e-6):
        self.let_go = threading.Event()
        self.threads = []
        self.reception = Reception(
            self._serve, lambda frame: frame.body, lambda: False, busy_wait, self._spawn
        )
        self._pool = BufferPool()
        self._callers = []

    def _spawn(self, run):
        thread = threading.Thread(target=run, name="host", daemon=True)
        self.threads.append(thread)
        thread.start()

    def _serve(self, source, frame, send):
        if frame.body == b"wait":
            assert self.let_go.wait(PATIENCE)
        if not frame.flags & Flags.NO_ANSWER:
            send(Kind.REPLY, 0, frame.call_id, -1, -1, [threading.current_thread().name.encode()])

    def lane(self, *, mailbox=False):
        """A new lane, as the caller sees it."""
        here, there = (
            SocketConnection(s, self._pool, Limits(), 500e-6) for s in socket.socketpair()
        )
        if mailbox:
            here.share_memory(SharedMemory())
            there.share_memory(SharedMemory())
            here.open_mailbox()
        number = len(self._callers)
        self._callers.append(here)

        def run():
            with contextlib.suppress(ConnectionClosed, ProtocolError):
                self.reception.serve_lane(number, there, BegunRequests())
            there.close()

        thread = threading.Thread(target=run, name=f"own{number}", daemon=True)
        self.threads.append(thread)
        thread.start()
        here.set_timeout(PATIENCE)
        return here

    def close(self):
        self.let_go.set()
        for caller in self._callers:
            caller.interrupt()
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), thread.name
        for caller in self._callers:
            caller.close()


def call(lane, function=b"who", number=0):
    lane.send(Kind.CALL, 0, number, body=[function])
    frame = lane.receive()
    assert frame.call_id == number
    return frame.body.decode()


def move_in(worker, lanes):
    """Calls until all lanes are served by the host, and it is idle. Each moves when its thread has
    found nothing to do for a moment, which may take a while where there are few processors."""
    end = time.monotonic() + PATIENCE
    while [call(lane) for lane in lanes] != ["host"] * len(lanes):
        assert time.monotonic() < end
    while worker.reception._host._busy_since:  # the answer leaves before it is done
        assert time.monotonic() < end
        time.sleep(0.0005)


def call_in_turn(lanes, times=20):
    """Who has served each lane last."""
    return [[call(lane) for lane in lanes] for _ in range(times)][-1]


@pytest.fixture
def crowded(monkeypatch):
    """It is always crowded, and every request but those of `slow` is short."""
    desk = lane_server._Desk

    def serve(self, guest, frame, *, is_host):
        is_short = self.is_short(frame)
        self.serve(guest, frame)
        return is_short

    monkeypatch.setattr(desk, "serve_and_judge", serve)
    monkeypatch.setattr(desk, "is_short", lambda self, frame: frame.body != b"slow")


@pytest.fixture(params=[0.0, 500e-6], ids=["asleep", "looking"])
def worker(request, crowded):
    made = Worker(request.param)
    made.reception._desk.is_crowded = True
    yield made
    made.close()


@pytest.mark.parametrize("mailbox", [False, True], ids=["sockets", "mailboxes"])
def test_lanes_move_to_one_thread_where_it_is_crowded(worker, mailbox):
    lanes = [worker.lane(mailbox=mailbox) for _ in range(4)]
    move_in(worker, lanes)
    assert sum(thread.name == "host" for thread in worker.threads) == 1
    for number in range(200):
        assert call(lanes[number * 7 % 4], number=number) == "host"


def test_a_lane_alone_stays_with_its_thread():
    with contextlib.closing(Worker()) as worker:
        lane = worker.lane()
        assert call_in_turn([lane], 300) == ["own0"]


def test_a_request_that_is_not_short_goes_to_the_lanes_own_thread(worker):
    lanes = [worker.lane() for _ in range(3)]
    move_in(worker, lanes)
    assert call(lanes[1], b"slow") == "own1"
    assert call(lanes[0]) == call(lanes[2]) == "host"
    assert call(lanes[1]) == "own1"
    move_in(worker, lanes)


@pytest.mark.skipif(not has_mailboxes(), reason="there are no mailboxes on this processor")
def test_callers_are_told_where_the_host_runs_as_long_as_it_serves_them(worker, monkeypatch):
    def told(lane):
        words = lane._mailbox._in_words
        return words[mailbox._PROCESSOR] - 1

    at = [5]
    monkeypatch.setattr(processors, "here", lambda: at[0])
    monkeypatch.setattr(processors, "leave", lambda processor: False)
    lanes = [worker.lane(mailbox=True) for _ in range(3)]
    assert [told(lane) for lane in lanes] == [processors.UNKNOWN] * 3
    move_in(worker, lanes[:2])
    assert [told(lane) for lane in lanes] == [5, 5, processors.UNKNOWN]
    at[0] = 6
    call(lanes[0]), call(lanes[0])  # it sees that it has moved between two requests
    assert [told(lane) for lane in lanes] == [6, 6, processors.UNKNOWN]
    move_in(worker, lanes)
    assert [told(lane) for lane in lanes] == [6, 6, 6]
    assert call(lanes[1], b"slow") == "own1"
    assert [told(lane) for lane in lanes] == [6, processors.UNKNOWN, 6]


def test_all_lanes_may_leave_and_come_back(worker):
    lanes = [worker.lane() for _ in range(2)]
    for _ in range(3):
        move_in(worker, lanes)
        assert [call(lane, b"slow") for lane in lanes] == ["own0", "own1"]


def test_a_large_request_goes_to_the_lanes_own_thread(worker):
    lanes = [worker.lane() for _ in range(2)]
    move_in(worker, lanes)
    assert call(lanes[0], bytes(1 << 20)) == "own0"
    assert call(lanes[1]) == "host"


def test_a_post_gets_its_receipt(worker):
    lanes = [worker.lane() for _ in range(2)]
    move_in(worker, lanes)
    for number in range(10):
        lanes[0].send(Kind.CALL, Flags.NO_ANSWER, number, body=[b"who"])
        frame = lanes[0].receive()
        assert (frame.kind, frame.call_id) == (Kind.RECEIPT, number)


def test_a_lane_that_ends_leaves_the_others_alone(worker):
    lanes = [worker.lane() for _ in range(3)]
    move_in(worker, lanes)
    lanes[1].interrupt()
    own = next(thread for thread in worker.threads if thread.name == "own1")
    own.join(PATIENCE)
    assert not own.is_alive()
    assert call(lanes[0]) == call(lanes[2]) == "host"


def test_a_lane_that_breaks_the_protocol_ends(worker):
    lanes = [worker.lane() for _ in range(2)]
    move_in(worker, lanes)
    lanes[0]._socket.sendall(bytes(100))
    own = next(thread for thread in worker.threads if thread.name == "own0")
    with pytest.raises(ConnectionClosed):
        lanes[0].receive()
    own.join(PATIENCE)
    assert not own.is_alive()
    assert call(lanes[1]) == "host"


def test_a_host_that_is_stuck_gives_all_lanes_back(worker):
    lanes = [worker.lane() for _ in range(3)]
    move_in(worker, lanes)
    lanes[0].send(Kind.CALL, 0, 1, body=[b"wait"])
    while not worker.reception._host._busy_since:
        time.sleep(0.001)
    lanes[1].send(Kind.CALL, 0, 2, body=[b"who"])
    begun = worker.reception._host._busy_since
    worker.reception.tick(begun + 0.9 * lane_server._STUCK_AFTER)
    assert not lanes[1].poll()  # it is not stuck yet
    worker.reception.tick(begun + 1.1 * lane_server._STUCK_AFTER)
    assert lanes[1].receive().body == b"own1"
    assert call(lanes[2]) == "own2"
    worker.let_go.set()
    assert lanes[0].receive().body == b"host"
    assert call(lanes[0]) == "own0"
    move_in(worker, lanes)


def test_closing_does_not_wait_for_a_host_that_is_stuck(worker):
    lanes = [worker.lane() for _ in range(3)]
    move_in(worker, lanes)
    lanes[0].send(Kind.CALL, 0, 1, body=[b"wait"])
    while not worker.reception._host._busy_since:
        time.sleep(0.001)
    for lane in lanes:
        lane.interrupt()
    worker.reception.close()
    for thread in worker.threads:
        if thread.name in ("own1", "own2"):
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_nobody_moves_in_once_it_is_closed(worker):
    lanes = [worker.lane() for _ in range(2)]
    worker.reception.close()
    assert call_in_turn(lanes, 50) == ["own0", "own1"]


def test_a_host_that_is_closed_serves_nothing_any_more(worker):
    lanes = [worker.lane() for _ in range(2)]
    move_in(worker, lanes)
    worker.reception.close()
    assert [call(lane) for lane in lanes] == ["own0", "own1"]


def test_a_host_that_fails_gives_all_lanes_back(worker, monkeypatch):
    lanes = [worker.lane() for _ in range(2)]
    move_in(worker, lanes)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        patch.setattr(lane_server._Desk, "is_short", lambda self, frame: 1 / 0)
        lanes[0].send(Kind.CALL, 0, 1, body=[b"who"])
        host = next(thread for thread in worker.threads if thread.name == "host")
        host.join(PATIENCE)
        assert not host.is_alive()
    assert call(lanes[1]) == "own1"


def test_a_host_that_ends_by_a_request_gives_its_lane_back_too(worker, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    lanes = [worker.lane() for _ in range(2)]
    move_in(worker, lanes)

    def serve(source, frame, send):
        if frame.body == b"exit":
            raise SystemExit
        worker._serve(source, frame, send)

    worker.reception.serve_by(serve)
    lanes[0].send(Kind.CALL, 0, 1, body=[b"exit"])
    next(thread for thread in worker.threads if thread.name == "host").join(PATIENCE)
    assert [call(lane) for lane in lanes] == ["own0", "own1"]


def test_nothing_of_a_request_lives_while_its_lane_is_with_the_host(worker):
    lanes = [worker.lane() for _ in range(2)]
    served = []

    class Buffer:
        pass

    def serve(source, frame, send):
        frame.buffers = [Buffer()]
        served.append(weakref.ref(frame.buffers[0]))
        worker._serve(source, frame, send)

    worker.reception.serve_by(serve)
    move_in(worker, lanes)
    assert [buffer() for buffer in served if buffer() is not None] == []


def test_without_threads_for_a_host_lanes_stay(worker, monkeypatch):
    lanes = [worker.lane() for _ in range(2)]

    def spawn(run):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(worker.reception, "_spawn", spawn)
    assert call_in_turn(lanes, 50) == ["own0", "own1"]


def test_without_descriptors_for_a_host_lanes_stay(worker, monkeypatch):
    class NoEpoll:
        def __init__(self):
            raise OSError("too many open files")

    lanes = [worker.lane() for _ in range(2)]
    monkeypatch.setattr(lane_server.select, "epoll", NoEpoll)
    assert call_in_turn(lanes, 50) == ["own0", "own1"]


def test_a_lane_is_alone_again_when_the_host_has_ended(worker, monkeypatch):
    lanes = [worker.lane() for _ in range(2)]
    move_in(worker, lanes)
    lanes[1].interrupt()
    call(lanes[0], b"slow")
    host = worker.reception._host
    while not host.is_over:
        time.sleep(0.001)
    worker.reception._desk.last = None
    monkeypatch.undo()  # from here on it is judged as in real life
    call_in_turn(lanes[:1], 2)
    count = worker.reception._desk._count
    call_in_turn(lanes[:1], 20)
    assert worker.reception._desk._count == count


# -- judging


class _Guest:
    def __init__(self, source):
        self.source = source
        self.lane = SimpleNamespace(send=None)
        self.begun = BegunRequests()


class Judged:
    """A desk at which nothing happens but time."""

    frame = SimpleNamespace(flags=0, call_id=1, body=b"f")

    def __init__(self, monkeypatch):
        self._now = self._used = 0.0
        self._has_called = False
        clocks = SimpleNamespace(perf_counter=lambda: self._now, thread_time=lambda: self._used)
        monkeypatch.setattr(lane_server, "time", clocks)
        self._guests = [_Guest(n) for n in "abc"]
        self.desk = lane_server._Desk(None, lambda frame: frame.body, lambda: self._has_called)

    def serve(self, took, used, *, lane=0, is_host=False, calls=False):
        """Whether a request is short that took so long, and so much processor time."""

        def serve(*_):
            self._now += took
            self._used += used
            self._has_called = calls

        self.desk._serve = serve
        is_short = self.desk.serve_and_judge(self._guests[lane], self.frame, is_host=is_host)
        assert is_short == self.is_short
        return is_short

    @property
    def is_short(self):
        return self.desk.is_short(self.frame)

    def become_trusted(self):
        for _ in range(10):
            self.serve(60e-6, 50e-6)

    def serve_in_turn(self, took, used, *, lanes=3, seconds=0.1):
        """The requests of several lanes, of which each begins when the last one has ended."""
        end = self._now + seconds
        number = 0
        while self._now < end:
            self.serve(took, used, lane=number % lanes)
            number += 1
        return self.desk.is_crowded


@pytest.fixture
def judged(monkeypatch):
    return Judged(monkeypatch)


def test_what_has_been_short_a_few_times_is_short(judged):
    assert [judged.serve(300e-6, 200e-6) for _ in range(4)] == [False, False, True, True]


def test_what_uses_much_time_is_not_short(judged):
    assert not any(judged.serve(900e-6, 900e-6) for _ in range(10))


def test_what_calls_other_workers_is_not_short(judged):
    assert not any(judged.serve(400e-6, 100e-6, calls=True) for _ in range(10))


def test_what_waits_is_not_short(judged):
    assert not any(judged.serve(5e-3, 50e-6) for _ in range(10))


def test_what_waits_at_the_host_does_not_stay_there(judged):
    for _ in range(10):
        is_short = judged.serve(1e-3, 50e-6)  # others may have been in its way
    assert is_short
    verdicts = [judged.serve(1e-3, 50e-6, is_host=True) for _ in range(4)]
    assert not verdicts[-1]
    assert not any(judged.serve(1e-3, 50e-6) for _ in range(150))  # nor does it soon come back


@pytest.mark.parametrize("calls", [False, True], ids=["waits", "calls others"])
def test_what_stands_out_at_the_host_is_found_soon(judged, calls):
    judged.become_trusted()
    for _ in range(lane_server._SAMPLE * 20):
        judged.serve(60e-6, 50e-6, is_host=True)
    took = 60e-6 if calls else 2e-3
    for _ in range(4):
        judged.serve(took, 50e-6, is_host=True, calls=calls)
        if not judged.is_short:
            break
    assert not judged.is_short


def test_the_host_judges_one_of_several_requests(judged):
    judged.become_trusted()
    clock = lane_server.time
    judgements = []
    thread_time = clock.thread_time
    clock.thread_time = lambda: judgements.append(None) or thread_time()
    for _ in range(10 * lane_server._SAMPLE):
        judged.serve(60e-6, 50e-6, is_host=True)
    assert len(judgements) == 2 * 10
    assert judged.desk._count == 24  # of 90, after the first window of 10 + 7 * 8


def test_a_host_without_a_processor_for_a_moment_goes_on(judged):
    judged.become_trusted()
    for number in range(100):
        judged.serve(4e-3 if number % 5 == 4 else 60e-6, 50e-6, is_host=True)
    assert judged.serve(60e-6, 50e-6, is_host=True)


def test_it_is_crowded_when_one_thread_is_just_enough(judged):
    assert judged.serve_in_turn(100e-6, 60e-6)
    assert not judged.serve_in_turn(100e-6, 10e-6)
    assert judged.serve_in_turn(100e-6, 85e-6)


def test_it_is_not_crowded_where_requests_run_beside_each_other(judged):
    # Of three threads on three processors, each ends a third of its time after the one before.
    assert not judged.serve_in_turn(100e-6, 300e-6)
    assert not judged.serve_in_turn(100e-6, 100e-6)  # on two processors, with who calls them


def test_it_is_not_crowded_with_one_lane(judged):
    assert not judged.serve_in_turn(100e-6, 60e-6, lanes=1)


def test_a_host_that_is_busy_all_the_time_gives_up_now_and_then(judged):
    judged.serve_in_turn(100e-6, 95e-6, seconds=lane_server._TERM - 0.5)
    assert not judged.desk.begin_anew()
    judged.serve_in_turn(100e-6, 95e-6, seconds=1.0)
    assert judged.desk.begin_anew()
    assert not judged.desk.is_crowded
    assert not judged.desk.begin_anew()


def test_a_host_with_time_left_stays(judged):
    judged.serve_in_turn(100e-6, 60e-6, seconds=3 * lane_server._TERM)
    assert not judged.desk.begin_anew()


def test_lanes_come_back_to_a_new_host_when_one_has_given_up(worker, monkeypatch):
    lanes = [worker.lane() for _ in range(3)]
    move_in(worker, lanes)
    first = worker.reception._host
    with monkeypatch.context() as patch:
        patch.setattr(worker.reception._desk, "begin_anew", lambda: True)
        patch.setattr(worker.reception._desk, "is_crowded", False)
        call(lanes[0])
        while not first.is_over:
            time.sleep(0.001)
        assert call_in_turn(lanes) == ["own0", "own1", "own2"]
    move_in(worker, lanes)
