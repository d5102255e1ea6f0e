"""Buffers that are not large enough for a segment of their own share one."""

from __future__ import annotations

import gc
import os
import socket

import pytest
from memory_pair import LARGE, few_descriptors, segment_descriptor, sharing

from telegrad.errors import ProtocolError, SerializationError
from telegrad.testing.transport_contract import Background
from telegrad.transport.same_host import shm
from telegrad.transport.same_host.shm import SHARE_FROM, SharedMemory
from telegrad.transport.stream import SocketConnection
from telegrad.wire.frames import BUFFER, Kind, Limits, pack_header
from telegrad.wire.tensor_table.memory import BufferPool

MEDIUM = 20_000
NEW = 1


@pytest.fixture
def pair():
    with sharing() as made:
        yield made


def contents_of(sizes):
    return [bytes([1 + number % 255]) * size for number, size in enumerate(sizes)]


def sent(pair, contents):
    sending = Background(
        lambda: pair.ends[0].send(Kind.CALL, buffers=[memoryview(part) for part in contents])
    )
    frame = pair.ends[1].receive()
    sending.result()
    return frame


@pytest.mark.parametrize(
    ("sizes", "segments"),
    [
        ([MEDIUM] * 3, 0),  # together less than is worth a segment
        ([MEDIUM] * 4, 1),
        ([1, 63, 64, 65, SHARE_FROM - 1, 0, SHARE_FROM + 1, 7], 1),
        ([LARGE - 1] * 8, 2),  # a bundle ends with 4 MB
        ([LARGE - 1] * 9, 3),
        ([MEDIUM, LARGE, MEDIUM, 3 * LARGE, MEDIUM, 0, MEDIUM], 3),
        ([40_000] * 500, 5),
        ([SHARE_FROM], 1),
    ],
)
def test_whatever_lies_together_arrives_apart(pair, sizes, segments):
    contents = contents_of(sizes)
    for _ in range(3):  # in new segments, and in the same again
        frame = sent(pair, contents)
        assert [bytes(buffer) for buffer in frame.buffers] == contents
        assert len(pair.lender._own) == segments
        assert len(frame.loans) == segments
        del frame
    assert all(segment.mapping[0] == shm._FREE for segment in pair.lender._own.values())


def test_a_buffer_that_is_kept_keeps_its_segment(pair):
    contents = contents_of([MEDIUM] * 5)
    frame = sent(pair, contents)
    kept = frame.buffers[3]
    del frame
    (segment,) = pair.lender._own.values()
    assert segment.mapping[0] == shm._LENT
    others = sent(pair, contents_of([MEDIUM] * 5)[::-1])
    assert len(pair.lender._own) == 2
    assert bytes(kept) == contents[3]
    del kept, others
    assert segment.mapping[0] == shm._FREE


def test_a_buffer_may_be_written_to_and_its_neighbours_stay(pair):
    contents = contents_of([MEDIUM] * 5)
    frame = sent(pair, contents)
    memoryview(frame.buffers[2])[:] = bytes(MEDIUM)
    contents[2] = bytes(MEDIUM)
    assert [bytes(buffer) for buffer in frame.buffers] == contents


def test_an_answer_takes_the_segment_of_its_request(pair):
    for number in range(5):
        request = sent(pair, contents_of([MEDIUM] * 10))
        (loan,) = request.loans
        loan.hold()
        request.buffers.clear()
        contents = contents_of([MEDIUM - number] * 10)
        pair.ends[1].send(Kind.REPLY, buffers=[memoryview(part) for part in contents])
        loan.end()
        answer = pair.ends[0].receive()
        assert [bytes(buffer) for buffer in answer.buffers] == contents
        assert [segment.mapping[0] for segment in pair.lender._own.values()] == [shm._KEPT]
        del answer
        assert [segment.mapping[0] for segment in pair.lender._own.values()] == [shm._FREE]
    assert not pair.borrower._own


def test_without_a_descriptor_a_message_is_unread_and_the_next_is_read(pair):
    contents = contents_of([MEDIUM] * 4)
    for _ in range(2):
        pair.ends[0].send(Kind.CALL, buffers=[memoryview(part) for part in contents])
    with few_descriptors():
        unread = pair.ends[1].receive()
        with pytest.raises(SerializationError, match="no file descriptor"):
            len(unread.buffers)
    after = pair.ends[1].receive()
    assert [bytes(buffer) for buffer in after.buffers] == contents


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([(SHARE_FROM, 1, NEW), (SHARE_FROM, 2, 0)], "not known"),
        ([(SHARE_FROM, 1, NEW), (LARGE, 1, 0)], "too small for its buffers"),
        ([(2 * LARGE, 1, NEW)], "too small for its buffers"),
        ([(100, 1, 0)], "not known"),
        ([(100, 1, NEW)] * 2 + [(LARGE, 1, 0)], "too small for its buffers"),
    ],
)
def test_a_bundle_that_cannot_be_is_refused(entries, complaint):
    here, there = socket.socketpair()
    connection = SocketConnection(here, BufferPool(), Limits())
    memory = SharedMemory()
    connection.share_memory(memory)
    descriptor = segment_descriptor(LARGE)
    frame = pack_header(Kind.CALL, 0, len(entries), 0, -1, -1, 0)
    frame += b"".join(BUFFER.pack(*entry) for entry in entries)
    socket.send_fds(there, [frame], [descriptor])
    os.close(descriptor)
    with pytest.raises(ProtocolError, match=complaint):
        connection.receive()
    connection.close()
    memory.close()
    there.close()
    gc.collect()
