"""Frames: what a reader makes of headers, of half messages and of noise."""

from __future__ import annotations

import contextlib
import socket
import struct
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telegrad.errors import ProtocolError, SerializationError
from telegrad.transport.base import ConnectionClosed
from telegrad.transport.stream import SocketConnection
from telegrad.wire.frames import (
    BUFFER,
    HEADER,
    Flags,
    Kind,
    Limits,
    pack_header,
    pack_rider,
    split_rider,
    unpack_header,
)
from telegrad.wire.tensor_table.memory import BufferPool

LARGEST = (1 << 63) - 1
LIMITS = Limits(max_body=1 << 30, max_buffers=1 << 15, max_message=1 << 36)
SIGNED = st.integers(-LARGEST - 1, LARGEST)


@given(
    st.sampled_from(Kind),
    st.integers(0, (1 << 16) - 1),
    st.integers(0, 1 << 15),
    SIGNED,
    SIGNED,
    SIGNED,
    st.integers(0, 1 << 30),
    st.integers(0, 20),
)
def test_a_header_reads_as_it_was_written(kind, flags, buffers, call, context, message, body, at):
    fields = (kind, flags, buffers, call, context, message, body)
    data = bytes(at) + pack_header(*fields)
    header = unpack_header(data, at, LIMITS)
    assert header == fields
    assert header[0] is kind


def test_the_layout_is_part_of_the_protocol_version():
    assert HEADER.size == 36
    assert BUFFER.size == 16
    packed = pack_header(Kind.CALL, Flags.NO_ANSWER, 2, 3, 4, 5, 6)
    assert packed == b"TG" + struct.pack("<HHHqqqI", 10, 1, 2, 3, 4, 5, 6)


def test_the_numbers_of_the_kinds_are_pinned():
    """A number that changes its meaning needs another protocol version."""
    assert {kind.name: int(kind) for kind in Kind if kind < 40} == {
        "PING": 1,
        "PONG": 2,
        "GOODBYE": 3,
        "MAILBOX": 4,
        "WAKE": 5,
        "DECLINED": 6,
        "CALL": 10,
        "REMOTE": 11,
        "REPLY": 12,
        "ERROR": 13,
        "RECEIPT": 14,
        "UNREAD": 15,
        "RREF_FETCH": 20,
        "RREF_FORK": 21,
        "RREF_FORK_ACCEPTED": 22,
        "RREF_CHILD_ACCEPTED": 23,
        "RREF_CHILD_ACKNOWLEDGED": 24,
        "RREF_DELETE": 25,
        "RREF_DELETED": 26,
        "PLAIN_CALL": 30,
        "PLAIN_RELEASE": 31,
        "PLAIN_ASK": 32,
        "PLAIN_GRADIENTS": 33,
    }


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (bytes(36), "does not hold a telegrad frame"),
        (b"GET / HTTP/1.1\r\nHost: telegrad\r\n\r\n    ", "does not hold a telegrad frame"),
        (b"TG" + bytes(34), "no kind of message has the number 0"),
        (b"TG\xff" + bytes(33), "no kind of message has the number 255"),
        (pack_header(Kind.CALL, 0, (1 << 15) + 1, 0, 0, 0, 0), "buffers are over the limit"),
    ],
)
def test_what_is_no_header_or_beyond_the_limits_is_refused(data, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        unpack_header(data, 0, LIMITS)


def test_a_truncated_header_is_never_read():
    with pytest.raises(struct.error):
        unpack_header(b"TG", 0, LIMITS)


# -- a reader on a stream that anybody may have written


def receive_all(data: bytes, limits: Limits = LIMITS) -> tuple[int, Exception]:
    """Reads frames off a stream of just these bytes; how many there were, and what ended it."""
    here, there = socket.socketpair()
    connection = SocketConnection(here, BufferPool(), limits)
    connection.set_timeout(10.0)  # a reader that waited here would fail by it
    count = 0
    with there:
        there.setblocking(False)
        assert there.send(data) == len(data)
        there.shutdown(socket.SHUT_WR)
        try:
            while True:
                connection.receive()
                count += 1
        except (ProtocolError, ConnectionClosed) as error:
            return count, error
        finally:
            connection.close()


def header(kind=Kind.CALL, flags=0, buffers=0, body=0, call=0, magic=b"TG") -> bytes:
    return magic + pack_header(kind, flags, buffers, call, -1, -1, body)[2:]


LENGTHS = st.one_of(st.integers(0, 200), st.integers(0, (1 << 32) - 1))
HEADERS = st.builds(
    header,
    st.one_of(st.sampled_from(Kind), st.integers(0, 255)),
    st.integers(0, (1 << 16) - 1),
    st.one_of(st.integers(0, 5), st.integers(0, (1 << 16) - 1)),
    LENGTHS,
    SIGNED,
    st.sampled_from([b"TG", b"TG", b"TG", b"GT"]),
)
ENTRIES = st.builds(
    BUFFER.pack,
    st.one_of(st.integers(0, 100), st.integers(0, (1 << 64) - 1)),
    st.sampled_from([0, 0, 0, 1, 7]),
    st.sampled_from([0, 1, 2]),
)
STREAMS = st.lists(st.one_of(HEADERS, HEADERS, ENTRIES, st.binary(max_size=200)), max_size=12)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STREAMS)
def test_any_bytes_end_in_an_error_and_cost_next_to_nothing(parts):
    data = b"".join(parts)
    tracemalloc.start()
    try:
        receive_all(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, f"{peak} bytes for {len(data)} bytes of input"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2000))
