"""Messages over TLS."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from telegrad.transport.base import ConnectionClosed, TransportTimeout
from telegrad.transport.socket_bytes import is_ready
from telegrad.transport.stream import POOLED_FROM, SocketConnection
from telegrad.wire.frames import Limits
from telegrad.wire.memory import BufferPool

__all__ = ["TlsConnection"]


class TlsConnection(SocketConnection):
    """Over TLS, which has no gather-write, no kernel timeouts and no descriptors.

    OpenSSL keeps one state for both directions, so its steps are taken one at a time, under a lock;
    nobody waits under it, for the socket does not block. (Newer Pythons have a lock of their own
    there, and hold it while a blocking read waits: a reader would stop all senders.)
    """

    _socket: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, pool: BufferPool, limits: Limits) -> None:
        super().__init__(sock, pool, limits)
        sock.setblocking(False)
        self._step_lock = threading.Lock()  # one step of OpenSSL at a time

    def _write(self, parts: list[Any], descriptors: Sequence[int], total: int) -> None:
        small = b"".join(bytes(part) for part in parts if len(part) < POOLED_FROM)
        if sum(len(part) for part in parts) == len(small):
            parts = [small]
        for part in parts:
            left = memoryview(part).cast("B")
            while left:
                left = left[self._complete(lambda data=left: self._socket.send(data)) :]  # type: ignore[misc]

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
        # That the socket is readable does not tell: TLS has messages of its own. So read ahead.
        count = self._try_read(self._ahead)
        self._start, self._end = 0, max(0, count)
        return count != 0  # if it has ended, `receive` tells

    def fileno(self) -> int:
        return -1  # that the socket is readable does not tell: TLS has messages of its own

    def set_timeout(self, seconds: float | None, until: float | None = None) -> None:
        self._timeout, self._until = seconds, until

    def interrupt(self) -> None:
        try:
            # The plain socket's: `SSLSocket.shutdown` takes TLS away under a reader in it.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already, which is what was wanted
