"""Strangers on the port, wrong secrets, certificates and limits. Real processes and sockets."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import socket
import ssl
import struct
import threading
import time

import pytest
import torch

from certificates import Authority
from telegrad import rpc
from telegrad.errors import AuthenticationError, ProtocolError, SerializationError, WorkerLost
from telegrad.rpc.connections import acceptor
from telegrad.rpc.group import current
from telegrad.testing.cluster import cluster, processes
from telegrad.transport.base import ConnectionClosed
from telegrad.transport.handshake import Identity, Purpose, answer, introduce
from telegrad.transport.inproc import InprocTransport
from telegrad.transport.stream import SocketConnection
from telegrad.wire.frames import PROTOCOL_VERSION, Kind, Limits, pack_header
from telegrad.wire.tensor_table.memory import BufferPool

PATIENCE = 15.0


def add(a, b):
    return a + b


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def own_address():
    """Where this process's worker listens by TCP."""
    (address,) = current.current().agent.network._acceptor.addresses
    host, _, port = address.partition(":")[2].rpartition(":")
    return host, int(port)


def strangers_here():
    return len(current.current().agent.network._acceptor._pending)


def threads_here():
    return threading.active_count()


def descriptors_here():
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def knocking():
    """A stranger's bare socket to worker0."""
    with socket.create_connection(own_address()) as stranger:
        stranger.settimeout(PATIENCE)
        yield stranger


def reply_to(sock, data):
    """Says something and no more; what a stranger gets until the worker hangs up."""
    got = b""
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(1 << 16):
            got += data
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        # hung up with our bytes unread
    return got


HELLO = b"TGRD" + struct.pack("<H", PROTOCOL_VERSION) + bytes(16)
SERVER_GREETING = 22  # its hello: nothing that depends on the secret


class Bomb:
    def __reduce__(self):
        return os.mkdir, (Bomb.path,)


STRANGERS = {
    "random bytes": (secrets.token_bytes(4096), "does not speak telegrad's protocol"),
    "HTTP": (b"GET / HTTP/1.1\r\nHost: worker0\r\n\r\n", "does not speak telegrad's protocol"),
    "half a hello": (HELLO[:10], "did not introduce itself"),
    "a hello and no proof": (HELLO, "did not introduce itself"),
    "half a proof": (HELLO + bytes(30), "did not introduce itself"),
    "a wrong proof": (HELLO + bytes(41 + 32), "does not know the cluster's secret"),
    "another version": (
        b"TGRD" + struct.pack("<H", PROTOCOL_VERSION + 1) + bytes(16),
        f"speaks version {PROTOCOL_VERSION + 1} of the protocol",
    ),
    "a frame without a handshake": (
        pack_header(Kind.CALL, 0, 0, 0, -1, -1, 5) + b"hello",
        "does not speak telegrad's protocol",
    ),
    "a huge length": (
        pack_header(Kind.CALL, 0, 0xFFFF, 0, -1, -1, 0xFFFFFFFF),
        "does not speak telegrad's protocol",
    ),
    "a huge length behind a hello": (HELLO + b"\xff" * 4096, "does not know the cluster's secret"),
}


@pytest.fixture(scope="class")
def group():
    """Without encryption, so that bare sockets can say what they like."""
    with cluster(2, transport="tcp", encrypt=False) as running:
        yield running


