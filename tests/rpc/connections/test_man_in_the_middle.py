"""What others can do with the network, the store, the sockets and the files of a group.

The attacks are real: relays that rewrite addresses in the store, connections from another network
namespace, and processes of another user.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from certificates import Authority
from namespaces import two_hosts
from telegrad import rpc
from telegrad.errors import TelegradError, WorkerLost
from telegrad.rpc.group import current, private_files
from telegrad.rpc.group.directory import Directory
from telegrad.testing.cluster import cluster
from telegrad.transport import handshake
from telegrad.transport.base import ConnectionClosed
from telegrad.transport.sockets import TcpTransport
from telegrad.transport.tls import anonymous_contexts
from telegrad.wire.frames import PROTOCOL_VERSION, Kind, Limits, pack_header
from telegrad.wire.tensor_table.memory import BufferPool

PATIENCE = 30.0
NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")


def add(a, b):
    return a + b


def own_address():
    (address,) = current.current().agent.network._acceptor.addresses
    host, _, port = address.partition(":")[2].rpartition(":")
    return host, int(port)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def call_that_makes(path):
    name = b"builtins\0id"
    body = struct.pack("<H", len(name)) + name + pickle.dumps(((Bomb(path),), {}), protocol=5)
    return pack_header(Kind.CALL, 1, 0, 777, -1, -1, len(body)) + body


class Relay:
    """Listens in the place of a worker and passes everything on, as it is or changed.

    Args:
        tls: speaks a TLS session of its own with each end, and so reads and changes what is inside.
        change: gets the bytes from the client and how many came before them.
    """

    def __init__(self, target, *, tls=False, change=lambda data, before: data):
        self._target = target
        self._tls = anonymous_contexts() if tls else None
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = []
        self._sockets = [self._listener]
        self.seen = b""
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def _start(self, target, *args):
        thread = threading.Thread(target=target, args=args)
        thread.start()
        self._threads.append(thread)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                self._start(self._serve, self._listener.accept()[0])

    def _serve(self, client):
        server = socket.create_connection(self._target)
        self._sockets += [client, server]
        with contextlib.suppress(OSError):
            if self._tls is not None:
                client = self._tls[0].wrap_socket(client, server_side=True)
                server = self._tls[1].wrap_socket(server)
                self._sockets += [client, server]
            self._start(self._pump, server, client, False)
            self._pump(client, server, True)

    def _pump(self, source, target, is_forth):
        count = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                changed = self._change(data, count) if is_forth else data
                count += len(data)
                target.sendall(changed)
        for end in (source, target):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(end, socket.SHUT_RDWR)

    def close(self):
        for end in self._sockets:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(end, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for end in self._sockets:
            end.close()


@contextlib.contextmanager
def relayed(**options):
    """A worker outside of any group's store, and a transport that reaches it through a relay."""
    relay = Relay(own_address(), **options)
    try:
        yield relay
    finally:
        relay.close()


def through(relay, before_call=lambda: None):
    """Calls worker0 as worker1 would, at the relay's address."""
    own = current.current().agent.network
    server, client = anonymous_contexts()
    transport = TcpTransport(BufferPool(), Limits(), server_tls=server, client_tls=client)
    connection = transport.connect(relay.address, PATIENCE)
    connection.set_timeout(PATIENCE)
    identity = handshake.Identity(
        1, 0, handshake.Purpose.LANE, own.members.peer(1).incarnation, own.incarnation
    )
    try:
        handshake.introduce(connection, own._key, identity)
        before_call()
        body = b"builtins\0abs"
        body = struct.pack("<H", len(body)) + body + pickle.dumps(((-7,), {}), protocol=5)
        connection.send(Kind.CALL, call_id=1, body=[body])
        return connection.receive()
    finally:
        connection.close()


@pytest.fixture(scope="class")
def group():
    with cluster(2, transport="tcp", secret="s" * 20):
        yield


