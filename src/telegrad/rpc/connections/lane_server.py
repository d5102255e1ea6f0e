"""Serving the lanes that others have opened to this worker.

Each lane has a thread of its own, which reads a request, runs it and answers, so a function may
block without keeping another lane waiting. But when several workers call short functions all the
time, these threads pass the interpreter's lock to and fro, and have to be woken for it. Measured
with three trainers and a server on two processors: a step takes 0.6 times as long with what follows
as without it.

When the worker is crowded, lanes with short requests move to the *host*: one thread that serves
them one after the other while their own threads are parked. A request is short by its processor
time, as measured for its function so far, and if it calls no other worker. The worker is crowded
when requests on several lanes use about as much processor time as one thread has. If they use more,
they run side by side, as large operations of torch do, and one thread would be too few. A host that
is never idle cannot know that, so it gives up from time to time.

The host returns a lane to its own thread, which ends that thread's wait, with the first request
that is not known to be short or has not arrived whole, when the lane ends or is interrupted, and
when the host fails or is stuck. The clock notices a host that is stuck in a function that used to
be short.
"""

from __future__ import annotations

import math
import select
import threading
import time
from collections.abc import Callable

from telegrad.rpc.calls.quick_functions import QuickFunctions
from telegrad.rpc.connections.begun_requests import BegunRequests
from telegrad.transport.base import Connection
from telegrad.transport.same_host import processors
from telegrad.transport.same_host.spinning import Patience
from telegrad.wire.frames import Flags, Frame, Kind

__all__ = ["Reception"]

_SHORT = 500e-6  # seconds of processor time
# Times its processor time, and seconds: a request that takes longer has waited for something.
_AT_HOST = 2.0, 200e-6
_AMONG_OTHERS = 5.0, 1e-3  # on the lane's own thread, where it may have waited for others' threads
_RELAPSE = 200  # requests, after which one is tried again that has not been short at the host
_CROWDED = 0.4, 0.9  # seconds of processor time in a second
_TURNS = 16  # from one lane to another, among
_WINDOW = 64  # requests, from which it is seen whether it is crowded
_BUSY = 0.85  # seconds of processor time in a second: for one thread, no more is to be had
_TERM = 5.0  # seconds, after which a host that was so busy all the time gives up
_STUCK_AFTER = 0.05
_SAMPLE = 8  # requests at the host, of which one is judged
_SUSPECTED = 16  # that are all judged, when one has stood out
_POLL_EVERY = 4  # rounds: what comes by sockets must not wait until all mailboxes are empty

Serve = Callable[[int, Frame, Callable[..., None]], None]


class _Guest:
    """A lane, and the place where its own thread is parked."""

    __slots__ = ("begun", "descriptor", "error", "frame", "gate", "is_awake", "lane", "source")

    def __init__(self, source: int, lane: Connection, begun: BegunRequests) -> None:
        self.source = source
        self.begun = begun
        self.lane = lane
        self.descriptor = lane.fileno()
        self.is_awake = False  # it may have requests that do not show at the descriptor
        self.gate = threading.Lock()  # free when the host has returned the lane
        self.gate.acquire()
        self.frame: Frame | None = None  # what the host has read and has not served
        self.error: Exception | None = None  # how the lane ended


