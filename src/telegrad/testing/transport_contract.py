"""What every transport keeps to: a suite for telegrad's own transports and for anybody's.

Put a subclass into a test module, say how a transport is made, and pytest does the rest::

    class TestCarrierPigeons(TransportContract):
        def make_transport(self):
            return PigeonTransport(loft="roof")

Nothing here sleeps: whatever must happen is waited for, and `PATIENCE` ends a wait that would
otherwise hang the suite.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from telegrad.transport.base import Connection, ConnectionClosed, Transport, TransportTimeout
from telegrad.transport.same_host.processors import UNKNOWN
from telegrad.wire.frames import Frame, Kind, Limits
from telegrad.wire.tensor_table.memory import BufferPool

__all__ = ["PATIENCE", "Background", "TransportContract", "joined"]

PATIENCE = 20.0
_MB = 1 << 20


class Background:
    """Runs a function on a thread of its own; `result` gives what it returned or raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="contract", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - it is raised again by `result`
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self, timeout: float = PATIENCE) -> Any:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise AssertionError(f"{self._function} did not end within {timeout} seconds")
        if self._error is not None:
            raise self._error
        return self._value


@contextlib.contextmanager
def joined(transport: Transport) -> Iterator[tuple[Connection, Connection]]:
    """Two ends of a connection: who connected, and who was connected to."""
    listener = transport.listen()
    ends: list[Connection] = []
    try:
        accepting = Background(listener.accept)
        # Some transports greet each other: the accepting end must be at work meanwhile.
        connecting = Background(lambda: transport.connect(listener.address, PATIENCE))
        ends.append(accepting.result())
        greeting = Background(lambda: ends[0].receive_bytes(1))
        ends.insert(0, connecting.result())
        ends[0].send_bytes(b"!")
        assert greeting.result() == b"!"
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.interrupt()
        for end in ends:
            end.close()
        listener.close()