@pytest.mark.usefixtures("group")
class TestManInTheMiddle:
    def test_one_who_passes_bytes_on_sees_nothing_of_them(self):
        with relayed() as relay:
            assert through(relay).kind is Kind.REPLY
            assert b"TGRD" not in relay.seen
            assert b"builtins" not in relay.seen

    def test_one_with_sessions_of_its_own_is_refused_by_the_worker(self, tmp_path, caplog):
        path = str(tmp_path / "made")
        evil = call_that_makes(path)

        def inject(data, before):
            return data + evil if before >= 22 else data

        with relayed(tls=True, change=inject) as relay:
            with pytest.raises(ConnectionClosed, match="without proving"):
                through(relay)
            assert b"TGRD" in relay.seen  # it was in between
        assert "does not know the cluster's secret" in caplog.text
        assert not os.path.exists(path)

    def test_a_changed_byte_ends_the_connection(self):
        is_open = threading.Event()

        def change(data, _before):
            return data[:-1] + bytes([data[-1] ^ 1]) if is_open.is_set() else data

        with relayed(change=change) as relay, pytest.raises(ConnectionClosed):
            through(relay, is_open.set)
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2

    def test_added_bytes_end_the_connection(self, tmp_path):
        path = str(tmp_path / "made")
        is_open = threading.Event()

        def add_call(data, _before):
            return data + call_that_makes(path) if is_open.is_set() else data

        with relayed(change=add_call) as relay:
            with contextlib.suppress(ConnectionClosed):  # or the answer comes before
                through(relay, is_open.set)
        assert not os.path.exists(path)


def test_a_rewritten_address_in_the_store_leads_nowhere(monkeypatch):
    """The relay stands where the store says that worker1 is."""
    with cluster(2, transport="tcp"):
        network = current.current().agent.network
        record = network.members.record_of(1)
        host, _, port = record.addresses[0].partition(":")[2].rpartition(":")
        relay = Relay((host, int(port)), tls=True)
        try:
            peer = network.members.peer(1)
            rewritten = replace(record, addresses=[relay.address])
            monkeypatch.setattr(network.members, "record_of", lambda _: rewritten)
            with pytest.raises(WorkerLost, match="without proving that it knows"):
                network._connect(peer, handshake.Purpose.LANE, None)
            assert b"TGRD" in relay.seen
        finally:
            monkeypatch.undo()
            relay.close()


class TestCertificates:
    def test_sessions_with_certificates_are_bound_too(self, tmp_path):
        tls = Authority(tmp_path).worker("worker")
        bindings = []
        transport = TcpTransport(
            BufferPool(),
            Limits(),
            server_tls=tls.server_context(),
            client_tls=tls.client_context(),
        )
        listener = transport.listen()

        def serve():
            connection = listener.accept()
            connection.receive_bytes(1)
            bindings.append(connection.channel_binding())
            connection.send_bytes(b"y")
            connection.close()

        for _ in range(2):
            thread = threading.Thread(target=serve)
            thread.start()
            client = transport.connect(listener.address, PATIENCE)
            client.send_bytes(b"x")
            client.receive_bytes(1)
            bindings.append(client.channel_binding())
            thread.join(PATIENCE)
            client.close()
        listener.close()
        assert bindings[0] == bindings[1] != bindings[2] == bindings[3]
        assert all(bindings)

    def test_encryption_cannot_be_off_with_certificates(self, tmp_path):
        with pytest.raises(ValueError, match="need encryption"):
            rpc.RpcOptions(tls=Authority(tmp_path).worker("worker"), encrypt=False)


class TestWithoutEncryption:
    def test_calls_work_and_can_be_read(self):
        with cluster(2, transport="tcp", encrypt=False):
            assert current.current().agent.network._acceptor.addresses[0].startswith("plain:")
            assert rpc.rpc_sync("worker1", add, (1, 1)) == 2

    def test_it_must_be_off_on_both_sides(self, tmp_path):
        options = rpc.RpcOptions(init_method=f"file://{tmp_path}/store", transport="tcp")
        program = PROGRAM.format(
            rank=1,
            size=2,
            options=f"init_method={options.init_method!r}, transport='tcp', encrypt=False",
            then="sys.stdin.read(1); os._exit(0)",
        )
        other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
        try:
            rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=options)
            with pytest.raises(WorkerLost, match="give both the same transport and TLS options"):
                rpc.rpc_sync("w1", add, (1, 1))
        finally:
            if rpc.is_initialized():
                rpc.shutdown(graceful=False)
            other.communicate(b"x", timeout=PATIENCE)


PROGRAM = textwrap.dedent(
    """
    import os, sys, telegrad.rpc as rpc
    try:
        rpc.init_rpc("w{rank}", rank={rank}, world_size={size},
            rpc_backend_options=rpc.RpcOptions({options}))
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        os._exit(1)
    {then}
    """
)


# -- secrets


