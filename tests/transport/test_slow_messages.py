"""Messages that go or come on and on, but slowly: the time for them ends all the same."""

from __future__ import annotations

import threading
import time

import pytest

from certificates import Authority
from telegrad.testing.transport_contract import Background, joined
from telegrad.transport.base import ConnectionClosed, TransportTimeout
from telegrad.transport.sockets import TcpTransport, UnixTransport
from telegrad.wire.frames import BUFFER, Kind, Limits, pack_header
from telegrad.wire.tensor_table.memory import BufferPool

LENGTH = 1 << 26
SECONDS = 0.3
PACE = 0.01
"""Much less than the timeout: to one that counts the silence alone, the peer is never late."""


@pytest.fixture(name="ends", params=["unix", "tcp", "tls"])
def fixture_ends(request, tmp_path):
    if request.param == "unix":
        transport = UnixTransport(BufferPool(), Limits())
    elif request.param == "tcp":
        transport = TcpTransport(BufferPool(), Limits())
    else:
        tls = Authority(tmp_path).worker("worker")
        transport = TcpTransport(
            BufferPool(),
            Limits(),
            server_tls=tls.server_context(),
            client_tls=tls.client_context(),
        )
    with joined(transport) as ends:
        yield ends


@pytest.fixture(name="slowly")
def fixture_slowly():
    """Takes a step again and again, until the end of the test."""
    is_over = threading.Event()
    running = []

    def begin(step):
        def run():
            try:
                while not is_over.wait(PACE):
                    step()
            except (ConnectionClosed, TransportTimeout):
                pass  # the other end has given up

        running.append(Background(run))

    yield begin
    is_over.set()
    for each in running:
        each.result()


def set_time(end):
    end.set_timeout(SECONDS, time.monotonic() + SECONDS)


def test_the_time_for_a_message_that_is_read_slowly_ends(ends, slowly):
    sender, receiver = ends
    slowly(lambda: receiver.receive_bytes(1 << 10))
    set_time(sender)
    buffers = [memoryview(bytearray(LENGTH))]
    sending = Background(lambda: sender.send(Kind.CALL, buffers=buffers))
    with pytest.raises(TransportTimeout):
        sending.result()


@pytest.mark.parametrize("buffer", [0, LENGTH], ids=["body", "buffer"])
def test_the_time_for_a_message_that_comes_slowly_ends(ends, slowly, buffer):
    receiver, sender = ends
    body = 0 if buffer else 1 << 24
    sender.send_bytes(pack_header(Kind.REPLY, 0, int(buffer > 0), 1, -1, -1, body))
    if buffer:
        sender.send_bytes(BUFFER.pack(buffer, 0, 0))
    slowly(lambda: sender.send_bytes(bytes(1 << 10)))
    set_time(receiver)
    with pytest.raises(TransportTimeout):
        Background(receiver.receive).result()


def test_a_message_that_took_long_to_send_leaves_less_time_for_the_answer(ends):
    sender, receiver = ends
    sender.set_timeout(60.0, time.monotonic() + SECONDS)
    receiving = Background(receiver.receive)
    sender.send(Kind.CALL, body=[bytes(1 << 16)])
    receiving.result()
    with pytest.raises(TransportTimeout):
        Background(sender.receive).result()