class _Desk:
    """How a request is served and judged, by whichever thread.

    Args:
        serve: runs and answers a request of worker `source`.
        name_of: what a request asks for.
        has_called: whether what this thread has served last has called other workers.
    """

    def __init__(
        self, serve: Serve, name_of: Callable[[Frame], bytes], has_called: Callable[[], bool]
    ) -> None:
        self._serve = serve
        self._name_of = name_of
        self._has_called = has_called
        self._brief = QuickFunctions(_SHORT, _STUCK_AFTER, _RELAPSE)
        # What follows is of the last requests. An update lost between threads does no harm.
        self.is_crowded = False
        self.last: _Guest | None = None
        self._since = time.perf_counter()
        self._used = 0.0
        self._count = self._turns = 0
        self._busy_until_now = 0.0  # seconds without a window in which there was time left
        # Judging takes as long as a small request. At the host, where all are thought to be short,
        # one of several is judged, until one stands out.
        self._unjudged = 0  # how many more may go by
        self._suspicion = 0  # how many are judged without exception

    def serve_by(self, serve: Serve) -> None:
        self._serve = serve

    def serve(self, guest: _Guest, frame: Frame) -> None:
        begun = guest.begun
        if begun.loss_told is not None:
            begun.wait_until_told()
        begun.last[guest] = frame.call_id
        is_copied = frame.flags & Flags.RESENT or frame.call_id in begun.resent
        if is_copied and not begun.may_begin(guest, frame):
            guest.lane.send(Kind.RECEIPT, Flags.RESENT, frame.call_id)
            return
        self._serve(guest.source, frame, guest.lane.send)
        if frame.flags & Flags.NO_ANSWER:
            guest.lane.send(Kind.RECEIPT, 0, frame.call_id)

    def is_short(self, frame: Frame) -> bool:
        return self._brief.is_quick(self._name_of(frame))

    def serve_and_judge(self, guest: _Guest, frame: Frame, *, is_host: bool) -> bool:
        """Serves a request; returns whether it is of a kind that is short."""
        if is_host and self._unjudged:
            self._unjudged -= 1
            begun = time.perf_counter()
            self.serve(guest, frame)
            if time.perf_counter() - begun > _SHORT or self._has_called():
                self._unjudged, self._suspicion = 0, _SUSPECTED
            return True
        name = self._name_of(frame)  # now: serving takes it apart
        begun, used = time.perf_counter(), time.thread_time()
        self.serve(guest, frame)
        now, used = time.perf_counter(), time.thread_time() - used
        stands_for = 1
        if self._suspicion:
            self._suspicion -= 1
        elif is_host:
            self._unjudged, stands_for = _SAMPLE - 1, _SAMPLE
        self._count_in(guest, now, used, stands_for)
        times, more = _AT_HOST if is_host else _AMONG_OTHERS
        if self._has_called():
            used = math.inf
        elif now - begun > times * used + more:
            used = now - begun
        self._brief.ran(name, used)
        return self._brief.is_quick(name)

    def _count_in(self, guest: _Guest, now: float, used: float, times: int) -> None:
        self._used += times * used
        self._count += times
        if guest is not self.last:
            self.last = guest
            self._turns += times
        if self._count >= _WINDOW:
            least, most = _CROWDED
            elapsed = max(now - self._since, 1e-9)
            load = self._used / elapsed
            self.is_crowded = least < load < most and self._turns >= _TURNS
            self._busy_until_now = self._busy_until_now + elapsed if load > _BUSY else 0.0
            self._since, self._used, self._count, self._turns = now, 0.0, 0, 0

    def begin_anew(self) -> bool:
        """Whether the host has been so busy for so long that lanes should try by themselves."""
        if self._busy_until_now < _TERM:
            return False
        self.is_crowded = False
        self._busy_until_now = 0.0
        return True


class Reception:
    """
    Args:
        serve, name_of, has_called: see `_Desk`.
        busy_wait: how long the host looks for the next request before it sleeps.
        spawn: starts a thread.
    """

    def __init__(
        self,
        serve: Serve,
        name_of: Callable[[Frame], bytes],
        has_called: Callable[[], bool],
        busy_wait: float,
        spawn: Callable[[Callable[[], None]], None],
    ) -> None:
        self._desk = _Desk(serve, name_of, has_called)
        self._busy_wait = busy_wait
        self._spawn = spawn
        self._host: _Host | None = None
        self._is_closed = False
        self._host_lock = threading.RLock()  # guards the two above: there is one host at a time

    def serve_lane(self, source: int, lane: Connection, begun: BegunRequests) -> None:
        """Serves a lane until it ends, which is raised.

        Args:
            begun: the worker's requests that have begun here.
        """
        desk, guest = self._desk, _Guest(source, lane, begun)
        can_move = guest.descriptor >= 0 and hasattr(select, "epoll")
        try:
            while True:
                frame, guest.frame = guest.frame, None
                if frame is None:
                    frame = lane.receive()  # ends by a request, a loss or interrupt()
                is_short = False
                host = self._host
                is_alone = desk.last is guest and (host is None or host.is_over)
                if is_alone or not can_move:
                    desk.serve(guest, frame)
                else:
                    is_short = desk.serve_and_judge(guest, frame, is_host=False)
                del frame  # its tensors must not live until the next request comes
                if is_short and desk.is_crowded and lane.rest():  # or else the next one is here
                    self._move_in(guest)
        finally:
            begun.ended(guest)
            if desk.last is guest:
                desk.last = None

    def serve_by(self, serve: Serve) -> None:
        """From now on requests are served so."""
        self._desk.serve_by(serve)

    def tick(self, now: float) -> None:
        """Looks whether the host is stuck."""
        host = self._host
        if host is not None:
            host.tick(now)

    def close(self) -> None:
        """All lanes have been interrupted: their threads must not wait for a host that is stuck."""
        with self._host_lock:
            self._is_closed = True
            if self._host is not None:
                self._host.close()

    def _move_in(self, guest: _Guest) -> None:
        """Leaves the lane to the host until that returns it; raises how it ended, if it did."""
        try:
            with self._host_lock:
                if self._is_closed:
                    return
                if self._host is None or not self._host.admit(guest):
                    host = _Host(self._desk, self._busy_wait)
                    host.admit(guest)
                    self._spawn(host.run)
                    self._host = host
        except (OSError, RuntimeError):
            return  # no descriptor or no thread to be had: the lane has its own
        guest.gate.acquire()
        if guest.error is not None:
            raise guest.error


