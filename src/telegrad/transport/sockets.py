"""Where sockets come from: listening at, and connecting to, Unix, TCP and TLS addresses."""

from __future__ import annotations

import secrets
import socket
import ssl

from telegrad.forks import leave_at_fork
from telegrad.transport.base import Connection, ConnectionClosed
from telegrad.transport.same_host.spinning import DEFAULT_WINDOW
from telegrad.transport.stream import SocketConnection
from telegrad.transport.tls import TlsConnection
from telegrad.wire.frames import Limits
from telegrad.wire.tensor_table.memory import BufferPool

__all__ = ["SocketListener", "TcpTransport", "UnixTransport"]

_MOST_PROBES = 127  # the kernel's limit


class SocketListener:
    """Accepts connections; the transport says how one becomes a message stream."""

    def __init__(self, transport: UnixTransport | TcpTransport, sock: socket.socket, at: str):
        self._transport = transport
        self._socket = sock
        self._address = at
        leave_at_fork(self)

    @property
    def address(self) -> str:
        return self._address

    def accept(self) -> Connection:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                raise ConnectionClosed(str(error)) from None
            try:
                return self._transport.accepted(sock)
            except OSError:
                sock.close()  # it has gone already: the next one

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread inside accept
        except OSError:
            pass  # not every system allows it on a listener; closing is enough there
        self._socket.close()

    def leave_to_parent(self) -> None:
        self._socket.close()


class UnixTransport:
    """Sockets between processes of one host, in the abstract namespace: no file is left behind."""

    def __init__(
        self, pool: BufferPool, limits: Limits, *, busy_wait: float = DEFAULT_WINDOW
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._busy_wait = busy_wait

    def listen(self) -> SocketListener:
        name = f"telegrad-{secrets.token_hex(12)}"
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind("\0" + name)
            sock.listen(1024)
        except BaseException:
            sock.close()
            raise
        return SocketListener(self, sock, f"unix:@{name}")

    def accepted(self, sock: socket.socket) -> Connection:
        return SocketConnection(sock, self._pool, self._limits, self._busy_wait)

    def connect(self, address: str, timeout: float) -> Connection:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout)
            sock.connect("\0" + address.removeprefix("unix:@"))
            sock.settimeout(None)
        except OSError as error:
            sock.close()
            raise ConnectionClosed(str(error)) from None
        return SocketConnection(sock, self._pool, self._limits, self._busy_wait)


class TcpTransport:
    """TCP, with or without TLS.

    Args:
        scheme: how addresses of this kind begin.
        host: the address to listen at.
        port: 0 lets the system choose.
        server_tls, client_tls: contexts of both ends of a session; without them nothing is
            encrypted.
        busy_wait: seconds to look for a message before sleeping.
        heartbeat: seconds between signs of life, and seconds of silence that mean a loss.
    """

    def __init__(
        self,
        pool: BufferPool,
        limits: Limits,
        *,
        scheme: str = "tcp",
        host: str = "127.0.0.1",
        port: int = 0,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        busy_wait: float = DEFAULT_WINDOW,
        heartbeat: tuple[float, float] = (2.0, 30.0),
    ) -> None:
        self._busy_wait = busy_wait
        self._heartbeat = heartbeat
        self._pool = pool
        self._limits = limits
        self._scheme = scheme
        self._host = host
        self._port = port
        self._server_tls = server_tls
        self._client_tls = client_tls

    def listen(self) -> SocketListener:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.create_server((self._host, self._port), family=family, backlog=1024)
        port = sock.getsockname()[1]
        return SocketListener(self, sock, f"{self._scheme}:{self._host}:{port}")

    def accepted(self, sock: socket.socket) -> Connection:
        self._prepare(sock)
        if self._server_tls is None:
            return SocketConnection(sock, self._pool, self._limits, self._busy_wait)
        # The TLS handshake happens at the first read, in the thread of this connection: a silent
        # stranger must not keep the listener busy.
        wrapped = self._server_tls.wrap_socket(
            sock, server_side=True, do_handshake_on_connect=False
        )
        return TlsConnection(wrapped, self._pool, self._limits, self._busy_wait)

    def _prepare(self, sock: socket.socket) -> None:
        """Lets the kernel end a connection that the network has forgotten, in about the time after
        which the heartbeat would: only one of several connections has a heartbeat."""
        interval, timeout = self._heartbeat
        pause = max(1, round(min(interval, timeout / 2)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
        probes = min(max(1, round((timeout - pause) / pause)), _MOST_PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout * 1000))

    def connect(self, address: str, timeout: float) -> Connection:
        _, _, rest = address.partition(":")
        host, _, port = rest.rpartition(":")
        sock: socket.socket | None = None
        try:
            sock = socket.create_connection((host, int(port)), timeout)
            self._prepare(sock)
            if self._client_tls is not None:
                sock = self._client_tls.wrap_socket(sock, server_hostname=host)
                sock.settimeout(None)
                return TlsConnection(sock, self._pool, self._limits, self._busy_wait)
            sock.settimeout(None)
        except OSError as error:
            if sock is not None:
                sock.close()
            raise ConnectionClosed(str(error)) from None
        return SocketConnection(sock, self._pool, self._limits, self._busy_wait)
