"""Another worker, as this one sees it: the connections to it, and whether it is alive.

`requests` sends to it over `lanes`, of which each carries one request at a time. Everything else
shares one multiplexed connection.

`Liveness` alone decides that the worker is lost, by what happens on the multiplexed connection: it
ends, it is silent for too long, it brings a goodbye, or a new worker has taken the place.

A peer that is lost comes back as soon as it can be connected to again, under the same incarnation
(the network had failed) or another (the worker was restarted).
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from telegrad.errors import AuthenticationError, ProtocolError, RpcTimeout, WorkerLost
from telegrad.locks import is_held_here
from telegrad.rpc.calls.outcome import timeout_text
from telegrad.rpc.connections.begun_requests import BegunRequests
from telegrad.rpc.connections.liveness import (
    Connected,
    DeclareLost,
    Effect,
    Ended,
    Heard,
    Liveness,
    SendPing,
    State,
    TimePassed,
)
from telegrad.rpc.connections.multiplex import Multiplex
from telegrad.rpc.connections.processor_time import ProcessorTime
from telegrad.rpc.connections.requests import POST_SECONDS, Requests, number_of_unread
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.sent_references import SentReferences
from telegrad.transport.base import Connection, ConnectionClosed, TransportTimeout
from telegrad.transport.handshake import Purpose
from telegrad.transport.same_host.shm import SharedMemory
from telegrad.wire.frames import Frame, Kind

__all__ = ["SHUT_DOWN", "Peer"]

SHUT_DOWN = "this worker has shut down"
"""Why calls fail that are open when it does."""


class Peer:
    """
    Args:
        connect: opens and authenticates a connection to the worker. It may be given fewer seconds
            than `connect_timeout`, and raises `TransportTimeout` after them.
        new_multiplex: wraps a connection, not yet started.
        on_lost: called once for each loss.
        memory: shared memory for large tensors between processes of one host, or None.
        heartbeat: seconds between signs of life, and seconds of silence that mean a loss.
        on_late: gets a function that reads a reply which no thread waits for, and may block.
    """

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: bytes,
        connect: Callable[[Peer, Purpose, float | None], Connection],
        new_multiplex: Callable[[Peer, Connection], Multiplex],
        on_lost: Callable[[Peer, DeclareLost], None],
        memory: SharedMemory | None,
        heartbeat: tuple[float, float],
        on_late: Callable[[Peer, Callable[[], Frame | None]], None],
    ) -> None:
        self.info = info
        self.incarnation = incarnation
        self.memory = memory
        self._connect = connect
        self._new_multiplex = new_multiplex
        self._on_lost = on_lost
        self._is_closed = False
        self.requests = Requests(self, partial(on_late, self))
        self.begun = BegunRequests()
        """The worker's requests that have begun here."""
        self.sent_references = SentReferences()
        self._connections: set[Connection] = set()  # all open ones, which a loss ends
        self._connections_lock = threading.RLock()  # guards the set above and the two below
        self._multiplexes: list[Multiplex] = []
        self._liveness = Liveness(*heartbeat, time.monotonic())
        self._last_loss = ""  # why it was lost the last time; it may be back
        self._reads: dict[Connection, int] = {}  # as they were at the last tick
        self._computing = ProcessorTime(heartbeat[1])
        self._opening_lock = threading.RLock()  # one thread opens the first multiplex

    def __repr__(self) -> str:
        state = self._liveness.state.name
        return f"Peer({self.info.name}, connections={len(self._connections)}, {state})"

    # -- connections

    def connect(self, purpose: Purpose, seconds: float | None) -> Connection:
        """A new connection to the worker, authenticated, but not yet taken into use."""
        return self._connect(self, purpose, seconds)

    def multiplex(self, seconds: float | None = None) -> Multiplex:
        """The connection for everything that does not travel on a lane; opened at first use.

        Args:
            seconds: how long that may take, if less than for any connection.

        Raises:
            WorkerLost: the worker cannot be reached.
            TransportTimeout: not within `seconds`.
        """
        for multiplex in self._multiplexes:
            if not multiplex.is_closed:
                return multiplex
        is_second = is_held_here(self._opening_lock)
        is_opening: list[bool] = []
        try:
            # Noted in the step that takes it: Ctrl-C between two would keep it for good.
            is_opening.extend(
                map(self._opening_lock.acquire, (True,), (-1 if seconds is None else seconds,))
            )
            if not is_opening[0]:
                raise TransportTimeout(f"no connection within {seconds:g} seconds")
            for multiplex in self._multiplexes:
                if not multiplex.is_closed:
                    return multiplex
            purpose = Purpose.SECOND_MULTIPLEX if is_second else Purpose.MULTIPLEX
            connection = self.connect(purpose, seconds)
            multiplex = self._new_multiplex(self, connection)
            self.add(connection)
            try:
                self.adopt(multiplex, is_opener=True)
            except ConnectionClosed as error:
                self.remove(connection)
                raise self.unreachable(error) from None
            return multiplex
        finally:
            if is_opening and is_opening[0]:
                self._opening_lock.release()

    def adopt(
        self, multiplex: Multiplex, *, is_opener: bool = False, is_second: bool = False
    ) -> None:
        """Starts to use a multiplex, which serves both directions, whichever end has opened it.

        Args:
            is_opener: this worker has opened it.
            is_second: the peer has opened it as a `SECOND_MULTIPLEX`.

        Raises:
            ConnectionClosed: it cannot be read.
        """
        with self._connections_lock:
            self._multiplexes = [m for m in self._multiplexes if not m.is_closed] + [multiplex]
            self._liveness.handle(Connected(), time.monotonic())
        multiplex.is_second = is_second
        multiplex.start(is_opener=is_opener)

    def reopened(self) -> None:
        """The worker is opening another multiplexed connection. If its former one is still open
        here, it has declared this worker lost, after a silence that has not been noticed here yet.
        What depends on the old connection ends before the new one is used."""
        if any(not (m.is_closed or m.is_opener or m.is_second) for m in self._multiplexes):
            self.lose("it had lost this worker, and has connected again")

    def add(self, connection: Connection) -> None:
        if self.memory is not None:
            connection.share_memory(self.memory)
        with self._connections_lock:
            self._connections.add(connection)
        if self._is_closed:
            connection.interrupt()  # `close` may have missed it

    def watch(self, connection: Connection) -> None:
        """A connection that is being opened ends too when the worker is lost."""
        with self._connections_lock:
            self._connections.add(connection)

    def remove(self, connection: Connection) -> None:
        """Takes no lock: a destructor may call it."""
        self._connections.discard(connection)

    def is_open(self, connection: Connection) -> bool:
        """Whether no loss of the peer has ended it."""
        return connection in self._connections

    @property
    def is_lost(self) -> bool:
        return self._liveness.state is State.LOST

    def lose(self, reason: str) -> None:
        """The worker has left, was replaced, or cannot be relied on. Ends all connections to it,
        and every wait on them."""
        with self._connections_lock:
            effects = self._liveness.handle(Ended(reason), time.monotonic())
        self._carry_out(effects)

    def multiplex_ended(self, multiplex: Multiplex, reason: str) -> None:
        """The worker is lost with its last multiplex. An older one that ends after the worker has
        come back does not count."""
        with self._connections_lock:
            if any(not other.is_closed for other in self._multiplexes if other is not multiplex):
                return
            self._liveness.handle(Heard(), multiplex.heard_at)
            effects = self._liveness.handle(Ended(reason, is_break=True), time.monotonic())
        self._carry_out(effects)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, DeclareLost):
                self._last_loss = effect.reason
                self.sent_references.clear()
                self._end_connections()
                self._on_lost(self, effect)

    def _end_connections(self) -> None:
        with self._connections_lock:
            connections = list(self._connections)
            self._connections.clear()
        unused = self.requests.lanes.end()
        for connection in connections:
            connection.interrupt()  # the thread that waits on it closes it
        for lane in unused:
            lane.close()

    def loss(self, what: str, reason: str = "") -> WorkerLost:
        """The error for `what`, which needed the lost worker.

        Args:
            reason: why, if nothing else is known.
        """
        reason = self._liveness.reason or self._last_loss or reason or "the connection was closed"
        return WorkerLost(
            f"worker {self.info.name!r} was lost during {what}: {reason}. How much of it was "
            "done there is not known",
            worker=self.info.name,
            reason=reason,
        )

    def silent(self, what: str) -> WorkerLost:
        """The error of a message that the worker does not read."""
        reason = f"it has taken no message for {POST_SECONDS:g} seconds"
        return WorkerLost(
            f"{what} could not be sent to worker {self.info.name!r}: {reason}",
            worker=self.info.name,
            reason=reason,
        )

    def timed_out(self, seconds: float, what: str, *, was_sent: bool = True) -> RpcTimeout:
        return RpcTimeout(
            timeout_text(f"worker {self.info.name!r}", what, seconds, was_sent=was_sent),
            worker=self.info.name,
            seconds=seconds,
            was_sent=was_sent,
        )

    def unreachable(self, error: Exception) -> WorkerLost:
        if isinstance(error, AuthenticationError | ProtocolError):
            reason = str(error)
        else:
            reason = f"cannot connect: {error}"
        reason = self._liveness.reason or reason
        return WorkerLost(
            f"worker {self.info.name!r} cannot be reached: {reason}",
            worker=self.info.name,
            reason=reason,
        )

    # -- signs of life

    def wait_for_sign_of_life(self, what: Callable[[], str]) -> None:
        """Waits until the multiplexed connection brings something: another connection broke, and
        the worker may be dead. Ends at the latest when the heartbeat declares it lost.

        Raises:
            WorkerLost
        """
        reads = {multiplex: multiplex.reads for multiplex in self._multiplexes}
        self.ping()
        pause = 0.0002
        while not self._is_closed and not self.has_no_multiplex():
            if any(multiplex.reads > before for multiplex, before in reads.items()):
                return
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        raise self.loss(what())

    def has_no_multiplex(self) -> bool:
        return self.is_lost or all(multiplex.is_closed for multiplex in self._multiplexes)

    def tick(self, now: float) -> bool:
        """Checks deadlines and whether the peer is alive; returns whether to send it a ping."""
        live = [m for m in self._multiplexes if not m.is_closed]
        for multiplex in live:
            multiplex.tick(now)
        if not live:
            return False
        heard_at = max(m.heard_at for m in live)
        with self._connections_lock:
            before, self._reads = self._reads, {c: c.reads for c in list(self._connections)}
            if any(reads > before.get(c, reads) for c, reads in self._reads.items()):
                heard_at = now
            self._liveness.handle(Heard(), heard_at)
            if self._liveness.is_quiet(now) and self._computing.has_grown(
                live[0].peer_process, now
            ):
                self._liveness.handle(Heard(), now)
            effects = self._liveness.handle(TimePassed(), now)
        self._carry_out(effects)
        return SendPing() in effects

    def trim(self, now: float) -> bool:
        """Releases lanes and memory that have not been used for a while; returns whether there is
        something to `decline`."""
        self.requests.lanes.look(now)
        if self.memory is None:
            return False
        self.memory.trim(now)
        return self.memory.has_declined

    def ping(self) -> None:
        """Asks the worker for a sign of life. Does not wait."""
        for multiplex in self._multiplexes:
            if not multiplex.is_closed:
                try:
                    multiplex.send_if_free(Kind.PING)
                except (ConnectionClosed, TransportTimeout):
                    continue  # its reader notices the end too

    def unread(self, body: bytes) -> None:
        """The worker did not unpack the reply to one of its requests."""
        self.sent_references.unread(number_of_unread(body))

    def decline(self) -> None:
        """Tells the worker which shared memory could not be mapped here. May block."""
        memory = self.memory
        declined = [] if memory is None else memory.take_declined()
        if declined:
            body = struct.pack(f"<{len(declined)}I", *declined)
            try:
                self.multiplex().send(Kind.DECLINED, body=(body,))
            except (ConnectionClosed, TransportTimeout, WorkerLost):
                pass  # its memory is lost with it

    def declined(self, body: bytes) -> None:
        """The worker could not map these segments."""
        if self.memory is not None:
            self.memory.abandon(struct.unpack(f"<{len(body) // 4}I", body))

    @property
    def waiting_senders(self) -> int:
        """How many threads wait for the worker to read what they send."""
        return sum(len(m.senders) for m in self._multiplexes)

    @property
    def pending_count(self) -> int:
        return sum(m.pending_count for m in self._multiplexes)

    def close(self, *, goodbye_until: float) -> None:
        """Ends all connections, and fails what waits on them.

        Args:
            goodbye_until: until when, by `time.monotonic`, to wait for the peer to read the goodbye
                that tells it that this is no failure.
        """
        self._is_closed = True
        for multiplex in self._multiplexes:
            if not multiplex.is_closed:
                multiplex.say_goodbye(max(1e-3, goodbye_until - time.monotonic()))
        self.lose(SHUT_DOWN)
        self._end_connections()  # also if it was lost before
        for multiplex in self._multiplexes:
            multiplex.give_up(SHUT_DOWN)

    def join(self) -> None:
        """Waits, after `close`, for the threads that read from the worker; at most a few seconds
        for one that runs a callback of a program."""
        for multiplex in self._multiplexes:
            multiplex.join(5.0)
        if self.memory is not None:
            self.memory.close()
