"""One connection that carries many calls at a time, in both directions.

A reader thread reads frames. It completes the future of a reply itself, and runs requests for
functions that are known to be quick itself, which saves a thread wake-up. But a callback of a
future, or a function that was quick so far, may wait for something that arrives on this connection.
So reading is a role, not a thread: when the clock finds the reader stuck, it starts a new reader,
and the old one ends when it returns. This also resolves two readers that wait for each other
because both sockets are full.

A call that times out, or whose worker is lost, is settled on a thread of the pool: its callbacks
must neither stop the clock nor wait here for another call that has yet to fail.

A sender does not wait for the socket: a thread writes what does not fit at once. So Ctrl-C never
tears a message in two, a call's deadline also ends the wait for a peer that does not read, and
signs of life never block. A destructor or a signal handler may interrupt a send and send something
itself; that is queued for the interrupted send. A destructor on a thread that reads or writes here
does not wait either: it would wait for itself.
"""

from __future__ import annotations

import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from telegrad.errors import ProtocolError
from telegrad.locks import here, is_held_here
from telegrad.transport.base import Connection, ConnectionClosed, TransportTimeout
from telegrad.wire.frames import Frame, Kind

__all__ = ["Multiplex", "PendingCall"]

_STUCK_AFTER = 0.05
_LEAVE_SECONDS = 1.0


class PendingCall:
    """A call that was sent and waits for its reply. The thread that removes it from the table
    settles it. Subclasses say what a reply and an error mean.
    """

    __slots__ = ("deadline",)

    deadline: float
    """When it fails with a timeout; infinite for never."""

    def succeed(self, frame: Frame) -> None:
        raise NotImplementedError

    def fail(self, reason: str) -> None:
        """The worker was lost."""
        raise NotImplementedError

    def expire(self) -> None:
        """The deadline passed."""
        raise NotImplementedError