@pytest.mark.usefixtures("group")
class TestStrangers:
    @pytest.fixture(autouse=True)
    def _quiet(self, group):
        """Complaints are said once: let each test hear its own."""
        current.current().agent.network._acceptor._warned.clear()
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        self.before = threads_here(), descriptors_here()
        yield
        until(lambda: strangers_here() == 0)
        until(lambda: threads_here() <= self.before[0])
        until(lambda: descriptors_here() <= self.before[1])
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        assert rpc.rpc_sync("worker1", rpc.rpc_sync, ("worker0", add, (1, 1))) == 2

    @pytest.mark.parametrize("name", STRANGERS)
    def test_a_stranger_gets_nothing_and_is_logged_once(self, name, caplog):
        data, complaint = STRANGERS[name]
        with caplog.at_level(logging.WARNING, "telegrad"):
            for _ in range(3):
                with knocking() as stranger:
                    assert len(reply_to(stranger, data)) <= SERVER_GREETING
            until(lambda: strangers_here() == 0)
        assert [r.getMessage() for r in caplog.records if complaint in r.getMessage()], caplog.text
        assert len(caplog.records) == 1, caplog.text
        assert "worker0" in caplog.text

    def test_one_who_looks_in_and_leaves_is_not_worth_a_word(self, caplog):
        with caplog.at_level(logging.WARNING, "telegrad"):
            for _ in range(5):
                with knocking():
                    pass
            until(lambda: strangers_here() == 0)
        assert not caplog.records

    @pytest.mark.parametrize("drip", [False, True], ids=["silent", "a byte now and then"])
    def test_one_who_does_not_get_on_with_it_is_dismissed(self, caplog, monkeypatch, drip):
        monkeypatch.setattr(acceptor, "_HANDSHAKE_SECONDS", 0.3)
        begun = time.monotonic()
        with caplog.at_level(logging.WARNING, "telegrad"), knocking() as stranger:
            stranger.settimeout(0.02)
            sent = 0
            while True:
                try:
                    assert stranger.recv(1) == b""
                    break
                except TimeoutError:
                    assert time.monotonic() - begun < PATIENCE
                    if drip and sent < len(HELLO):
                        stranger.send(HELLO[sent : sent + 1])
                        sent += 1
        assert time.monotonic() - begun < 2.0
        assert "did not say who it is" in caplog.text

    def test_a_crowd_of_silent_pending_does_not_lock_friends_out(self, caplog):
        with contextlib.ExitStack() as stack:
            with caplog.at_level(logging.WARNING, "telegrad"):
                crowd = [stack.enter_context(knocking()) for _ in range(200)]
                until(lambda: strangers_here() == acceptor._MOST_PENDING)
                # a friend who has to make new connections
                rpc.rpc_sync("worker1", call_from_many_threads, ("worker0", 10))
            assert len(crowd) == 200
            self.before = self.before[0] + 12, self.before[1] + 12  # the friend's lanes stay
            assert threads_here() <= self.before[0] + acceptor._MOST_PENDING
        assert len([r for r in caplog.records if "did not say who it is" in r.getMessage()]) == 1

    def test_nothing_is_unpickled_before_the_proof(self, tmp_path):
        Bomb.path = str(tmp_path / "exploded")
        bomb = pickle.dumps(Bomb())
        call = pack_header(Kind.CALL, 0, 0, 0, -1, -1, 2 + len(bomb)) + b"\0\0" + bomb
        for data in (bomb, call, HELLO + bomb, HELLO + bytes(41 + 32) + call):
            with knocking() as stranger:
                assert len(reply_to(stranger, data)) <= SERVER_GREETING
        assert not os.path.exists(Bomb.path)
        with pytest.raises(FileNotFoundError):  # it is a real one
            os.rmdir(Bomb.path)
        pickle.loads(bomb)
        os.rmdir(Bomb.path)

    def test_a_friend_must_mean_this_worker_and_belong_to_the_group(self, caplog):
        own = current.current().agent.network
        other = own.members.peer(1)
        right = Identity(1, 0, Purpose.LANE, other.incarnation, own.incarnation)
        for wrong in (
            right._replace(target_id=7),
            right._replace(target_incarnation=bytes(16)),
            right._replace(worker_id=7),
            right._replace(incarnation=bytes(16)),
            right._replace(worker_id=0, incarnation=own.incarnation),
            right._replace(purpose=9),
        ):
            with knocking() as friend:
                connection = SocketConnection(friend, BufferPool(), Limits())
                connection.set_timeout(PATIENCE)
                with pytest.raises(ConnectionClosed):
                    introduce(connection, own._key, wrong)
                    connection.receive()
        assert "it looks for another worker" in caplog.text
        assert "is not part of the group" in caplog.text

    def test_a_friend_who_breaks_the_protocol_loses_that_connection_only(self, caplog):
        own = current.current().agent.network
        identity = Identity(1, 0, Purpose.LANE, own.members.peer(1).incarnation, own.incarnation)
        with knocking() as friend:
            connection = SocketConnection(friend, BufferPool(), Limits())
            connection.set_timeout(PATIENCE)
            introduce(connection, own._key, identity)
            connection.send(Kind.CALL, call_id=3, body=[b"\xff\xff\xff\xff"])
            assert connection.receive().kind is Kind.ERROR  # undecodable: fails its call only
            connection.send_bytes(bytes(36))
            with pytest.raises(ConnectionClosed):
                connection.receive()
        assert "worker 'worker1' broke the protocol" in caplog.text


