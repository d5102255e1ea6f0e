"""Bytes to and from a stream socket, with a buffer for bytes that are read ahead.

Written for few system calls: gather-writes, and reads of as much as there is. Large buffers are
read into their final memory.

Timeouts are the kernel's (`SO_RCVTIMEO`): Python's own would add a `poll` before every read.
"""

from __future__ import annotations

import array
import functools
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from telegrad.errors import AuthenticationError
from telegrad.transport.base import ConnectionClosed, TransportTimeout
from telegrad.transport.same_host.shared_buffers import ANCILLARY, SharedBuffers
from telegrad.transport.same_host.spinning import Spinner

__all__ = ["JOINED_UP_TO", "READ_AHEAD", "SocketBytes", "is_ready"]

READ_AHEAD = 1 << 16
JOINED_UP_TO = 1 << 12
"""Messages of up to so many bytes are copied together, longer ones gathered by the kernel."""

_MOST_PARTS = 512  # of one gather-write; IOV_MAX is 1024
_FIRST_STEP = 1 << 20  # a body grows as its bytes arrive: a header alone allocates nothing
_REST_SECONDS = 100e-6
_ROOM_SECONDS = 0.02  # to wait for room before the rest of a message is left to another thread
_NOTABLE = 0.1  # seconds; changing the kernel's timeout costs as much as a small message
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_CUT = int(socket.MSG_CTRUNC)  # descriptors arrived, and this process had no room for them


