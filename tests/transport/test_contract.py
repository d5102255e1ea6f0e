"""Every transport is held to one contract."""

from __future__ import annotations

import socket

import pytest

from certificates import Authority
from telegrad.testing.transport_contract import TransportContract
from telegrad.transport.inproc import InprocTransport
from telegrad.transport.same_host import mailbox
from telegrad.transport.same_host.shm import SharedMemory
from telegrad.transport.sockets import TcpTransport, UnixTransport
from telegrad.wire.frames import Kind, Limits
from telegrad.wire.tensor_table.memory import BufferPool


class TestUnix(TransportContract):
    def make_transport(self):
        return UnixTransport(BufferPool(), Limits())

    def connect_bare(self, address):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + address.removeprefix("unix:@"))
        return sock


class TestUnixWithSharedMemory(TestUnix):
    @pytest.fixture(autouse=True)
    def _memories(self):
        self.memories = SharedMemory(), SharedMemory()
        yield
        for memory in self.memories:
            memory.close()

    def prepare(self, connecting, accepting):
        for end, memory in zip((connecting, accepting), self.memories, strict=True):
            end.share_memory(memory)


@pytest.mark.skipif(not mailbox.is_available(), reason="there are no mailboxes on this processor")
class TestUnixWithMailbox(TestUnixWithSharedMemory):
    busy_wait = 1e-3

    def make_transport(self):
        return UnixTransport(BufferPool(), Limits(), busy_wait=self.busy_wait)

    def prepare(self, connecting, accepting):
        super().prepare(connecting, accepting)
        connecting.open_mailbox()
        connecting.send(Kind.PING)
        assert accepting.receive().kind is Kind.PING
        assert accepting._mailbox is not None


class TestUnixWithMailboxWhereAllFallAsleep(TestUnixWithMailbox):
    busy_wait = 1e-9


class TestTcp(TransportContract):
    host = "127.0.0.1"

    def make_transport(self):
        return TcpTransport(BufferPool(), Limits(), host=self.host)

    def connect_bare(self, address):
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        return socket.create_connection((host, int(port)))


class TestTcpOverIpv6(TestTcp):
    host = "::1"

    @pytest.fixture(autouse=True)
    def _has_ipv6(self):
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")


class TestTls(TransportContract):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _certificates(cls, tmp_path_factory):
        cls.tls = Authority(tmp_path_factory.mktemp("certificates")).worker("worker")

    def make_transport(self):
        return TcpTransport(
            BufferPool(),
            Limits(),
            server_tls=self.tls.server_context(),
            client_tls=self.tls.client_context(),
        )


class TestInproc(TransportContract):
    def make_transport(self):
        return InprocTransport()