def call_from_many_threads(to, count):
    failures = []

    def call():
        try:
            assert rpc.rpc_sync(to, nap) is None
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def nap():
    time.sleep(0.05)


# -- the handshake itself


@contextlib.contextmanager
def shaking():
    transport = InprocTransport()
    listener = transport.listen()
    client = transport.connect(listener.address, 1.0)
    server = listener.accept()
    client.set_timeout(PATIENCE)
    server.set_timeout(PATIENCE)
    yield client, server
    client.close()
    listener.close()


IDENTITY = Identity(3, 4, Purpose.MULTIPLEX, b"i" * 16, b"t" * 16)


def in_background(function):
    result = []

    def run():
        try:
            result.append(function())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join(PATIENCE)
        return result[0]

    return join


def test_friends_learn_who_the_other_is():
    with shaking() as (client, server):
        answered = in_background(lambda: answer(server, b"secret", 4, b"t" * 16))
        introduce(client, b"secret", IDENTITY)
        assert answered() == IDENTITY


def test_a_client_that_knows_another_secret_gets_no_proof():
    with shaking() as (client, server):
        answered = in_background(lambda: answer(server, b"another", 4, b"t" * 16))
        introduced = in_background(lambda: introduce(client, b"secret", IDENTITY))
        assert isinstance(answered(), AuthenticationError)
        server.close()
        assert "without proving that it knows" in str(introduced())


def test_a_client_notices_an_impostor():
    with shaking() as (client, server):
        introduced = in_background(lambda: introduce(client, b"secret", IDENTITY))
        server.send_bytes(HELLO + bytes(32))
        assert isinstance(introduced(), AuthenticationError)


def test_a_worker_answers_only_for_its_own_life():
    for own_id, incarnation in ((4, b"u" * 16), (5, b"t" * 16)):
        with shaking() as (client, server):
            answered = in_background(
                lambda server=server, own_id=own_id, incarnation=incarnation: answer(
                    server, b"secret", own_id, incarnation
                )
            )
            introduced = in_background(lambda client=client: introduce(client, b"secret", IDENTITY))
            assert "looks for another worker" in str(answered())
            server.close()
            assert isinstance(introduced(), ConnectionClosed)


def test_a_proof_cannot_be_replayed_or_moved():
    """What a listener on the wire has recorded opens no second connection."""
    recorded = []
    with shaking() as (client, server):
        original = client.send_bytes
        client.send_bytes = lambda data: (recorded.append(data), original(data))
        answered = in_background(lambda: answer(server, b"secret", 4, b"t" * 16))
        introduce(client, b"secret", IDENTITY)
        answered()
    for last in (recorded[1], recorded[1][:4] + b"\7" + recorded[1][5:]):
        with shaking() as (client, server):
            answered = in_background(lambda server=server: answer(server, b"secret", 4, b"t" * 16))
            client.send_bytes(recorded[0])
            client.receive_bytes(SERVER_GREETING)
            client.send_bytes(last)
            assert isinstance(answered(), AuthenticationError)