class SocketBytes:
    """The byte stream under a message stream."""

    def __init__(self, sock: socket.socket, busy_wait: float) -> None:
        self._socket = sock
        self._spinner = Spinner(busy_wait)
        # Cheaper than a read that finds nothing, which makes an exception with its text.
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        self._is_readable = functools.partial(poller.poll, 0)
        self._ahead = memoryview(bytearray(READ_AHEAD))
        self._start = self._end = 0  # the part of _ahead that has been read and not used yet
        self.reads = 0
        self._timeout: float | None = None
        self._until: float | None = None
        self._shared: SharedBuffers | None = None  # keeps the descriptors that arrive
        self.messages_begun = 0
        self._rest: list[Any] = []  # of a message that was sent in part
        self._rest_descriptors: Sequence[int] = ()

    # -- writing

    def _write(self, parts: list[Any], descriptors: Sequence[int]) -> None:
        left = sum(map(len, parts))
        is_long = left > JOINED_UP_TO
        try:
            if len(parts) == 1 and not descriptors:
                sent = self._socket.send(parts[0])
            else:
                sent = self._socket.sendmsg(parts[:_MOST_PARTS], _rights(descriptors))
            while sent < left:
                parts = _after(parts, sent)
                left -= sent
                sent = self._write_more(parts[:_MOST_PARTS])
        except BlockingIOError:
            raise TransportTimeout from None
        except OSError as error:
            raise ConnectionClosed(str(error)) from None
        if is_long and self._until is not None:
            self._shorten_timeout(self._until)

    def _write_what_fits(self, parts: list[Any], descriptors: Sequence[int]) -> None:
        """Writes as much as there is room for; the rest stays for `send_rest`."""
        written: list[int] = []
        is_over = False
        try:
            try:
                self._write_at_once(parts, descriptors, written)
            except BlockingIOError:  # the peer makes room sooner than a thread starts
                is_small = len(parts) == 1 and not descriptors
                if is_small and is_ready(self._socket, select.POLLOUT, _ROOM_SECONDS):
                    self._write_at_once(parts, descriptors, written)
            is_over = True
        except BlockingIOError:
            is_over = True
        except OSError as error:
            raise ConnectionClosed(str(error)) from None
        finally:
            if written:
                self.messages_begun += 1
                self._rest = _after(parts, written[0])
            elif is_over:
                self.messages_begun += 1
                self._rest, self._rest_descriptors = parts, descriptors

    def _write_at_once(
        self, parts: list[Any], descriptors: Sequence[int], written: list[int]
    ) -> None:
        # One step of the interpreter writes and records the count: Ctrl-C between two steps would
        # lose it, and with it where in the stream the next message begins.
        if len(parts) == 1 and not descriptors:
            written.extend(map(self._socket.send, parts, (socket.MSG_DONTWAIT,)))
        else:
            written.extend(
                map(
                    self._socket.sendmsg,
                    (parts[:_MOST_PARTS],),
                    (_rights(descriptors),),
                    (socket.MSG_DONTWAIT,),
                )
            )

    @property
    def has_rest(self) -> bool:
        return bool(self._rest)

    def send_rest(self) -> None:
        """Call it on a thread that no signal interrupts, while no other thread writes."""
        try:
            self._write(self._rest, self._rest_descriptors)
        finally:
            self._rest, self._rest_descriptors = [], ()

    def _write_more(self, parts: list[Any]) -> int:
        if self._until is None:
            return self._socket.sendmsg(parts)
        if not is_ready(self._socket, select.POLLOUT, self._until - time.monotonic()):
            raise TransportTimeout
        try:
            return self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _shorten_timeout(self, until: float) -> None:
        """After a message that may have taken a while: so much less is left for the answer."""
        left = max(until - time.monotonic(), 0.0)
        if self._timeout is not None and left < self._timeout - _NOTABLE:
            self.set_timeout(left, until)

    # -- reading

    def _fill(self, needed: int) -> None:
        """Reads until `needed` bytes are ahead; needed <= READ_AHEAD."""
        if self._start + needed > READ_AHEAD:
            pending = bytes(self._ahead[self._start : self._end])
            self._ahead[: len(pending)] = pending
            self._start, self._end = 0, len(pending)
        while self._end - self._start < needed:
            is_begun = self._end > self._start
            read = self._read_rest if is_begun else self._read_into
            self._end += read(self._ahead[self._end :])

    def _take(self, length: int) -> bytes:
        if length <= self._end - self._start:
            data = bytes(self._ahead[self._start : self._start + length])
            self._start += length
            return data
        if length <= READ_AHEAD:
            self._fill(length)
            return self._take(length)
        whole = bytearray()
        while len(whole) < length:
            step = bytearray(min(length - len(whole), max(len(whole), _FIRST_STEP)))
            self._take_into(memoryview(step))
            whole += step
        return bytes(whole)

    def _take_into(self, target: memoryview) -> None:
        ahead = min(len(target), self._end - self._start)
        target[:ahead] = self._ahead[self._start : self._start + ahead]
        self._start += ahead
        while ahead < len(target):
            ahead += self._read_rest(target[ahead:])

    def _skip(self, length: int) -> None:
        """Reads and drops bytes, so that the next message can be read."""
        step = memoryview(bytearray(min(length, READ_AHEAD)))
        while length:
            part = step[: min(length, len(step))]
            self._take_into(part)
            length -= len(part)

    def _read_into(self, target: memoryview) -> int:
        try:
            count = self._receive(target, 0)
        except BlockingIOError:
            raise TransportTimeout from None
        except OSError as error:
            raise ConnectionClosed(str(error)) from None
        if not count:
            raise ConnectionClosed("the other end closed the connection")
        return count

    def _try_read(self, target: memoryview) -> int:
        """Reads without waiting; 0 if nothing is there, -1 if the stream has ended or failed: the
        next read reports it."""
        try:
            return self._receive(target, socket.MSG_DONTWAIT) or -1
        except BlockingIOError:
            return 0
        except OSError:
            return -1

    def _receive(self, target: memoryview, flags: int) -> int:
        if self._shared is None:
            count = self._socket.recv_into(target, 0, flags)
        else:
            count, ancillary, found, _ = self._socket.recvmsg_into([target], ANCILLARY, flags)
            if ancillary or found & _CUT:
                self._shared.keep_descriptors(ancillary)
        if count:
            self.reads += 1
        return count

    def _read_rest(self, target: memoryview) -> int:
        """Reads more of a message of which a part is here. The peer is usually writing the rest at
        this moment; waking up from a sleep would take longer."""
        if self._until is not None and time.monotonic() > self._until:
            raise TransportTimeout
        if self._spinner.is_on:
            end = time.perf_counter() + _REST_SECONDS
            while time.perf_counter() < end:
                count = self._try_read(target)
                if count > 0:
                    return count
                if count:
                    break
        if self._until is not None and not is_ready(
            self._socket, select.POLLIN, self._until - time.monotonic()
        ):
            raise TransportTimeout
        return self._read_into(target)

    # -- bytes outside of frames: the handshake

    def send_bytes(self, data: bytes) -> None:
        self._write([data], ())

    def receive_bytes(self, length: int) -> bytes:
        # No more than these: a frame behind them may carry descriptors, which are accepted only
        # once the other end has authenticated itself. The kernel drops those of a stranger.
        data = bytearray(length)
        self._take_into(memoryview(data))
        return bytes(data)

    def channel_binding(self) -> bytes:
        """Empty: the kernel vouches for the user at the other end of a Unix socket (`SO_PEERCRED`),
        and a bare TCP connection has nothing to bind to."""
        if self._socket.family == socket.AF_UNIX:
            _check_peer_user(self._socket)
        return b""

    # -- the socket

    def set_timeout(self, seconds: float | None, until: float | None = None) -> None:
        self._until = until
        if seconds == self._timeout:
            return
        self._timeout = seconds
        # Zero means forever to the kernel: a time of less than a microsecond is rounded up.
        micros = 0 if seconds is None else max(1, int(seconds * 1e6))
        value = struct.pack("ll", *divmod(micros, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def peer_process(self) -> int:
        if self._socket.family != socket.AF_UNIX:
            return 0
        try:
            found = self._socket.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
        except OSError:
            return 0  # the connection has ended
        process: int = _CREDENTIALS.unpack(found)[0]
        return process

    def interrupt(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already


def is_ready(sock: socket.socket, event: int, seconds: float) -> bool:
    """Whether `event` (there is something to read, say) occurs within `seconds`; also true for a
    socket that has ended."""
    poller = select.poll()  # `select` cannot handle descriptors above 1023
    try:
        poller.register(sock, event)
    except ValueError:
        return True  # it is closed: the next step reports it
    return bool(poller.poll(max(0.0, seconds) * 1000))


def _check_peer_user(sock: socket.socket) -> None:
    try:
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError as error:
        raise ConnectionClosed(str(error)) from None
    _, user, _ = _CREDENTIALS.unpack(found)
    if user != os.geteuid():
        raise AuthenticationError(
            f"the process at the other end of the Unix socket runs as user {user}, and this one as "
            f"user {os.geteuid()}: start all workers of a host as the same user, or with "
            "RpcOptions(transport='tcp', secret=...)"
        )


def _rights(descriptors: Sequence[int]) -> Sequence[tuple[int, int, Any]]:
    """The ancillary data that passes descriptors."""
    if not descriptors:
        return ()
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]


def _after(parts: list[Any], sent: int) -> list[Any]:
    """What is left to write after `sent` bytes."""
    for index, part in enumerate(parts):
        if sent < len(part):
            return [memoryview(part).cast("B")[sent:], *parts[index + 1 :]]
        sent -= len(part)
    return []
