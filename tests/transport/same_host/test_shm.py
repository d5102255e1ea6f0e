"""Shared memory: reused, given back, and gone with the processes that share it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import socket
import sys
import time
from multiprocessing.reduction import DupFd

import pytest
from memory_pair import (
    LARGE,
    borrowing,
    descriptors,
    few_descriptors,
    segment_descriptor,
    sharing,
)

from telegrad.errors import ProtocolError, SerializationError
from telegrad.testing.cluster import processes
from telegrad.testing.transport_contract import Background, joined
from telegrad.transport.base import TransportTimeout
from telegrad.transport.same_host import shm
from telegrad.transport.same_host.shm import SHARE_FROM, SharedMemory
from telegrad.transport.sockets import TcpTransport
from telegrad.transport.stream import SocketConnection
from telegrad.wire.frames import BUFFER, Kind, Limits, pack_header
from telegrad.wire.tensor_table.memory import BufferPool


@pytest.fixture
def pair():
    with sharing() as made:
        yield made


def test_what_was_lent_before_a_loss_is_not_taken_for_what_is_lent_after_it(pair):
    """The lender has lost the borrower, and reaches it again before that has read everything."""
    (first,) = pair.send(bytes([1]) * LARGE)
    del first
    pair.ends[0].send(Kind.CALL, buffers=[memoryview(bytes([2]) * LARGE)])  # in the same segment
    after = SharedMemory()
    placed = after.lend(memoryview(bytes([3]) * LARGE))
    pair.borrower.learn(placed.segment, os.dup(placed.descriptor))
    (second,) = pair.ends[1].receive().buffers
    assert bytes(second) == bytes([2]) * LARGE
    after.close()


# A mapping keeps a descriptor before Python 3.13, so three are too few there for three segments.
@pytest.mark.parametrize("left", range(4 if sys.version_info < (3, 13) else 3))
def test_a_message_without_room_for_its_descriptors_is_unread_and_the_next_ones_are_read(
    pair, left
):
    sender, receiver = pair.ends
    contents = [bytes([number]) * LARGE for number in range(4)]
    for parts in (contents[:3], contents[3:]):  # the second has a descriptor of its own
        sender.send(Kind.CALL, buffers=[memoryview(part) for part in parts])
    with few_descriptors(left):
        unread = receiver.receive()
        with pytest.raises(SerializationError, match="no file descriptor"):
            len(unread.buffers)
    (last,) = receiver.receive().buffers
    assert bytes(last) == contents[3]
    declined = pair.borrower.take_declined()
    assert declined
    assert not pair.borrower.take_declined()  # told once
    pair.lender.abandon(declined)  # as its process does when it hears of that
    del unread, last
    assert all(segment.mapping[0] == shm._FREE for segment in pair.lender._own.values())
    (again,) = pair.send(contents[0])
    assert bytes(again) == contents[0]


def test_a_lender_without_descriptors_streams_and_shares_again_later(pair):
    with few_descriptors():
        sending = Background(
            lambda: pair.ends[0].send(Kind.CALL, buffers=[memoryview(bytes(LARGE))])
        )
        assert bytes(pair.ends[1].receive().buffers[0]) == bytes(LARGE)
        sending.result()
    assert not pair.lender._own
    pair.lender.trim(time.monotonic())
    pair.send(bytes(LARGE))
    assert len(pair.lender._own) == 1


def test_a_segment_is_used_again_when_its_buffer_has_died(pair):
    for number in range(50):
        content = bytes([number]) * LARGE
        (buffer,) = pair.send(content)
        assert bytes(buffer) == content
        del buffer
    assert len(pair.lender._own) == 1
    assert len(pair.borrower._theirs) == 1


def test_a_segment_in_use_is_not_touched(pair):
    (kept,) = pair.send(b"k" * LARGE)
    view = memoryview(kept)
    del kept  # a view keeps it as well
    for _ in range(5):
        pair.send(b"x" * LARGE)
    assert len(pair.lender._own) == 2
    assert bytes(view) == b"k" * LARGE
    del view
    assert pair.lender.idle_bytes() == sum(s.size for s in pair.lender._own.values())


def test_a_borrower_may_write_into_what_it_borrowed(pair):
    content = bytearray(b"a" * LARGE)
    (buffer,) = pair.send(content)
    memoryview(buffer).cast("B")[0] = 0
    assert content[0] == ord("a")


def test_small_buffers_do_not_use_it(pair):
    pair.send(b"x" * (SHARE_FROM - 1))
    assert not pair.lender._own
    pair.send(b"x" * SHARE_FROM)
    assert len(pair.lender._own) == 1


def test_there_is_an_end_to_the_segments_of_one_peer(pair):
    """A receiver that keeps thousands of tensors must not run out of descriptors."""
    held = [pair.send(b"h" * SHARE_FROM) for _ in range(100)]
    segments = set(pair.lender._own)
    assert len(segments) == shm._MOST_SEGMENTS
    assert all(bytes(buffer) == b"h" * SHARE_FROM for (buffer,) in held)
    held.clear()
    pair.send(bytes(SHARE_FROM))
    assert set(pair.lender._own) == segments


def test_a_segment_serves_buffers_of_similar_size(pair):
    pair.send(bytes(LARGE))
    pair.send(bytes(LARGE - 5000))
    assert len(pair.lender._own) == 1
    pair.send(bytes(LARGE // 8))  # but a small one does not take a large segment along
    assert len(pair.lender._own) == 2


def test_the_smallest_segment_that_fits_is_taken(pair):
    small, large = pair.send(bytes(LARGE)), pair.send(bytes(LARGE * 3 // 2))
    small.clear()
    large.clear()
    kept = pair.send(bytes(LARGE)), pair.send(bytes(LARGE * 3 // 2))
    assert len(pair.lender._own) == 2
    del kept


def test_a_segment_that_has_been_used_again_needs_no_descriptor(pair):
    """Whoever borrows it has its own by then."""
    pair.send(bytes(LARGE))
    before = descriptors()
    pair.send(bytes(LARGE))
    assert len(descriptors()) < len(before)


def test_more_segments_than_descriptors_fit_in_a_message(pair):
    contents = [bytes([i]) * LARGE for i in range(70)]
    sending = Background(
        lambda: pair.ends[0].send(Kind.CALL, buffers=[memoryview(c) for c in contents])
    )
    buffers = pair.ends[1].receive().buffers
    sending.result()
    assert [bytes(b) for b in buffers] == contents
    assert len(pair.lender._own) == 64


@pytest.mark.parametrize("failing", ["memfd_create", "ftruncate"])
def test_without_memory_for_segments_buffers_take_the_socket(pair, monkeypatch, failing):
    asked = []

    def fail(*_):
        asked.append(1)
        raise OSError(24, "no more")

    monkeypatch.setattr(os, failing, fail)
    content = b"s" * SHARE_FROM
    for _ in range(3):
        (buffer,) = pair.send(content)
        assert bytes(buffer) == content
    assert len(asked) == 1  # a starved machine is not asked at each message
    assert not pair.lender._own


def test_all_memory_of_a_segment_is_had_before_it_is_touched():
    descriptor, mapping = shm.sealed_memory(100_000_000)
    try:
        assert os.fstat(descriptor).st_blocks * 512 >= len(mapping)
    finally:
        os.close(descriptor)
        mapping.close()


def test_unused_segments_are_let_go_after_a_while(pair):
    pair.send(bytes(LARGE))
    now = time.monotonic()
    pair.lender.trim(now)
    assert len(pair.lender._own) == 1
    pair.lender.trim(now + 10)
    assert not pair.lender._own
    pair.borrower.trim(now + 10)
    assert not pair.borrower._theirs  # retired by its owner: unmapped here, too
    (buffer,) = pair.send(b"n" * LARGE)
    assert bytes(buffer) == b"n" * LARGE


def test_a_segment_in_use_is_not_let_go(pair):
    (kept,) = pair.send(b"k" * LARGE)
    pair.lender.trim(time.monotonic() + 100)
    assert len(pair.lender._own) == 1
    assert bytes(kept) == b"k" * LARGE


def test_segments_over_the_limit_are_let_go_at_once(pair):
    pair.lender._max_idle = 2 * LARGE
    held = pair.send(bytes(LARGE), copies=5)
    assert len(pair.lender._own) == 5
    held.clear()
    pair.lender.trim(time.monotonic())
    assert pair.lender.idle_bytes() == 2 * LARGE


def test_borrowed_memory_outlives_its_owner(pair):
    (kept,) = pair.send(b"k" * LARGE)
    for memory in pair.memories:
        memory.close()
    assert bytes(kept) == b"k" * LARGE
    del kept
    gc.collect()


def test_closing_gives_every_descriptor_back(pair):
    before = descriptors()
    held = pair.send(bytes(LARGE), copies=10)
    assert len(descriptors() - before) >= 10
    pair.lender.close()
    pair.borrower.close()
    assert pair.lender.lend(memoryview(bytes(LARGE))) is None
    held.clear()
    assert descriptors() == before


def test_segments_of_a_message_that_did_not_leave_are_not_used_again(pair):
    """The peer may never have heard of them: naming one would break the protocol."""
    sender, receiver = pair.ends
    sender.set_timeout(0.02)
    with pytest.raises(TransportTimeout):
        send_for_ever(sender)  # nobody reads: the socket fills
    lent = len(pair.lender._own)
    while True:  # what has left whole arrives, and is given back
        try:
            receiver.set_timeout(0.02)
            receiver.receive()
        except TransportTimeout:
            break
    assert sum(s.mapping[0] == shm._FREE for s in pair.lender._own.values()) == lent


def send_for_ever(sender):
    while True:
        sender.send(Kind.CALL, body=[bytes(60_000)], buffers=[memoryview(bytes(LARGE))])


def test_a_retired_segment_stays_retired_when_its_borrower_is_done(pair):
    (kept,) = pair.send(b"k" * LARGE)
    pair.lender.abandon(list(pair.lender._own))
    del kept
    pair.borrower.trim(time.monotonic())
    assert not pair.borrower._theirs


def test_strangers_descriptors_are_not_taken():
    """Before the handshake is over nothing is shared: what comes is dropped by the kernel."""
    here, there = socket.socketpair()
    with there:
        connection = SocketConnection(here, BufferPool(), Limits())
        before = descriptors()
        with open(os.devnull, "rb") as file:
            for _ in range(10):
                socket.send_fds(there, [b"x"], [file.fileno()] * 50)
        assert connection.receive_bytes(10) == b"x" * 10
        assert descriptors() == before
        connection.close()


# -- what a peer may announce


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK])
def test_a_segment_that_could_shrink_is_refused(seals):
    with borrowing() as memory:
        with pytest.raises(ProtocolError, match="not sealed"):
            memory.learn(1, segment_descriptor(seals=seals))


@pytest.mark.parametrize("size", [0, 1, mmap.PAGESIZE])
def test_a_segment_without_room_is_refused(size):
    with borrowing() as memory:
        with pytest.raises(ProtocolError):
            memory.learn(1, segment_descriptor(size))


def test_something_else_than_memory_is_refused():
    with borrowing() as memory:
        for number in os.pipe():
            with pytest.raises(ProtocolError, match="is not sealed"):
                memory.learn(1, number)
        with pytest.raises(ProtocolError):
            memory.learn(1, os.open("/dev/null", os.O_RDONLY))


def test_a_segment_is_borrowed_whole_and_only_if_it_is_known():
    with borrowing() as memory:
        memory.learn(1, segment_descriptor(mmap.PAGESIZE + 100))
        assert len(memory.borrow(1)[0]) == 100
        with pytest.raises(ProtocolError, match="not known"):
            memory.borrow(2)


@contextlib.contextmanager
def raw_peer():
    """A connection that shares memory, and the bare socket at its other end."""
    here, there = socket.socketpair()
    connection = SocketConnection(here, BufferPool(), Limits())
    memory = SharedMemory()
    connection.share_memory(memory)
    before = descriptors()
    yield connection, there
    assert descriptors() == before
    connection.close()
    memory.close()
    there.close()


def announcing(*segments):
    table = b"".join(BUFFER.pack(SHARE_FROM, number, note) for number, note in segments)
    return pack_header(Kind.CALL, 0, len(segments), 0, -1, -1, 0) + table


NEW = 1


def test_more_descriptors_than_segments_are_closed():
    with raw_peer() as (connection, there):
        descriptor = segment_descriptor()
        socket.send_fds(there, [announcing((1, NEW))], [descriptor] * 3)
        os.close(descriptor)
        before = descriptors()
        frame = connection.receive()
        learnt = descriptors() - before
        connection._shared._memory.close()
        del frame
        gc.collect()
        assert len(learnt) <= 1  # that which a mapping keeps, on some versions of Python


def test_descriptors_of_a_message_that_is_refused_are_closed():
    with raw_peer() as (connection, there):
        descriptor = segment_descriptor()
        socket.send_fds(there, [announcing((1, NEW), (7, 0), (2, NEW))], [descriptor] * 2)
        os.close(descriptor)
        with pytest.raises(ProtocolError, match="not known"):
            connection.receive()
        connection._shared.close()
        connection._shared._memory.close()
        gc.collect()


def test_a_new_segment_without_a_descriptor_is_refused():
    with raw_peer() as (connection, there):
        there.sendall(announcing((1, NEW)))
        with pytest.raises(ProtocolError, match="without its descriptor"):
            connection.receive()


def test_where_descriptors_cannot_be_passed_buffers_take_the_socket():
    with joined(TcpTransport(BufferPool(), Limits())) as ends, borrowing() as memory:
        for end in ends:
            end.share_memory(memory)
        sending = Background(lambda: ends[0].send(Kind.CALL, buffers=[memoryview(bytes(LARGE))]))
        assert bytes(ends[1].receive().buffers[0]) == bytes(LARGE)
        sending.result()


# -- the death of a process


def lend_and_wait(descriptor, line):
    memory = SharedMemory()
    connection = SocketConnection(socket.socket(fileno=descriptor.detach()), BufferPool(), Limits())
    connection.share_memory(memory)
    connection.send(Kind.CALL, buffers=[memoryview(b"k" * LARGE)] * 3)
    line.recv()


def test_a_killed_lender_leaves_its_tensors_and_nothing_else():
    here, there = socket.socketpair()
    line, far_line = processes.Pipe()
    before = descriptors()
    with there:
        process = processes.Process(target=lend_and_wait, args=(_Passed(there.fileno()), far_line))
        process.start()
    far_line.close()
    connection = SocketConnection(here, BufferPool(), Limits())
    memory = SharedMemory()
    connection.share_memory(memory)
    kept = connection.receive().buffers
    process.kill()
    process.join()
    process.close()
    line.close()
    memory.close()
    connection.close()
    assert all(bytes(buffer) == b"k" * LARGE for buffer in kept)
    kept.clear()
    assert not descriptors() - before


class _Passed:
    """A descriptor on its way to another process."""

    def __init__(self, number):
        self._number = number

    def __getstate__(self):
        return DupFd(self._number)

    def __setstate__(self, passed):
        self._passed = passed

    def detach(self):
        return self._passed.detach()