def test_a_proof_cannot_be_used_elsewhere():
    """An impostor to whom a friend proves itself gets in nowhere by that."""
    with shaking() as (client, server):
        answered = in_background(lambda: answer(server, b"secret", 4, b"t" * 16))
        client.send_bytes(HELLO)
        client.receive_bytes(SERVER_GREETING)
        with shaking() as (friend, here):
            introduced = in_background(lambda: introduce(friend, b"secret", IDENTITY))
            here.receive_bytes(len(HELLO))
            here.send_bytes(HELLO)
            client.send_bytes(here.receive_bytes(41 + 32))
            assert isinstance(answered(), AuthenticationError)
            here.close()
            assert isinstance(introduced(), ConnectionClosed)


def test_versions_are_told_apart():
    with shaking() as (client, server):
        answered = in_background(lambda: answer(server, b"secret", 4, b"t" * 16))
        client.send_bytes(b"TGRD\xff\xff" + bytes(16))
        error = answered()
        assert isinstance(error, ProtocolError)
        assert "install the same telegrad" in str(error)


# -- groups


def join_with(options, line):
    """A worker with options of its own; says what its call ended in."""
    try:
        rpc.init_rpc("outsider", rank=1, world_size=2, rpc_backend_options=options)
        line.send(repr(rpc.rpc_sync("worker0", add, (1, 1), timeout=5)))
    except Exception as error:
        line.send(f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(EOFError):
            line.recv()  # both have tried
        if rpc.is_initialized():
            rpc.shutdown(graceful=False)


def outsider(tmp_path, mine, theirs):
    """Starts a group whose second worker has other options; both ends' outcomes."""
    init_method = f"file://{tmp_path}/store"
    line, far_line = processes.Pipe()
    other = rpc.RpcOptions(init_method=init_method, transport="tcp", **theirs)
    process = processes.Process(target=join_with, args=(other, far_line))
    process.start()
    far_line.close()
    options = rpc.RpcOptions(init_method=init_method, transport="tcp", **mine)
    rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
    try:
        with pytest.raises(WorkerLost) as caught:
            rpc.rpc_sync("outsider", add, (1, 1), timeout=5)
        assert line.poll(PATIENCE)
        return line.recv(), str(caught.value)
    finally:
        line.send("end")
        rpc.shutdown(graceful=False)
        process.join(PATIENCE)
        process.close()
        line.close()


class TestGroups:
    """Groups that are made for one test."""

    def test_a_worker_with_another_secret_can_neither_call_nor_be_called(self, tmp_path):
        theirs, mine = outsider(tmp_path, {"secret": "right"}, {"secret": "wrong"})
        assert "WorkerLost" in theirs
        for text in (theirs, mine):
            assert "without proving that it knows the cluster's secret" in text, text

    def test_a_worker_without_certificates_is_refused(self, tmp_path):
        tls = Authority(tmp_path).worker("worker")
        theirs, mine = outsider(tmp_path, {"tls": tls}, {})
        for text in (theirs, mine):
            assert "give both the same transport and TLS options" in text, text

    def test_a_worker_of_another_authority_is_refused(self, tmp_path):
        mine = Authority(tmp_path).worker("worker")
        (tmp_path / "other").mkdir()
        other = Authority(tmp_path / "other", "other").worker("outsider")
        texts = outsider(tmp_path, {"tls": mine}, {"tls": other})
        for text in texts:
            assert "certificate" in text.lower(), text

    def test_mutual_tls_carries_a_group(self, tmp_path, caplog):
        tls = Authority(tmp_path).worker("worker")
        with cluster(3, transport="tcp", tls=tls):
            network_ = current.current().agent.network
            assert [address.partition(":")[0] for address in network_._acceptor.addresses] == [
                "tls"
            ]
            large = torch.arange(1 << 20)
            assert torch.equal(rpc.rpc_sync("worker1", add, (large, 1)), large + 1)
            futures = [rpc.rpc_async("worker2", add, (large[:1000], i)) for i in range(100)]
            for i, future in enumerate(futures):
                assert torch.equal(future.wait(), large[:1000] + i)
            assert rpc.remote("worker1", add, (1, 2)).to_here() == 3
            assert rpc.rpc_sync("worker1", rpc.rpc_sync, ("worker2", add, (1, 2))) == 3
            # who speaks no TLS, or shows no certificate, gets nothing
            with caplog.at_level(logging.WARNING, "telegrad"):
                with knocking() as stranger:
                    assert b"TGRD" not in reply_to(stranger, HELLO)
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.load_verify_locations(tls.authority)
                with knocking() as stranger, pytest.raises((ssl.SSLError, OSError)):
                    greet_over_tls(context, stranger)
                until(lambda: strangers_here() == 0)
            assert "TLS failed" in caplog.text
            assert rpc.rpc_sync("worker1", add, (1, 1)) == 2

    def test_workers_of_one_host_listen_on_loopback_or_not_at_all(self):
        with cluster(2, transport="tcp"):
            for worker in ("worker0", "worker1"):
                addresses = rpc.rpc_sync(worker, listening_addresses)
                assert addresses == ["127.0.0.1"], addresses
        with cluster(2):
            for worker in ("worker0", "worker1"):
                assert rpc.rpc_sync(worker, listening_addresses) == []

    def test_messages_beyond_the_limits_fail_their_call_only(self):
        limits = Limits(max_body=200_000, max_buffers=10, max_message=2_000_000)
        with cluster(2, limits=limits):
            assert rpc.rpc_async("worker1", echo, (1,)).wait() == 1
            too_large = [
                (b"x" * 300_000, "max_body"),
                (torch.zeros(1_000_000), "max_message"),
                ([torch.zeros(50_000) for _ in range(11)], "max_buffers"),
            ]
            for value, limit in too_large:
                for call in (
                    lambda value=value: rpc.rpc_sync("worker1", echo, (value,)),
                    lambda value=value: rpc.rpc_async("worker1", echo, (value,)),
                    lambda value=value: rpc.remote("worker1", echo, (value,)),
                    lambda value=value: rpc.rpc_sync("worker0", echo, (value,)),
                ):
                    with pytest.raises(SerializationError, match=rf"too large.*{limit}"):
                        call()
            peer = current.current().agent.network.members.peer(1)
            multiplexes = list(peer._multiplexes)
            for make, limit in ((make_bytes, "max_body"), (make_tensor, "max_message")):
                with pytest.raises(SerializationError, match=rf"result is too large.*{limit}"):
                    rpc.rpc_sync("worker1", make)
                with pytest.raises(SerializationError, match=rf"result is too large.*{limit}"):
                    rpc.rpc_async("worker1", make).wait()
                with pytest.raises(SerializationError, match=rf"too large.*{limit}"):
                    rpc.remote("worker1", make).to_here()
            with pytest.raises(RuntimeError, match="a long story"):
                rpc.rpc_sync("worker1", fail_at_length)
            assert len(rpc.rpc_sync("worker1", echo, (b"x" * 190_000,))) == 190_000
            assert rpc.rpc_sync("worker1", echo, (torch.zeros(400_000),)).numel() == 400_000
            assert not any(multiplex.is_closed for multiplex in multiplexes)
            assert not peer.is_lost


def greet_over_tls(context, stranger):
    with context.wrap_socket(stranger, server_hostname="127.0.0.1") as sock:
        sock.sendall(HELLO)
        if not sock.recv(100):  # in TLS 1.3 the refusal comes after the client's handshake
            raise ConnectionResetError


def listening_addresses():
    """The addresses of this process's listening TCP sockets."""
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in listed_descriptors()}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(table, encoding="ascii") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    raw = bytes.fromhex(fields[1].partition(":")[0])
                    found.append(socket.inet_ntoa(raw[::-1]) if len(raw) == 4 else raw.hex())
    return found


def listed_descriptors():
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.readlink(f"/proc/self/fd/{fd}")
            yield fd


def echo(value):
    return value


def make_bytes():
    return b"x" * 300_000


def make_tensor():
    return torch.zeros(1_000_000)


def fail_at_length():
    raise ValueError("a long story" * 100_000)