class TestWeakSecrets:
    def test_a_stranger_gets_nothing_to_guess_with(self):
        with cluster(2, transport="tcp", secret="hunter2"):
            for speaks_tls in (False, True):
                with socket.create_connection(own_address(), PATIENCE) as sock:
                    if speaks_tls:
                        sock = anonymous_contexts()[1].wrap_socket(sock)
                    hello = b"TGRD" + struct.pack("<H", PROTOCOL_VERSION) + bytes(16)
                    got = b""
                    with contextlib.suppress(OSError):
                        sock.sendall(hello + bytes(41 + 32))
                        while data := sock.recv(1 << 16):
                            got += data
                    assert len(got) <= 22, got
                    sock.close()

    def test_what_a_person_thinks_up_is_expensive_to_try(self):
        handshake.derive_key.cache_clear()
        begun = time.thread_time()
        keys = {handshake.derive_key(word) for word in (b"hunter2", b"hunter3")}
        assert len(keys) == 2
        assert time.thread_time() - begun > 0.02  # millions of times what an HMAC takes

    def test_a_generated_secret_needs_no_stretching(self, monkeypatch):
        monkeypatch.delattr(handshake.hashlib, "scrypt")
        assert len(handshake.derive_key(secrets.token_hex(32).encode())) == 32