class Multiplex:
    """
    Args:
        on_request: gets each frame that is not an expected reply; must not block.
        on_closed: called once with the reason when the connection has ended.
        defer: runs something soon, on another thread.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        on_request: Callable[[Multiplex, Frame], None],
        on_closed: Callable[[Multiplex, str], None],
        on_thread_start: Callable[[], None],
        defer: Callable[[Callable[[], None]], None],
    ) -> None:
        self._connection = connection
        self._name = name
        self._on_request = on_request
        self._on_closed = on_closed
        self._on_thread_start = on_thread_start
        self._defer = defer
        # Guards the sending side of the connection, and the two below.
        self._send_lock = threading.RLock()
        self._left: collections.deque[tuple[Any, ...]] = collections.deque()  # by destructors
        self._rest_is_sent: threading.Event | None = None  # while a thread sends the rest
        self.senders: set[int] = set()
        """Threads that wait for room in the socket."""
        self._pending: dict[int, PendingCall] = {}
        self._next_deadline = float("inf")
        self._deadline_lock = threading.RLock()  # guards changes of the one above
        self._reader_lock = threading.RLock()  # guards the three below: who reads, and since when
        self._reader: threading.Thread | None = None
        self._readers: set[threading.Thread] = set()
        self._busy_since = 0.0  # when the reader began a completion; 0 while it reads
        self._is_closed = False
        self.is_opener = False
        """Whether this end has opened the connection."""
        self.is_second = False
        """Whether the other end has opened it as a `SECOND_MULTIPLEX`."""
        self._reads_seen = 0
        self.heard_at = time.monotonic()

    def start(self, *, is_opener: bool = False) -> None:
        """
        Args:
            is_opener: this end has opened the connection, and may open another one.

        Raises:
            ConnectionClosed: there is no thread to read it; it is closed then.
        """
        self.is_opener = is_opener
        try:
            self._start_reader()
        except RuntimeError as error:
            self._is_closed = True
            if is_opener:
                self._take_leave()
            self._connection.close()
            raise ConnectionClosed(f"nothing can read it: {error}") from None

    def _take_leave(self) -> None:
        """Waits, a second at most, until the other end has ended its side: if it noticed later, it
        would end the next connection too."""
        with contextlib.suppress(ConnectionClosed, TransportTimeout, ProtocolError, OSError):
            self.say_goodbye(_LEAVE_SECONDS)
            self._connection.receive()  # it answers by closing

    def send(
        self,
        kind: Kind,
        flags: int = 0,
        call_id: int = 0,
        context_id: int = -1,
        message_id: int = -1,
        body: Sequence[bytes | memoryview] = (),
        buffers: Sequence[memoryview] = (),
        *,
        until: float = math.inf,
        begun: list[bool] | None = None,
    ) -> None:
        """Sends a message; returns when it is sent, so that its memory may change afterwards, or at
        `until`, when it is on its way.

        Args:
            until: a time of `time.monotonic`.
            begun: gets an item when the message begins to leave, so that a caller that Ctrl-C
                interrupts knows whether it did.

        Raises:
            TransportTimeout: nothing of it has left by `until`.
            ConnectionClosed: the connection has ended.
        """
        message = (kind, flags, call_id, context_id, message_id, body, buffers)
        if here.must_not_wait or is_held_here(self._send_lock):
            copies = [memoryview(bytes(buffer)) for buffer in buffers]
            self._left.append((*message[:5], [b"".join(body)], copies))
            self._send_left()
            return
        while True:
            with self._send_lock:  # no thread waits for the socket in here
                sending = self._rest_is_sent
                if sending is None:
                    self._send_now(message, begun)
                    sending = self._rest_is_sent
                    break
            if not self._wait_for(sending, until):
                raise TransportTimeout
        if self._left:
            self._send_left()
        if sending is not None:
            self._wait_for(sending, until)

    def _wait_for(self, sending: threading.Event, until: float) -> bool:
        """Waits for room in the socket. Ends with that, with the connection, or at `until`."""
        self.senders.add(threading.get_ident())
        try:
            return sending.wait(_seconds_until(until))
        finally:
            self.senders.discard(threading.get_ident())

    def _send_now(self, message: tuple[Any, ...], begun: list[bool] | None = None) -> None:
        """To be called with the lock held, while no rest is being sent."""
        connection = self._connection
        before = connection.messages_begun
        could_not_wait, here.must_not_wait = here.must_not_wait, True
        try:
            connection.send_without_waiting(*message)
        finally:
            here.must_not_wait = could_not_wait
            if begun is not None and connection.messages_begun != before:
                begun.append(True)
            if connection.has_rest:
                self._start_sending_rest()

    def _start_sending_rest(self) -> None:
        done = threading.Event()
        self._rest_is_sent = done
        try:
            threading.Thread(
                target=self._send_rest, args=(done,), name=f"{self._name}-writer", daemon=True
            ).start()
        except RuntimeError:  # the system has no thread left: this one waits for the socket
            self._send_rest(done)

    def _send_rest(self, done: threading.Event) -> None:
        could_not_wait, here.must_not_wait = here.must_not_wait, True
        try:
            self._connection.send_rest()  # ends when it is sent, or by the connection's end
        except (ConnectionClosed, TransportTimeout):
            pass  # the reader notices the end too
        finally:
            with self._send_lock:
                self._rest_is_sent = None
            done.set()
            here.must_not_wait = could_not_wait
        if self._left:
            self._send_left()

    def _send_left(self) -> None:
        """Sends what destructors and signal handlers have queued, unless the thread that holds the
        lock, or the clock, will. Does not wait for the lock: a destructor may have interrupted what
        its holder waits for."""
        while self._left and not is_held_here(self._send_lock):
            is_held: list[bool] = []
            try:
                # Noted in the step that takes it: Ctrl-C between two would keep it for good.
                is_held.extend(map(self._send_lock.acquire, (False,)))
                if not is_held[0] or self._rest_is_sent is not None:
                    return
                while self._left and self._rest_is_sent is None:
                    self._send_now(self._left.popleft())
            except IndexError:
                return  # a signal handler was faster
            except ConnectionClosed:
                self._left.clear()  # those who wait for an answer hear of the end
                return
            finally:
                if is_held and is_held[0]:
                    self._send_lock.release()

    def send_if_free(self, kind: Kind) -> None:
        """Sends a sign of life, unless something else is being sent: that is one too. Does not
        wait."""
        if is_held_here(self._send_lock):
            return
        is_held: list[bool] = []
        try:
            # Noted in the step that takes it: Ctrl-C between two would keep it for good.
            is_held.extend(map(self._send_lock.acquire, (False,)))
            if is_held[0] and self._rest_is_sent is None:
                self._send_now((kind,))
        finally:
            if is_held and is_held[0]:
                self._send_lock.release()

    def say_goodbye(self, seconds: float) -> None:
        """Tells the other end that this one leaves. Gives up after `seconds`: the other end may
        have stopped in the middle of a large message."""
        try:
            self.send(Kind.GOODBYE, until=time.monotonic() + seconds)
        except (ConnectionClosed, TransportTimeout, OSError):
            pass  # it is gone, or does not read

    def expect(self, call_id: int, call: PendingCall) -> None:
        """Registers a call before its request is sent."""
        self._pending[call_id] = call
        if call.deadline < self._next_deadline:
            self._lower_next_deadline(call.deadline)
        if self._is_closed and self._pending.pop(call_id, None) is not None:
            raise ConnectionClosed("the connection is closed")

    def forget(self, call_id: int) -> bool:
        """Takes a call back; False if another thread settles it."""
        return self._pending.pop(call_id, None) is not None

    @property
    def pending_count(self) -> int:
        return len(self._pending)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def reads(self) -> int:
        """Grows with each read from the socket."""
        return self._connection.reads

    @property
    def peer_process(self) -> int:
        return self._connection.peer_process

    def tick(self, now: float) -> None:
        """Expires calls, and replaces a reader that is stuck."""
        if self._connection.reads != self._reads_seen:
            self._reads_seen = self._connection.reads
            self.heard_at = now
        if self._next_deadline <= now:
            self._expire(now)
        if self._left:
            self._defer(self._send_left)
        if self._connection.has_rest:
            self._look_after_rest()
        busy = self._busy_since
        if busy and now - busy > _STUCK_AFTER and not self._is_closed:
            try:
                self._start_reader(instead_of_one_busy_since=busy)
            except RuntimeError:
                pass  # the system has no thread left: the next tick tries again

    def _look_after_rest(self) -> None:
        """Starts the thread that writes the rest, if Ctrl-C prevented that."""
        with self._send_lock:
            if self._connection.has_rest and self._rest_is_sent is None:
                self._start_sending_rest()

    def _expire(self, now: float) -> None:
        self._next_deadline = float("inf")  # calls added from now on lower it themselves
        earliest = float("inf")
        for call_id, call in list(self._pending.items()):
            if call.deadline > now:
                earliest = min(earliest, call.deadline)
            elif self._pending.pop(call_id, None) is not None:
                self._defer(call.expire)
        self._lower_next_deadline(earliest)

    def _lower_next_deadline(self, deadline: float) -> None:
        # The clock and callers do so; none may undo the change of another.
        with self._deadline_lock:
            self._next_deadline = min(self._next_deadline, deadline)

    def interrupt(self) -> None:
        self._connection.interrupt()

    def give_up(self, reason: str) -> None:
        """Fails all calls that wait here and accepts no more. The reader cannot do so: it may be in
        a callback of a program that waits for one of them."""
        self._is_closed = True
        self._fail_pending(reason)

    def join(self, timeout: float) -> None:
        with self._reader_lock:
            readers = list(self._readers)
        for thread in readers:
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _start_reader(self, instead_of_one_busy_since: float = 0.0) -> None:
        thread = threading.Thread(target=self._read, name=f"{self._name}-reader", daemon=True)
        with self._reader_lock:
            if self._busy_since != instead_of_one_busy_since:
                return  # it came free just now, and reads on
            former = self._reader
            self._busy_since = 0.0
            self._reader = thread
            self._readers.add(thread)
            try:
                thread.start()  # one that is in the set can be joined
            except RuntimeError:
                self._busy_since, self._reader = instead_of_one_busy_since, former
                self._readers.discard(thread)
                raise

    def _read(self) -> None:
        self._on_thread_start()
        me = threading.current_thread()
        reason = ""
        try:
            while True:
                here.must_not_wait = True  # no other thread could read
                frame = self._connection.receive()  # ends by a frame, a loss or interrupt()
                here.must_not_wait = False
                self._busy_since = time.monotonic()
                self._take(frame)
                del frame
                with self._reader_lock:
                    if self._reader is not me:
                        return
                    self._busy_since = 0.0
        except (ConnectionClosed, TransportTimeout) as closed:
            reason = str(closed)
        except Exception as error:  # noqa: BLE001 - the stream is broken and cannot be trusted
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._readers.discard(me)
        self._close(reason)

    def _take(self, frame: Frame) -> None:
        kind = frame.kind
        if kind is Kind.REPLY or kind is Kind.ERROR:
            call = self._pending.pop(frame.call_id, None)
            if call is not None:
                call.succeed(frame)
            else:  # it came too late; references in it must end
                self._on_request(self, frame)
        elif kind is not Kind.PONG:
            self._on_request(self, frame)

    def _close(self, reason: str) -> None:
        self._is_closed = True
        self._connection.close()
        self._on_closed(self, reason)
        self._fail_pending(reason)

    def _fail_pending(self, reason: str) -> None:
        while self._pending:
            try:
                _, call = self._pending.popitem()
            except KeyError:
                break  # another thread settled the last one
            self._defer(partial(call.fail, reason))


def _seconds_until(until: float) -> float:
    """For `acquire` and `wait`, which take no infinity."""
    return min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)