def _bytes(length: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(length)


def _views(parts: Sequence[bytes]) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def _plain(buffers: Sequence[Any]) -> list[bytes]:
    return [bytes(memoryview(buffer)) for buffer in buffers]


def _echo(sender: Connection, receiver: Connection, *, body: bytes, buffers: list[bytes]) -> Frame:
    sending = Background(
        lambda: sender.send(Kind.CALL, 0, 1, -1, -1, (body,) if body else (), _views(buffers))
    )
    frame = receiver.receive()
    sending.result()
    return frame


class TransportContract:
    """The suite. A subclass whose name begins with `Test` is collected by pytest."""

    def make_transport(self) -> Transport:
        """A transport to hold to the contract; called once for each test."""
        raise NotImplementedError

    def prepare(self, connecting: Connection, accepting: Connection) -> None:
        """Runs before anything is sent: a place to share memory, say."""

    def connect_bare(self, address: str) -> socket.socket | None:
        """A bare socket to the address of a listener, if a message is a stretch of bytes there."""
        return None

    @contextlib.contextmanager
    def ends(self) -> Iterator[tuple[Connection, Connection]]:
        with joined(self.make_transport()) as (connecting, accepting):
            self.prepare(connecting, accepting)
            yield connecting, accepting

    # -- messages arrive as they were sent

    def test_every_field_of_a_header_arrives(self) -> None:
        largest = (1 << 63) - 1
        own = (Kind.MAILBOX, Kind.WAKE)  # of a connection itself: nobody else sends or gets them
        cases = [(kind, 0, 0, -1, -1) for kind in Kind if kind not in own] + [
            (Kind.CALL, 255, largest, largest, largest),
            (Kind.REPLY, 1, -largest - 1, -largest - 1, -largest - 1),
            (Kind.ERROR, 3, 7, 8, 9),
        ]
        with self.ends() as (a, b):
            for sender, receiver in ((a, b), (b, a)):
                for case in cases:
                    sender.send(*case)
                    frame = receiver.receive()
                    got = frame.kind, frame.flags, frame.call_id, frame.context_id, frame.message_id
                    assert got == case
                    assert isinstance(frame.kind, Kind)
                    assert frame.body == b""
                    assert frame.buffers == []

    def test_bodies_of_every_size_arrive(self) -> None:
        with self.ends() as (a, b):
            for length in (0, 1, 35, 36, 4095, 65499, 65500, 65536, 65537, 3 * _MB + 1):
                body = _bytes(length)
                frame = _echo(a, b, body=body, buffers=[])
                assert frame.body == body, length

    def test_a_body_may_come_in_pieces(self) -> None:
        with self.ends() as (a, b):
            a.send(Kind.CALL, body=(b"one", b"", memoryview(b"two"), b"three"))
            assert b.receive().body == b"onetwothree"

    def test_buffers_of_every_size_arrive(self) -> None:
        with self.ends() as (a, b):
            for sizes in (
                [0],
                [1],
                [0, 0, 5, 0],
                [65535, 65536, 65537],
                [_MB, 3, 0, 2 * _MB],
                [8 * _MB],
                [7] * 200,
                [70_000] * 100,
            ):
                buffers = [_bytes(size, seed) for seed, size in enumerate(sizes)]
                frame = _echo(a, b, body=b"x", buffers=buffers)
                assert frame.body == b"x"
                assert _plain(frame.buffers) == buffers, sizes

    def test_more_parts_arrive_than_one_system_call_takes(self) -> None:
        with self.ends() as (a, b):
            buffers = [bytes([i % 251]) * (i % 5) for i in range(3000)]
            assert _plain(_echo(a, b, body=b"", buffers=buffers).buffers) == buffers

    def test_messages_keep_their_order(self) -> None:
        lengths = [random.Random(3).choice((0, 10, 1000, 70_000)) for _ in range(300)]

        def send() -> None:
            for number, length in enumerate(lengths):
                a.send(Kind.CALL, call_id=number, body=(bytes(length),), buffers=_views([b"abc"]))

        with self.ends() as (a, b):
            sending = Background(send)
            for number, length in enumerate(lengths):
                frame = b.receive()
                assert (frame.call_id, len(frame.body)) == (number, length)
                assert _plain(frame.buffers) == [b"abc"]
            sending.result()

    def test_many_small_messages_may_be_under_way(self) -> None:
        with self.ends() as (a, b):
            for number in range(200):
                a.send(Kind.PING, call_id=number)
            assert [b.receive().call_id for _ in range(200)] == list(range(200))

    def test_bytes_before_the_first_message_arrive_exactly(self) -> None:
        with self.ends() as (a, b):
            a.send_bytes(b"hello")
            a.send_bytes(b"world")
            a.send(Kind.PING, call_id=5)
            assert b.receive_bytes(3) == b"hel"
            assert b.receive_bytes(7) == b"loworld"
            assert b.receive().call_id == 5

    def test_a_message_may_come_byte_by_byte(self) -> None:
        transport = self.make_transport()
        listener = transport.listen()
        bare = self.connect_bare(listener.address)
        try:
            if bare is None:
                return  # its messages are no bytes
            accepted = listener.accept()
            try:
                for frame in self._trickle(bare, accepted):
                    assert frame.body == b"some body"
                    assert _plain(frame.buffers) == [b"", b"abc", b"defg"]
            finally:
                accepted.close()
        finally:
            if bare is not None:
                bare.close()
            listener.close()

    @staticmethod
    def _trickle(bare: socket.socket, accepted: Connection) -> Iterator[Frame]:
        from telegrad.transport.stream import SocketConnection

        here, there = socket.socketpair()
        with here, there:
            recorder = SocketConnection(here, BufferPool(), Limits())
            recorder.send(Kind.CALL, body=(b"some body",), buffers=_views([b"", b"abc", b"defg"]))
            stream = there.recv(1 << 16)
        for _ in range(2):
            receiving = Background(accepted.receive)
            for value in stream:
                assert receiving.is_running
                bare.sendall(bytes([value]))
            yield receiving.result()

    # -- memory

    def test_received_buffers_are_writable_and_nobody_elses(self) -> None:
        with self.ends() as (a, b):
            for length in (10, 100_000, 2 * _MB):
                mine = bytearray(b"m" * length)
                sending = Background(
                    lambda mine=mine: a.send(Kind.CALL, buffers=[memoryview(mine)])  # type: ignore[misc]
                )
                (theirs,) = b.receive().buffers
                sending.result()
                mine[:] = b"x" * length  # it has been handed over: the memory may change
                assert bytes(memoryview(theirs)) == b"m" * length
                memoryview(theirs).cast("B")[0] = ord("t")
                assert mine[0] == ord("x")

    def test_a_kept_buffer_is_not_overwritten_by_later_messages(self) -> None:
        with self.ends() as (a, b):
            kept = []
            for number in range(6):
                content = bytes([number]) * 200_000
                kept.append((_echo(a, b, body=b"", buffers=[content]).buffers[0], content))
            for _ in range(6):
                _echo(a, b, body=b"", buffers=[b"z" * 200_000])
            for buffer, content in kept:
                assert bytes(memoryview(buffer)) == content

    # -- waiting

    def test_poll_tells_whether_a_message_waits(self) -> None:
        with self.ends() as (a, b):
            assert not b.poll()
            a.send(Kind.PING, call_id=1)
            a.send(Kind.PING, call_id=2)
            b.set_timeout(PATIENCE)
            for number in (1, 2):
                assert b.receive().call_id == number
                assert b.poll() or number == 2 or _comes(b)
            assert not b.poll()
            assert not a.poll()

    def test_receive_now_does_not_wait(self) -> None:
        with self.ends() as (a, b):
            assert b.receive_now() is None
            assert not b.glance()
            for length in (0, 10, 5_000):
                a.send(Kind.CALL, call_id=length, body=[b"x" * length])
                frame = _next_of_many(b)
                assert (frame.call_id, len(frame.body)) == (length, length)
                assert b.receive_now() is None

    def test_telling_where_one_serves_from_disturbs_nothing(self) -> None:
        with self.ends() as (a, b):
            for processor in (0, 1, UNKNOWN):
                b.serve_from(processor)
                a.send(Kind.PING, call_id=processor + 1)
                b.set_timeout(PATIENCE)
                assert b.receive().call_id == processor + 1
                assert not a.poll()

    def test_receive_now_leaves_what_has_not_come_whole(self) -> None:
        with self.ends() as (a, b):
            content = _bytes(3 * _MB)
            sending = Background(
                lambda: a.send(Kind.CALL, call_id=7, body=[content], buffers=_views([content]))
            )
            assert _comes(b)
            frame = b.receive_now() or b.receive()  # some transports have it whole at once
            sending.result()
            assert (frame.call_id, frame.body) == (7, content)
            assert _plain(frame.buffers) == [content]

    def test_whoever_looks_at_many_gets_all_in_order(self) -> None:
        with self.ends() as (a, b):
            chance = random.Random(5)
            lengths = [chance.choice((0, 1, 100, 3_000, 5_000, 40_000)) for _ in range(300)]
            turns = [chance.random() < 0.5 for _ in lengths]  # after which the sender waits

            def send() -> None:
                for number, (length, waits) in enumerate(zip(lengths, turns, strict=True)):
                    a.send(Kind.CALL, int(waits), number, body=[b"x" * length])
                    if waits:
                        assert a.receive().call_id == number

            sending = Background(send)
            for number, length in enumerate(lengths):
                frame = _next_of_many(b)
                assert (frame.call_id, len(frame.body)) == (number, length)
                if frame.flags:
                    b.send(Kind.REPLY, call_id=number)
            sending.result()

    def test_the_end_shows_to_whoever_looks_at_many(self) -> None:
        with self.ends() as (a, b):
            assert b.receive_now() is None
            a.interrupt()
            with _raises(ConnectionClosed):
                _next_of_many(b)

    def test_receive_ends_at_its_timeout_and_the_connection_lives_on(self) -> None:
        with self.ends() as (a, b):
            b.set_timeout(0.02)
            for _ in range(2):
                with _raises(TransportTimeout):
                    b.receive()
            b.set_timeout(None)
            waiting = Background(b.receive)
            a.send(Kind.PING, call_id=9)
            assert waiting.result().call_id == 9

    def test_reads_grow_with_what_comes(self) -> None:
        with self.ends() as (a, b):
            before = b.reads
            a.send(Kind.PING)
            b.receive()
            assert b.reads > before

    def test_interrupt_wakes_a_blocked_receive(self) -> None:
        for timeout in (None, PATIENCE):
            with self.ends() as (a, b):
                b.set_timeout(timeout)
                waiting = Background(b.receive)
                b.interrupt()
                with _raises(ConnectionClosed):
                    waiting.result()
                with _raises(ConnectionClosed):
                    b.receive()
                with _raises(ConnectionClosed):
                    a.receive()

    def test_interrupt_wakes_a_blocked_send(self) -> None:
        with self.ends() as (a, _):
            flooding = Background(lambda: _flood(a))
            a.interrupt()
            with _raises(ConnectionClosed):
                flooding.result()

    def test_closing_one_end_ends_the_other(self) -> None:
        with self.ends() as (a, b):
            a.send(Kind.PING, call_id=3)
            waiting = Background(lambda: (b.receive(), b.receive()))
            a.close()
            with _raises(ConnectionClosed):
                waiting.result()
            with _raises(ConnectionClosed):
                Background(lambda: _flood(b)).result()

    def test_what_was_sent_before_the_end_arrives(self) -> None:
        with self.ends() as (a, b):
            a.send(Kind.PING, call_id=3)
            a.send(Kind.PING, call_id=4)
            a.close()
            assert [b.receive().call_id, b.receive().call_id] == [3, 4]
            with _raises(ConnectionClosed):
                b.receive()

    def test_both_directions_carry_more_than_fits_on_the_way(self) -> None:
        """Each end sends before it reads what the other has sent: two threads an end."""
        count, body = 24, _bytes(_MB)
        with self.ends() as (a, b):

            def send(end: Connection) -> None:
                for number in range(count):
                    end.send(Kind.CALL, call_id=number, body=(body,), buffers=_views([b"ab"]))

            def receive(end: Connection) -> bool:
                return all(
                    frame.call_id == number and frame.body == body
                    for number in range(count)
                    for frame in [end.receive()]
                )

            sending = [Background(lambda end=end: send(end)) for end in (a, b)]  # type: ignore[misc]
            receiving = [Background(lambda end=end: receive(end)) for end in (a, b)]  # type: ignore[misc]
            assert all(part.result() for part in receiving)
            for part in sending:
                part.result()

    # -- listening

    def test_connections_do_not_mix(self) -> None:
        transport = self.make_transport()
        with joined(transport) as (a, b), joined(transport) as (c, d):
            a.send(Kind.PING, call_id=1)
            c.send(Kind.PING, call_id=2)
            assert d.receive().call_id == 2
            assert b.receive().call_id == 1
            assert not a.poll()

    def test_closing_a_listener_ends_accept(self) -> None:
        listener = self.make_transport().listen()
        waiting = Background(listener.accept)
        listener.close()
        with _raises(ConnectionClosed):
            waiting.result()

    def test_nobody_can_connect_to_a_closed_listener(self) -> None:
        transport = self.make_transport()
        listener = transport.listen()
        address = listener.address
        assert ":" in address
        listener.close()
        with _raises(ConnectionClosed):
            transport.connect(address, 1.0)


@contextlib.contextmanager
def _raises(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def _flood(connection: Connection) -> None:
    """Sends until it cannot; `interrupt` or the end of the other side ends it."""
    body = bytes(_MB)
    while True:
        connection.send(Kind.CALL, body=(body,))


def _comes(connection: Connection) -> bool:
    """Whether a message comes in a moment: `poll` may be ahead of the network."""
    waiting = threading.Event()
    for _ in range(1000):
        if connection.poll():
            return True
        waiting.wait(PATIENCE / 1000)
    return False


def _next_of_many(connection: Connection) -> Frame:
    """Waits as a thread does that looks at many connections: at the descriptor, after a rest."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        frame = connection.receive_now()
        if frame is not None:
            return frame
        if connection.poll():
            return connection.receive()  # a part of it is here
        if connection.glance() or not connection.rest():
            continue
        descriptor = connection.fileno()
        if descriptor >= 0:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            assert poller.poll(PATIENCE * 1000), "nothing showed at the descriptor"
    raise AssertionError(f"nothing came within {PATIENCE} seconds")
