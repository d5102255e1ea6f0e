"""Messages over TLS: with the user's certificates, or anonymously, with the secret as the proof.

An anonymous session agrees on fresh keys (ECDHE) and encrypts and authenticates everything
(AES-GCM), but does not say with whom. That is what the handshake adds: both ends prove the secret
over the session's channel binding (`tls-unique`, RFC 5929), which differs between the two sessions
of a man in the middle. TLS 1.2 needs a certificate for this; the one in `anonymous.pem` is the same
everywhere, its key is public, and nobody checks it.

All sessions are of TLS 1.2, because Python gives no channel binding of TLS 1.3. `tls-unique` is
sound where sessions are neither resumed nor renegotiated, so both are switched off.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from telegrad.errors import ProtocolError
from telegrad.transport.base import ConnectionClosed, TransportTimeout
from telegrad.transport.socket_bytes import READ_AHEAD, is_ready
from telegrad.transport.stream import POOLED_FROM, SocketConnection
from telegrad.wire.frames import Limits
from telegrad.wire.tensor_table.memory import BufferPool

__all__ = ["TlsConnection", "anonymous_contexts", "restrict"]

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def restrict(context: ssl.SSLContext) -> None:
    """Allows only what the channel binding is sound with: see the top of this file."""
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION


def anonymous_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a listening and a connecting end that show no identity."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with resources.as_file(resources.files(__package__) / "anonymous.pem") as path:
        server.load_cert_chain(path)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    for context in (server, client):
        restrict(context)
    return server, client


_RECORD = 1 << 14  # the most bytes that TLS encrypts together


class TlsConnection(SocketConnection):
    """Over TLS, which has no gather-write and no kernel timeouts, and passes no descriptors.

    OpenSSL keeps one state for both directions, so its steps are taken one at a time, under a lock;
    nobody waits under it, for the socket does not block. (Newer Pythons have a lock of their own
    there, and hold it while a blocking read waits: a reader would stop all senders.)
    """

    _socket: ssl.SSLSocket

    def __init__(
        self, sock: ssl.SSLSocket, pool: BufferPool, limits: Limits, busy_wait: float = 0.0
    ) -> None:
        super().__init__(sock, pool, limits, busy_wait)
        sock.setblocking(False)
        self._step_lock = threading.RLock()  # one step of OpenSSL at a time

    def channel_binding(self) -> bytes:
        binding = self._socket.get_channel_binding("tls-unique")
        if not binding:  # the TLS handshake comes first
            raise ProtocolError("the TLS session has no channel binding")
        return binding

    def _write(self, parts: list[Any], descriptors: Sequence[int], total: int) -> None:
        small = b"".join(bytes(part) for part in parts if len(part) < POOLED_FROM)
        if sum(len(part) for part in parts) == len(small):
            parts = [small]
        for part in parts:
            left = memoryview(part).cast("B")
            while left:
                left = left[self._complete(lambda data=left: self._socket.send(data)) :]  # type: ignore[misc]

    def _write_what_fits(self, parts: list[Any], descriptors: Sequence[int]) -> None:
        # One record leaves as a whole or not at all, wherever Ctrl-C interrupts this thread. More
        # than one is left to a thread that no signal interrupts.
        self._rest = [b"".join(parts)] if sum(map(len, parts)) <= _RECORD else parts
        self.messages_begun += 1
        if len(self._rest) == 1:
            try:
                with self._step_lock:
                    self._socket.send(self._rest[0])
                self._rest = []
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                pass  # there is no room for it now
            except (OSError, ValueError) as error:
                self._rest = []
                raise ConnectionClosed(str(error)) from None
            except BaseException:
                self._rest = []
                raise

    def _read_into(self, target: memoryview) -> int:
        count = self._complete(lambda: self._socket.recv_into(target))
        if not count:
            raise ConnectionClosed("the other end closed the connection")
        self.reads += 1
        return count

    _read_rest = _read_into

    def _try_read(self, target: memoryview) -> int:
        try:
            with self._step_lock:
                count = self._socket.recv_into(target)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except (OSError, ValueError):
            return -1
        if not count:
            return -1
        self.reads += 1
        return count

    def _complete(self, step: Callable[[], int]) -> int:
        """Takes a step as soon as it can be taken, within the timeout."""
        end = self._until
        if end is None and self._timeout is not None:
            end = time.monotonic() + self._timeout
        if end is not None and time.monotonic() > end:
            raise TransportTimeout
        while True:
            try:
                with self._step_lock:
                    return step()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except ssl.SSLError as error:
                self.reads += 1  # something came, and it was no good
                # With bytes left unread, closing would reset the connection, and the other end
                # would not see the alert that OpenSSL has sent it.
                with contextlib.suppress(OSError):
                    socket.socket.recv(self._socket, READ_AHEAD)
                raise ConnectionClosed(f"TLS failed: {error.reason or error}") from None
            except (OSError, ValueError) as error:
                raise ConnectionClosed(str(error)) from None
            if end is not None and time.monotonic() >= end:
                raise TransportTimeout
            # Looks again after a second: the other direction may have read what this one waits for.
            left = 1.0 if end is None else min(1.0, end - time.monotonic())
            is_ready(self._socket, event, left)

    def poll(self) -> bool:
        if self._end > self._start:
            return True
        # That the socket is readable does not tell: it may be a part of a record. So read ahead.
        count = self._try_read(self._ahead)
        self._start, self._end = 0, max(0, count)
        return count != 0  # if it has ended, `receive` tells

    # What OpenSSL has read and not handed out does not show at the descriptor. That is the rest of
    # a record of which a part was read: neither sessions nor keys are renewed, and OpenSSL reads
    # no further than one record.

    def has_more(self) -> bool:
        return self._socket.pending() > 0 or super().has_more()

    def glance(self) -> bool:
        return super().glance() or self._socket.pending() > 0

    def rest(self) -> bool:
        return not self._socket.pending() and super().rest()

    def set_timeout(self, seconds: float | None, until: float | None = None) -> None:
        self._timeout, self._until = seconds, until

    def interrupt(self) -> None:
        try:
            # The plain socket's: `SSLSocket.shutdown` takes TLS away under a reader in it.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already, which is what was wanted