class TestGroupsWithoutASecret:
    def test_several_machines_refuse_to_start(self, monkeypatch, caplog):
        monkeypatch.delenv("TELEGRAD_INSECURE", raising=False)
        directory = Directory(dist.HashStore(), 0, 2)
        with pytest.raises(TelegradError, match="export TELEGRAD_SECRET=") as caught:
            directory.secret(None, all_local=False)
        assert "TELEGRAD_INSECURE=1" in str(caught.value)
        assert directory.secret(b"given", all_local=False) == b"given"
        assert not caplog.records
        directory.secret(None, all_local=False, has_certificates=True)

    def test_the_way_out_warns(self, monkeypatch, caplog):
        monkeypatch.setenv("TELEGRAD_INSECURE", "1")
        store = dist.HashStore()
        made = Directory(store, 0, 2).secret(None, all_local=False)
        assert Directory(store, 1, 2).secret(None, all_local=False) == made
        assert "run any code" in caplog.text

    def test_on_one_machine_it_does_not_lie_in_the_store(self):
        store = dist.HashStore()
        secret = Directory(store, 0, 2).secret(None, all_local=True)
        assert not store.check(["secret"])
        assert secret == private_files.user_secret()

    def test_a_stranger_on_the_network_reaches_nothing(self, tmp_path):
        """A default group in one namespace, and every port there tried from another."""
        with two_hosts() as (here, there):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            environment = {
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TMPDIR": str(tmp_path),
            }
            environment.pop("TELEGRAD_SECRET", None)
            workers = [
                subprocess.Popen(
                    [
                        *("ip", "netns", "exec", here, sys.executable, "-c"),
                        PROGRAM.format(
                            rank=rank,
                            size=2,
                            options="",
                            then="print('ready', flush=True); sys.stdin.read(1); os._exit(0)",
                        ),
                    ],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank in range(2)
            ]
            try:
                assert [worker.stdout.readline() for worker in workers] == ["ready\n"] * 2
                listening = subprocess.run(
                    ("ip", "netns", "exec", here, "cat", "/proc/net/tcp", "/proc/net/tcp6"),
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout.splitlines()
                local = [line.split()[1] for line in listening if line.split()[3] == "0A"]
                assert local == [f"0100007F:{port:04X}"]
                tried = subprocess.run(
                    (
                        *("ip", "netns", "exec", there, sys.executable, "-c"),
                        f"import socket; socket.create_connection(('10.99.7.1', {port}), 5)",
                    ),
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert "ConnectionRefusedError" in tried.stderr
            finally:
                for worker in workers:
                    worker.communicate("x", timeout=PATIENCE)


# -- other users of the machine


def run_as_nobody(function, *args):
    """Runs a function in a process of another user; what it returns, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            text = str(function(*args))
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, text.encode())
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, encoding="utf-8") as pipe:
        return pipe.read()


def say_hello(name):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE)
        sock.connect("\0" + name)
        sock.sendall(b"TGRD" + struct.pack("<H", PROTOCOL_VERSION) + bytes(16))
        return len(sock.recv(100))


def read(path):
    with open(path, "rb") as file:
        return file.read()


@as_root
class TestOtherUsers:
    def test_the_worker_hangs_up_on_them(self, caplog):
        with cluster(2):
            name = current.current().agent.network._acceptor.addresses[0].removeprefix("unix:@")
            assert run_as_nobody(say_hello, name) == "0"
            assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        assert f"runs as user {NOBODY}" in caplog.text

    def test_a_worker_says_nothing_to_their_sockets(self, monkeypatch):
        """Another user has changed the address of a worker in the store to one of its own."""
        name = f"telegrad-test-{secrets.token_hex(8)}"
        program = textwrap.dedent(
            f"""
            import os, socket
            os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
            here = socket.socket(socket.AF_UNIX); here.bind("\\0{name}"); here.listen()
            print("ready", flush=True)
            print(here.accept()[0].recv(100), flush=True)
            """
        )
        with cluster(2):
            other = subprocess.Popen(
                [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
            )
            try:
                assert other.stdout.readline() == "ready\n"
                network = current.current().agent.network
                record = network.members.record_of(1)
                peer = network.members.peer(1)
                changed = replace(record, addresses=[f"unix:@{name}"])
                monkeypatch.setattr(network.members, "record_of", lambda _: changed)
                with pytest.raises(WorkerLost, match=f"runs as user {NOBODY}"):
                    network._connect(peer, handshake.Purpose.LANE, None)
                monkeypatch.undo()
                assert other.stdout.readline() == "b''\n"
            finally:
                other.kill()
                other.communicate()

    def test_they_can_read_neither_store_nor_secret(self, tmp_path, monkeypatch):
        monkeypatch.setattr(private_files.tempfile, "tempdir", str(tmp_path))
        for directory in (tmp_path, *tmp_path.parents[:-1]):
            if directory.stat().st_uid == 0 and not directory.stat().st_mode & 1:
                directory.chmod(0o711)
        private_files.user_secret()
        path = str(tmp_path / "store")
        private_files.claim_store_file(path)
        for private in (path, str(tmp_path / "telegrad-0" / "secret")):
            assert "PermissionError" in run_as_nobody(read, private)

    def test_their_files_are_refused(self, tmp_path):
        path = tmp_path / "store"
        path.touch(0o600)
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(TelegradError, match=f"belongs to user {NOBODY}"):
            private_files.claim_store_file(str(path))
        path.unlink()
        os.chown(tmp_path, NOBODY, NOBODY)
        with pytest.raises(TelegradError, match="could exchange the files"):
            private_files.claim_store_file(str(path))


class TestModes:
    def test_a_store_is_private(self, tmp_path):
        path = tmp_path / "store"
        options = rpc.RpcOptions(init_method=f"file://{path}")
        rpc.init_rpc("w0", rank=0, world_size=None, rpc_backend_options=options)
        try:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        finally:
            rpc.shutdown()

    @pytest.mark.parametrize("mode", [0o644, 0o620, 0o660, 0o604])
    def test_a_store_that_others_can_open_is_refused(self, tmp_path, mode):
        path = tmp_path / "store"
        path.touch()
        path.chmod(mode)
        with pytest.raises(TelegradError, match=f"has mode {mode:04o}"):
            rpc.init_rpc(
                "w0",
                rank=0,
                world_size=None,
                rpc_backend_options=rpc.RpcOptions(init_method=f"file://{path}"),
            )

    def test_a_link_in_its_place_is_refused(self, tmp_path):
        (tmp_path / "store").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(TelegradError, match="not a regular file"):
            private_files.claim_store_file(str(tmp_path / "store"))

    def test_a_directory_that_others_can_write_to_is_refused(self, tmp_path):
        tmp_path.chmod(0o777)
        with pytest.raises(TelegradError, match="chmod go-w"):
            private_files.claim_store_file(str(tmp_path / "store"))
        tmp_path.chmod(0o1777)  # like /tmp
        private_files.claim_store_file(str(tmp_path / "store"))

    def test_the_users_secret_is_private_and_stays(self, tmp_path, monkeypatch):
        monkeypatch.setattr(private_files.tempfile, "tempdir", str(tmp_path))
        secret = private_files.user_secret()
        assert private_files.user_secret() == secret
        directory = tmp_path / f"telegrad-{os.geteuid()}"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert [path.name for path in directory.iterdir()] == ["secret"]
        assert stat.S_IMODE((directory / "secret").stat().st_mode) == 0o600
        (directory / "secret").chmod(0o644)
        with pytest.raises(TelegradError, match="has mode 0644"):
            private_files.user_secret()
        directory.chmod(0o755)
        with pytest.raises(TelegradError, match="chmod 700"):
            private_files.user_secret()


# -- a port that has passed to another


def test_a_worker_rejoins_although_its_former_port_is_a_pending():
    with cluster(2, open_group=True, transport="tcp", connect_timeout=2.0) as group:
        address = current.current().agent.network.members.record_of(1).addresses[0]
        host, _, port = address.partition(":")[2].rpartition(":")
        group.kill("worker1")
        with socket.create_server((host, int(port))):  # never says a word
            group.start("worker1", 1)
            group.wait_until_ready("worker1")
            assert rpc.rpc_sync("worker1", add, (1, 1)) == 2


def test_a_rank_is_still_taken_while_its_worker_lives():
    with cluster(2, open_group=True, transport="tcp"):
        network = current.current().agent.network
        record = network.members.record_of(1)
        assert network.answers(record)
        assert not network.answers(replace(record, incarnation="00" * 16))