class _Host:
    """Serves lanes on one thread, until none is left."""

    def __init__(self, desk: _Desk, busy_wait: float) -> None:
        self._desk = desk
        self._patience = Patience(busy_wait)
        self._epoll = select.epoll()
        self._lock = threading.RLock()  # guards what follows
        self._guests: dict[int, _Guest] = {}  # by descriptor
        self._processor = processors.UNKNOWN
        self.is_over = False
        self._is_closed = False
        self._served: _Guest | None = None
        self._busy_since = 0.0  # when it began to serve; 0 while it looks
        # Only its own thread uses these:
        self._awake: list[_Guest] = []  # those whose requests may come by a mailbox
        self._found: list[_Guest] = []
        self._looks = 0

    def admit(self, guest: _Guest) -> bool:
        """Takes over a lane; False if it is too late for that."""
        with self._lock:
            if self.is_over:
                return False
            self._epoll.register(guest.descriptor, select.EPOLLIN)  # a host that sleeps sees it too
            self._guests[guest.descriptor] = guest
            guest.lane.serve_from(self._processor)
            return True

    def tick(self, now: float) -> None:
        """Ends a host that is stuck. It touches no other lane while it serves one."""
        busy = self._busy_since
        if busy and now - busy > _STUCK_AFTER:
            with self._lock:
                if self._busy_since == busy:
                    self._end()

    def close(self) -> None:
        """Begins nothing any more. If it is serving something, it ends as if it were stuck."""
        self._is_closed = True
        self.tick(math.inf)

    def run(self) -> None:
        try:
            while not self.is_over:
                if processors.here() != self._processor:
                    self._has_moved()
                for guest in self._wait():
                    if not self.is_over:  # or else it has its lane back
                        self._attend(guest)
                if self._desk.begin_anew():
                    return
        finally:
            with self._lock:
                self._served = None
                self._end()
            self._epoll.close()

    def _end(self) -> None:
        """Returns all lanes but the one that is being served."""
        self.is_over = True
        for guest in list(self._guests.values()):
            if guest is not self._served:
                self._return(guest)

    def _has_moved(self) -> None:
        """The system runs this thread on another processor than before."""
        with self._lock:
            self._processor = processors.here()
            for guest in self._guests.values():
                guest.lane.serve_from(self._processor)

    def _return(
        self, guest: _Guest, frame: Frame | None = None, error: Exception | None = None
    ) -> None:
        """Gives a lane back to its own thread, with what has come or how it ended."""
        del self._guests[guest.descriptor]
        self._epoll.unregister(guest.descriptor)
        guest.lane.serve_from(processors.UNKNOWN)
        guest.is_awake = False
        guest.frame, guest.error = frame, error
        guest.gate.release()

    def _wait(self) -> list[_Guest]:
        """Those for whom something has come. Ends by a request or by the end of a lane."""
        self._looks += 1
        if not self._looks % _POLL_EVERY and self._poll(0):
            return self._found
        if self._patience.look(self._is_anything_there):
            return self._found
        self._found = []
        for guest in self._awake:
            if guest.lane.rest():
                guest.is_awake = False
            else:
                self._found.append(guest)
        self._awake = list(self._found)
        if not self._found:
            self._poll(-1)
        return self._found

    def _is_anything_there(self) -> bool:
        self._found = [guest for guest in self._awake if guest.lane.glance()]
        if self._found:
            return True
        self._looks += 1
        return not self._looks & 7 and self._poll(0)

    def _poll(self, seconds: float) -> bool:
        self._found = [
            guest
            for descriptor, _ in self._epoll.poll(seconds)
            if (guest := self._guests.get(descriptor)) is not None
        ]
        return bool(self._found)

    def _attend(self, guest: _Guest) -> None:
        """Serves a lane's request, or returns the lane."""
        frame: Frame | None = None
        error: Exception | None = None
        if not guest.is_awake:
            guest.is_awake = True
            self._awake.append(guest)
        try:
            frame = guest.lane.receive_now()
            if frame is None and not guest.lane.poll():
                return  # this thread was to be woken, and is awake
        except Exception as caught:  # noqa: BLE001 - it is for the lane's own thread
            error = caught
        if frame is not None and self._desk.is_short(frame):
            self._served = guest
            self._busy_since = time.monotonic()
            if not self._is_closed:  # asked now: whoever closes it has not seen it busy
                try:
                    self._desk.serve_and_judge(guest, frame, is_host=True)
                except Exception as caught:  # noqa: BLE001 - its receipt could not be sent
                    error = caught
                frame = None
            with self._lock:
                self._served = None
                self._busy_since = 0.0
                if frame is None and error is None:
                    return  # if it was stuck, and is over, `run` returns the lane
        with self._lock:
            self._awake.remove(guest)
            self._return(guest, frame, error)
            self.is_over = not self._guests
