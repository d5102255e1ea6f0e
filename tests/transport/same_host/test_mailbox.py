"""The short way of small messages: what goes by it, in which order; nothing is slept over."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import socket
import struct
import threading
import time

import pytest
from memory_pair import few_descriptors

from telegrad.errors import ProtocolError
from telegrad.testing.transport_contract import joined
from telegrad.transport.base import ConnectionClosed, TransportTimeout
from telegrad.transport.same_host import mailbox, processors, spinning
from telegrad.transport.same_host.mailbox import FOR_SLEEPER, NOT_PUT, ROOM, SEEN, Mailbox
from telegrad.transport.same_host.shm import SharedMemory
from telegrad.transport.sockets import UnixTransport
from telegrad.transport.stream import SocketConnection
from telegrad.wire.frames import Kind, Limits, pack_header
from telegrad.wire.tensor_table.memory import BufferPool

pytestmark = pytest.mark.skipif(
    not mailbox.is_available(), reason="there are no mailboxes on this processor"
)


@pytest.fixture
def ends():
    first, descriptor = Mailbox.make()
    second = Mailbox.open(descriptor)
    yield first, second
    first.close()
    second.close()


@contextlib.contextmanager
def connections(busy_wait=1e-3):
    with joined(UnixTransport(BufferPool(), Limits(), busy_wait=busy_wait)) as (one, other):
        memories = SharedMemory(), SharedMemory()
        one.share_memory(memories[0])
        other.share_memory(memories[1])
        one.open_mailbox()
        yield one, other
        for memory in memories:
            memory.close()


def test_a_message_is_taken_once_and_then_there_is_room_for_the_next(ends):
    for sender, reader in (ends, ends[::-1]):
        assert reader.take(0) is None
        assert sender.put(b"one", 0)
        assert not sender.put(b"two", 0)  # the first is still there
        assert reader.has_new()
        assert reader.take(0) == b"one"
        assert reader.take(0) is None
        assert sender.put(b"", 0)
        assert reader.take(0) == b""


def test_who_waits_makes_way_where_the_other_serves_many_from(ends, monkeypatch):
    left = []
    monkeypatch.setattr(processors, "here", lambda: 3)
    monkeypatch.setattr(processors, "leave", left.append)
    for host, caller in (ends, ends[::-1]):
        caller.make_way()
        host.serve_from(2)
        caller.make_way()
        assert not left
        host.serve_from(3)
        host.make_way()  # it is the caller that moves
        assert not left
        caller.make_way()
        assert left.pop() == 3
        host.serve_from(processors.UNKNOWN)
        caller.make_way()
        assert not left


def test_nobody_makes_way_on_a_system_that_does_not_tell_processors(ends, monkeypatch):
    monkeypatch.setattr(processors, "here", lambda: processors.UNKNOWN)
    monkeypatch.setattr(processors, "leave", lambda processor: pytest.fail("it moved"))
    host, caller = ends
    host.serve_from(processors.here())
    caller.make_way()


def test_a_connection_that_looks_makes_way_and_gets_its_message(monkeypatch):
    left = threading.Event()
    # It looks also where other programs compute.
    monkeypatch.setattr(spinning, "_retreat", spinning._Retreat())
    monkeypatch.setattr(spinning._Retreat, "is_due", lambda *times: False)
    monkeypatch.setattr(processors, "here", lambda: 1)
    monkeypatch.setattr(processors, "leave", lambda processor: left.set())
    with connections(busy_wait=20.0) as (caller, host):
        caller.send(Kind.PING)
        host.receive()  # the mailbox is open at both ends
        host.serve_from(1)
        got = []
        thread = threading.Thread(target=lambda: got.append(caller.receive().call_id))
        thread.start()
        assert left.wait(20)
        host.send(Kind.PONG, call_id=7)
        thread.join(20)
        assert got == [7]


def test_what_does_not_fit_goes_elsewhere(ends):
    sender, reader = ends
    assert not sender.put(bytes(ROOM + 1), 0)
    assert sender.put(bytes(ROOM), 0)
    assert reader.take(0) == bytes(ROOM)


def test_a_message_waits_for_those_that_were_sent_before_it(ends):
    sender, reader = ends
    assert sender.put(b"later", 2)
    assert reader.take(0) is None
    assert reader.take(1) is None
    assert reader.take(3) == b"later"  # the third came after it, and only to wake


def test_a_sleeper_is_left_alone_and_a_reader_does_not_sleep_over_a_message(ends):
    sender, reader = ends
    assert reader.fall_asleep()
    assert sender.put(b"no", 0) == NOT_PUT
    reader.wake_up()
    assert sender.put(b"yes", 0) == SEEN
    assert not reader.fall_asleep()  # it sees the message, and stays awake
    assert reader.take(0) == b"yes"
    assert sender.put(b"again", 0) == SEEN
    assert reader.take(0) == b"again"


def test_one_who_falls_asleep_while_a_message_is_put_in_is_to_be_woken(ends):
    sender, reader = ends

    @contextlib.contextmanager
    def fence():
        reader._in_words[mailbox._IS_ASLEEP] = 1
        yield

    sender._fence = fence()
    assert sender.put(b"text", 0) == FOR_SLEEPER
    assert reader.take(0) == b"text"


def steps_of_sender(state):
    """`put` and what follows, as the single reads and writes that the processor sees."""
    if state["asleep"]:
        state["socket"] += 1
        return
    yield
    state["new"] = True
    yield
    if state["asleep"]:
        yield
        state["wake"] += 1


def steps_of_reader(state):
    """`fall_asleep`, from a look that has found nothing."""
    yield
    state["asleep"] = True
    yield
    if state["new"]:
        state["asleep"] = False
        state["taken"] = True
        return
    yield
    state["sleeps"] = True


def test_in_no_order_is_a_message_slept_over():
    orders = 0
    for order in set(itertools.permutations("s" * 4 + "r" * 4)):
        state = dict.fromkeys(("asleep", "new", "taken", "sleeps"), False)
        state.update(socket=0, wake=0)
        actors = {"s": steps_of_sender(state), "r": steps_of_reader(state)}
        for actor in order:
            next(actors[actor], None)
        for actor in actors.values():
            for _ in actor:
                pass
        # Whoever sleeps for good has something coming on the socket to wake it.
        assert state["taken"] or state["socket"] or state["wake"] or not state["sleeps"], order
        orders += 1
    assert orders == 70


def test_the_size_and_the_seals_are_checked():
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 15)
    with pytest.raises(ProtocolError, match="not sealed"):
        Mailbox.open(descriptor)
    from telegrad.transport.same_host.shm import sealed_memory

    descriptor, mapping = sealed_memory(4096)
    with pytest.raises(ProtocolError, match="wrong size"):
        Mailbox.open(descriptor)
    mapping.close()


def test_a_length_that_lies_is_refused(ends):
    sender, reader = ends
    assert sender.put(b"text", 0)
    struct.pack_into("<Q", sender._mapping, 8, ROOM + 1)
    with pytest.raises(ProtocolError, match="does not fit"):
        reader.take(0)


@pytest.mark.parametrize("message", [b"", b"TG", pack_header(Kind.CALL, 0, 0, 0, -1, -1, 5) + b"1"])
def test_a_message_that_is_no_frame_is_refused(message):
    with connections() as (one, other):
        one.send(Kind.PING)
        other.receive()
        other._mailbox.wake_up()  # it may have waited for a while
        assert one._mailbox.put(message, one._frames_sent)
        with pytest.raises((ProtocolError, struct.error)):
            other.receive()


def test_a_mailbox_that_was_not_agreed_on_is_refused():
    ours, theirs = socket.socketpair()
    connection = SocketConnection(ours, BufferPool(), Limits())
    theirs.sendall(pack_header(Kind.MAILBOX, 0, 0, 0, -1, -1, 0))
    with pytest.raises(ProtocolError, match="not agreed on"):
        connection.receive()
    connection.close()
    theirs.close()


def test_a_second_mailbox_is_refused():
    with connections() as (one, other):
        one.open_mailbox()
        with pytest.raises(ProtocolError, match="not agreed on"):
            other.receive_now()


@pytest.mark.parametrize("why", ["nobody looks", "no memory is shared", "processor", "descriptors"])
def test_there_is_none_where_it_would_be_of_no_use(why, monkeypatch):
    busy_wait = 0.0 if why == "nobody looks" else 1e-3
    with joined(UnixTransport(BufferPool(), Limits(), busy_wait=busy_wait)) as (one, other):
        memory = SharedMemory()
        if why != "no memory is shared":
            one.share_memory(memory)
        if why == "processor":
            monkeypatch.setattr("platform.machine", lambda: "aarch64")
        with few_descriptors() if why == "descriptors" else contextlib.nullcontext():
            one.open_mailbox()
        assert not other.poll()
        memory.close()


@pytest.mark.parametrize("reason", [ConnectionClosed, TransportTimeout])
def test_that_the_other_end_does_not_take_it_is_told_by_the_next_message(reason):
    with joined(UnixTransport(BufferPool(), Limits())) as (one, other):
        memory = SharedMemory()
        one.share_memory(memory)
        one.set_timeout(0.01)
        if reason is ConnectionClosed:
            other.close()
        else:
            with pytest.raises(TransportTimeout):
                while True:
                    one.send(Kind.PING, body=[bytes(60_000)])
        one.open_mailbox()
        with pytest.raises(reason):
            one.send(Kind.PING)
        memory.close()


def test_messages_before_it_was_opened_do_not_count():
    with joined(UnixTransport(BufferPool(), Limits(), busy_wait=1e-3)) as (one, other):
        memories = SharedMemory(), SharedMemory()
        for end, memory in zip((one, other), memories, strict=True):
            end.share_memory(memory)
        for number in range(3):
            one.send(Kind.CALL, call_id=number)
            assert other.receive_now().call_id == number
            other.send(Kind.REPLY, call_id=number)
            assert one.receive_now().call_id == number
        one.open_mailbox()
        for number in range(3):
            one.send(Kind.CALL, call_id=number)
            assert other.receive_now().call_id == number
            other.send(Kind.REPLY, call_id=number)
            assert one.receive_now().call_id == number
        for memory in memories:
            memory.close()


def test_polling_sees_what_is_in_it_and_what_has_begun_to_come():
    with connections() as (one, other):
        one.send(Kind.PING)
        assert other.receive().kind is Kind.PING
        assert one.receive_now() is None  # from now on it looks
        other.send(Kind.PONG)
        assert one.glance()
        assert one.poll()
        assert one.receive().kind is Kind.PONG
        frame = pack_header(Kind.ERROR, 0, 0, 0, -1, -1, 0)
        other._frames_sent += 1
        for half in (frame[:20], frame[20:]):
            other._write([half], (), len(half))
            assert one.poll()
        assert one.receive().kind is Kind.ERROR


@pytest.mark.parametrize("large", [{"body": [bytes(5000)]}, {"buffers": [memoryview(bytes(100))]}])
def test_it_does_not_overtake_what_went_by_the_socket(large):
    with connections() as (one, other):
        assert other.receive_now() is None  # from now on it looks
        for number in range(3):
            one.send(Kind.CALL, call_id=2 * number, **large)
            one.send(Kind.CALL, call_id=2 * number + 1)
            assert other.glance()
            before = other.reads
            assert other.receive_now().call_id == 2 * number
            assert other.receive_now().call_id == 2 * number + 1
            assert other.reads > before + 1


def test_whoever_rests_gets_everything_by_the_socket():
    with connections() as (one, other):
        assert other.receive_now() is None
        one.send(Kind.PING)
        assert not other.rest()
        assert other.receive_now().kind is Kind.PING
        assert other.rest()
        one.send(Kind.PONG)
        assert not other.glance()
        assert other.poll()
        assert other.receive_now().kind is Kind.PONG
        one.send(Kind.PING)
        assert other.glance()  # who looks is awake again
        assert other.receive_now().kind is Kind.PING


def test_whoever_sends_while_another_thread_closes_is_told_so():
    with connections() as (one, other):
        one.send(Kind.PING)
        assert other.receive().kind is Kind.PING
        other._mailbox.close()  # as far as the other thread has come
        with pytest.raises(ConnectionClosed):
            other.send(Kind.PONG)
        other._mailbox = None


def test_a_frame_that_comes_too_late_to_wake_anybody_is_no_message():
    with connections() as (one, other):
        one.send(Kind.PING)
        assert other.receive().kind is Kind.PING
        other._write([pack_header(Kind.WAKE, 0, 0, 0, -1, -1, 0)], (), 36)
        assert not one.poll()
        assert not one.has_more()
        other.send(Kind.PONG)
        assert not one.glance()  # whoever has looked in vain waits for the socket
        assert one.poll()
        assert one.has_more()
        assert one.receive().kind is Kind.PONG


def test_an_end_that_has_no_descriptor_for_it_gets_everything_by_the_socket():
    with connections() as (here, there):
        for number in range(3):
            here.send(Kind.CALL, call_id=number)
        with few_descriptors():
            assert there.receive().call_id == 0
        assert there._mailbox is None
        assert [there.receive().call_id for _ in range(2)] == [1, 2]
        for number in range(3):
            there.send(Kind.REPLY, call_id=number)
            assert here.receive().call_id == number
            here.send(Kind.CALL, call_id=number)
            assert there.receive().call_id == number


def test_the_end_of_the_other_side_ends_a_look():
    with connections(busy_wait=60.0) as (one, other):
        threading.Timer(0.05, other.interrupt).start()
        with pytest.raises(ConnectionClosed):
            one.receive()


def test_it_is_closed_with_its_connection():
    with connections() as (one, other):
        one.send(Kind.PING)
        other.receive()
        mappings = one._mailbox._mapping, other._mailbox._mapping
    assert all(mapping.closed for mapping in mappings)


def echo(sock, seconds, count, seed):
    dice = random.Random(seed)
    memory = SharedMemory()
    connection = SocketConnection(sock, BufferPool(), Limits(), seconds)
    connection.share_memory(memory)
    for _ in range(count):
        frame = connection.receive()
        if dice.random() < 0.2:
            time.sleep(dice.choice((0, 1e-5, 1e-4)))
        buffers = [memoryview(buffer) for buffer in frame.buffers]
        connection.send(Kind.REPLY, 0, frame.call_id, -1, -1, (frame.body,), buffers)
        del buffers
        del frame
    connection.close()
    memory.close()


@pytest.mark.parametrize("seconds", [1e-9, 2e-5, 1e-3])
def test_a_process_that_often_falls_asleep_gets_every_message(seconds):
    """The race between putting in and falling asleep, over and over, between real processes."""
    count, dice = 4000, random.Random(1)
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("fork").Process(
        target=echo, args=(theirs, seconds, count, 2)
    )
    process.start()
    theirs.close()
    memory = SharedMemory()
    connection = SocketConnection(ours, BufferPool(), Limits(), seconds)
    connection.share_memory(memory)
    connection.set_timeout(30.0)  # a message that was slept over ends in an error
    connection.open_mailbox()
    for number in range(count):
        body = dice.randbytes(dice.choice((0, 10, 200, 4000, ROOM, 70_000)))
        buffers = [memoryview(bytes(100_000))] if dice.random() < 0.02 else []
        connection.send(Kind.CALL, 0, number, -1, -1, (body,), buffers)
        if dice.random() < 0.2:
            time.sleep(dice.choice((0, 1e-5, 1e-4)))
        if dice.random() < 0.5:
            connection.has_more()
        frame = connection.receive()
        assert frame.call_id == number
        assert frame.body == body
        assert len(frame.buffers) == len(buffers)
        del frame
    connection.close()
    memory.close()
    process.join(10)
    assert process.exitcode == 0
