"""Bytes to and from a stream socket, with what has been read ahead of its use.

Written for few system calls: a gather-write, and reads of as much as there is. Large buffers are
read into the memory that they are for.

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
from telegrad.transport.same_host.spinning import Patience

__all__ = ["JOINED_UP_TO", "READ_AHEAD", "SocketBytes", "is_ready"]

READ_AHEAD = 1 << 16
JOINED_UP_TO = 1 << 12
"""Bytes that are copied together rather than gathered by the kernel."""

_MOST_PARTS = 512  # of one gather-write; IOV_MAX is 1024
_FIRST_STEP = 1 << 20  # a body grows as its bytes come: nothing is allocated on a header's word
_REST_SECONDS = 100e-6
_ROOM_SECONDS = 0.02  # to wait for room before a message is left to a thread that waits for it
_NOTABLE = 0.1  # seconds of a timeout: to tell the kernel costs as much as a small message
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_CUT = int(socket.MSG_CTRUNC)  # descriptors came, and there was no room for them in this process


class SocketBytes:
    """What a message stream is made of."""

    def __init__(self, sock: socket.socket, busy_wait: float) -> None:
        self._socket = sock
        self._patience = Patience(busy_wait)
        # A read that finds nothing raises, and the words of that exception take longer than this.
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        self._is_readable = functools.partial(poller.poll, 0)
        self._ahead = memoryview(bytearray(READ_AHEAD))
        self._start = 0  # bytes in _ahead that have been read and not yet used: _start.._end
        self._end = 0
        self.reads = 0
        self._timeout: float | None = None
        self._until: float | None = None
        self._shared: SharedBuffers | None = None  # keeps the descriptors that come along
        self.messages_begun = 0
        self._rest: list[Any] = []  # of a message that was sent in part
        self._rest_descriptors: Sequence[int] = ()

    # -- writing

    def _write(self, parts: list[Any], descriptors: Sequence[int], total: int) -> None:
        try:
            if descriptors:
                rights = array.array("i", descriptors)
                sent = self._socket.sendmsg(
                    parts[:_MOST_PARTS], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                )
            elif len(parts) == 1:
                sent = self._socket.send(parts[0])
            else:
                sent = self._socket.sendmsg(parts[:_MOST_PARTS])
            is_long = total > JOINED_UP_TO
            while sent < total:
                parts = _after(parts, sent)
                total -= sent
                sent = self._write_more(parts[:_MOST_PARTS])
            if is_long and self._until is not None:
                self._shorten_timeout(self._until)
        except BlockingIOError:
            raise TransportTimeout from None
        except OSError as error:
            raise ConnectionClosed(str(error)) from None

    def _write_what_fits(self, parts: list[Any], descriptors: Sequence[int]) -> None:
        """Writes as much as there is room for; the rest stays for `send_rest`."""
        written: list[int] = []
        is_over = False
        try:
            # The count is noted in the same step of the interpreter that writes: Ctrl-C between
            # two steps would lose it, and with it where in the stream the next message begins.
            if len(parts) == 1 and not descriptors:
                try:
                    written.extend(map(self._socket.send, parts, (socket.MSG_DONTWAIT,)))
                except BlockingIOError:  # a peer that reads makes room sooner than a thread starts
                    if is_ready(self._socket, select.POLLOUT, _ROOM_SECONDS):
                        written.extend(map(self._socket.send, parts, (socket.MSG_DONTWAIT,)))
            else:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
                written.extend(
                    map(
                        self._socket.sendmsg,
                        (parts[:_MOST_PARTS],),
                        (rights if descriptors else (),),
                        (socket.MSG_DONTWAIT,),
                    )
                )
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

    @property
    def has_rest(self) -> bool:
        return bool(self._rest)

    def send_rest(self) -> None:
        """To be called on a thread that no signal interrupts, while no other one writes."""
        try:
            self._write(self._rest, self._rest_descriptors, sum(map(len, self._rest)))
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
        """A message has left that may have taken a while: so much less is left for the answer."""
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
        """Reads what there is no memory for, so that the next message can be read."""
        step = memoryview(bytearray(min(length, READ_AHEAD)))
        while length:
            part = step[: min(length, len(step))]
            self._take_into(part)
            length -= len(part)

    def _read_into(self, target: memoryview) -> int:
        try:
            if self._shared is not None:
                count, ancillary, flags, _ = self._socket.recvmsg_into([target], ANCILLARY)
                if ancillary or flags & _CUT:
                    self._shared.keep_descriptors(ancillary)
            else:
                count = self._socket.recv_into(target)
        except BlockingIOError:
            raise TransportTimeout from None
        except OSError as error:
            raise ConnectionClosed(str(error)) from None
        if not count:
            raise ConnectionClosed("the other end closed the connection")
        self.reads += 1
        return count

    def _read_rest(self, target: memoryview) -> int:
        """Reads more of a message of which a part is here. The rest is mostly just being written:
        who goes to sleep for it is woken at once, which takes longer than the writing."""
        if self._until is not None and time.monotonic() > self._until:
            raise TransportTimeout
        if self._patience.is_on:
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

    def _try_read(self, target: memoryview) -> int:
        """Reads without waiting; 0 if nothing is there, -1 if it has ended: the next read tells."""
        try:
            if self._shared is not None:
                count, ancillary, flags, _ = self._socket.recvmsg_into(
                    [target], ANCILLARY, socket.MSG_DONTWAIT
                )
                if ancillary or flags & _CUT:
                    self._shared.keep_descriptors(ancillary)
            else:
                count = self._socket.recv_into(target, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return -1
        if not count:
            return -1
        self.reads += 1
        return count

    # -- bytes outside of frames: the handshake

    def send_bytes(self, data: bytes) -> None:
        self._write([data], (), len(data))

    def receive_bytes(self, length: int) -> bytes:
        # Exactly these: a frame right behind them may carry descriptors, which are taken only
        # once the other end has proved itself. The kernel drops those that a stranger sends.
        data = bytearray(length)
        self._take_into(memoryview(data))
        return bytes(data)

    def channel_binding(self) -> bytes:
        """Empty: nobody can stand between two processes of one user (`SO_PEERCRED`), and a bare
        TCP connection has nothing to bind to."""
        if self._socket.family == socket.AF_UNIX:
            _check_peer_user(self._socket)
        return b""

    # -- the socket

    def set_timeout(self, seconds: float | None, until: float | None = None) -> None:
        self._until = until
        if seconds == self._timeout:
            return
        self._timeout = seconds
        # Zero means for ever to the kernel: a time of less than a microsecond is rounded up.
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
            return 0  # it has ended
        process: int = _CREDENTIALS.unpack(found)[0]
        return process

    def interrupt(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already, which is what was wanted


def is_ready(sock: socket.socket, event: int, seconds: float) -> bool:
    """Whether there is anything to read, say, within `seconds`; also true of an ended socket."""
    poller = select.poll()  # `select` knows no descriptor above 1023
    try:
        poller.register(sock, event)
    except ValueError:
        return True  # it is closed: the next step tells
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
            f"user {os.geteuid()}: start all workers of a host as one user, or with "
            "RpcOptions(transport='tcp', secret=...)"
        )


def _after(parts: list[Any], sent: int) -> list[Any]:
    """What is left to write once `sent` bytes are gone."""
    for index, part in enumerate(parts):
        if sent < len(part):
            return [memoryview(part).cast("B")[sent:], *parts[index + 1 :]]
        sent -= len(part)
    return []