def test_noise_ends_in_an_error(data):
    count, _ = receive_all(data)
    assert count == 0 or data.startswith(b"TG")


def test_every_prefix_of_a_message_ends_in_the_end_of_the_stream():
    here, there = socket.socketpair()
    with here, there:
        SocketConnection(here, BufferPool(), LIMITS).send(
            Kind.CALL, body=(b"some body",), buffers=[memoryview(b"abc"), memoryview(b"")]
        )
        message = there.recv(1 << 16)
    for length in range(len(message)):
        count, error = receive_all(message[:length])
        assert count == 0
        assert isinstance(error, ConnectionClosed)
    assert receive_all(message)[0] == 1
    assert receive_all(message * 3)[0] == 3


def test_a_huge_body_is_not_allocated_before_it_comes():
    tracemalloc.start()
    try:
        _, error = receive_all(header(body=1 << 30))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(error, ConnectionClosed)
    assert peak < 4 << 20


def test_nothing_is_allocated_for_a_huge_message():
    entries = BUFFER.pack(1 << 35, 0, 0) * 3
    tracemalloc.start()
    try:
        _, error = receive_all(header(buffers=3) + entries)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
    assert isinstance(error, ConnectionClosed)  # it was not sent, after all


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_a_buffer_that_no_memory_can_hold_is_skipped(monkeypatch, error):
    def no_memory(self, length):
        raise error

    monkeypatch.setattr(BufferPool, "take", no_memory)
    large = header(buffers=1) + BUFFER.pack(70_000, 0, 0) + bytes(70_000)
    count, error = receive_all(large + header(body=3) + b"abc")
    assert count == 2
    assert isinstance(error, ConnectionClosed)


def test_a_smaller_limit_holds():
    limits = Limits(max_body=100, max_buffers=2, max_message=50)
    assert receive_all(header(body=100) + bytes(100), limits)[0] == 1
    assert "3 buffers" in str(receive_all(header(buffers=3), limits)[1])
    fits = header(buffers=2) + BUFFER.pack(25, 0, 0) * 2 + bytes(50)
    assert receive_all(fits, limits)[0] == 1


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        (header(body=101) + bytes(101), "101 bytes are over the limit of 100"),
        (header(buffers=2) + BUFFER.pack(26, 0, 0) * 2 + bytes(52), "over the limit of 50"),
        (header(buffers=1, body=101) + BUFFER.pack(1, 0, 0) + bytes(102), "limit of 100"),
    ],
)
def test_a_message_over_the_limits_is_skipped_and_says_so(message, limit):
    limits = Limits(max_body=100, max_buffers=2, max_message=50)
    a, b = socket.socketpair()
    with contextlib.closing(SocketConnection(b, BufferPool(), limits)) as connection:
        a.sendall(message + header(body=3) + b"abc")
        frame = connection.receive()
        with pytest.raises(SerializationError, match=limit):
            len(frame.buffers)
        assert connection.receive().body == b"abc"
    a.close()


def test_shared_memory_that_was_not_agreed_on_is_refused():
    _, error = receive_all(header(buffers=1) + BUFFER.pack(10, 3, 1))
    assert "not agreed on" in str(error)


def test_a_message_may_ride_in_front_of_a_body():
    body = pack_rider(Kind.CONTEXT_RELEASE, b"news") + b"a call"
    assert split_rider(body) == (Kind.CONTEXT_RELEASE, b"news", b"a call")
    assert split_rider(pack_rider(Kind.PING, b"news")) == (Kind.PING, b"news", b"")


@pytest.mark.parametrize("body", [b"", b"\x2e\x09", b"\x2e\xff\x00\x00\x00x", b"\x00" * 9])
def test_a_rider_that_is_none_is_an_error(body):
    with pytest.raises(ProtocolError, match="rides with"):
        split_rider(body)
