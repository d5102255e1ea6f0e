"""The connections between this worker and the others.

It listens (`acceptor`), connects to other workers at first use, and tells its watchers of every
loss. It does not know what messages mean: each goes to `serve`, with the sender's id and a function
that answers on the connection it came from.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial

from telegrad.errors import AuthenticationError, ProtocolError, TelegradError, WorkerLost
from telegrad.rpc.calls.quick_functions import QuickFunctions
from telegrad.rpc.connections.acceptor import Acceptor
from telegrad.rpc.connections.clock import Clock
from telegrad.rpc.connections.lane_server import Reception
from telegrad.rpc.connections.liveness import DeclareLost
from telegrad.rpc.connections.multiplex import Multiplex
from telegrad.rpc.connections.peer import Peer
from telegrad.rpc.connections.thread_pool import CallPools, WorkPool
from telegrad.rpc.group.directory import Directory, Record
from telegrad.rpc.group.members import Members, has_left
from telegrad.rpc.group.options import RpcOptions
from telegrad.rpc.group.rendezvous import address_towards, host_identity
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.transport.base import Connection, ConnectionClosed, Transport, TransportTimeout
from telegrad.transport.handshake import Identity, Purpose, introduce
from telegrad.transport.inproc import InprocTransport
from telegrad.transport.same_host import shm
from telegrad.transport.sockets import TcpTransport, UnixTransport
from telegrad.wire.frames import Flags, Frame, Kind
from telegrad.wire.tensor_table.memory import BufferPool

__all__ = ["Network", "Send"]

_log = logging.getLogger("telegrad.rpc")

# Seconds. Otherwise calls with a shorter timeout would never get a connection.
_LEAST_TO_CONNECT = 1.0
_FAILURES_TO_CONNECT = (ConnectionClosed, TransportTimeout, AuthenticationError, ProtocolError)

Send = Callable[..., None]
"""`Connection.send` of the connection that a message came on."""

Serve = Callable[[int, Frame, Send], None]

_OWN_THREADS = 4  # for messages other than calls
_MOST_THREADS = 64  # for blocked calls of one depth; or four times the usual number
_TRIM_SECONDS = 1.0
_CALLS = frozenset((Kind.CALL, Kind.REMOTE, Kind.PLAIN_CALL))
_HAS_LEFT = "it has shut down"
_GOODBYE_SECONDS = 1.0  # for all peers together


class Network:
    """
    Args:
        serve: runs a message from worker `source`. It may block its thread.
        function_in: the name of the function that a message calls, or empty.
        name_of: what a message asks for.
        has_called: whether the last request that this thread served has called other workers.
        on_thread_start: runs first in each thread that is started here.
    """

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: bytes,
        key: bytes,
        options: RpcOptions,
        directory: Directory,
        serve: Serve,
        function_in: Callable[[Frame], bytes],
        name_of: Callable[[Frame], bytes],
        has_called: Callable[[], bool],
        on_thread_start: Callable[[], None],
    ) -> None:
        self.info = info
        self.incarnation = incarnation
        self._key = key
        self._options = options
        self._directory = directory
        self._serve = serve
        self._function_in = function_in
        self._quick = QuickFunctions()
        self._on_thread_start = on_thread_start
        self._host = host_identity()
        self._memory_pool = BufferPool()
        self.clock = Clock(info.name, self._tick)
        self.work = WorkPool(info.name, _OWN_THREADS, on_thread_start)
        threads = options.num_worker_threads
        most = max(_MOST_THREADS, 4 * threads)
        self.calls = CallPools(info.name, threads, on_thread_start, most)
        self._reception = Reception(
            serve, name_of, has_called, options.busy_wait, partial(self._spawn, "host")
        )
        self.members = Members(info, directory, self._new_peer)
        self._loss_watchers: list[Callable[[int, str], None]] = []
        self.given_up: dict[int, str] = {}
        """Worker → why it was lost, for those that were lost because of their silence."""
        self._acceptor = Acceptor(
            info, incarnation, key, self._recognise, self._welcome, self._spawn
        )
        self._transports: dict[str, Transport] = {}
        self._threads: set[threading.Thread] = set()
        self._threads_lock = threading.RLock()  # guards the set above
        self._trimmed_at = 0.0
        self._knows_group = threading.Event()  # or is closing
        self._is_closing = False
        self._is_over = threading.Event()

    # -- starting

    def listen(self, *, all_local: bool) -> Record:
        """Opens the listeners and returns this worker's record."""
        options = self._options
        limits = options.limits
        if options.transport == "inproc":
            self._transports["inproc"] = InprocTransport()
        if options.transport in ("auto", "unix"):
            self._transports["unix"] = UnixTransport(
                self._memory_pool, limits, busy_wait=options.busy_wait
            )
        if options.transport == "tcp" or (options.transport == "auto" and not all_local):
            host = options.host
            if host is None:
                host = "127.0.0.1" if all_local else address_towards(options.init_method)
            scheme, server_tls, client_tls = options.tcp_security()
            self._transports[scheme] = TcpTransport(
                self._memory_pool,
                limits,
                scheme=scheme,
                host=host,
                server_tls=server_tls,
                client_tls=client_tls,
                busy_wait=options.busy_wait,
                heartbeat=(options.heartbeat_interval, options.heartbeat_timeout),
            )
        if options.wrap_transport is not None:
            for scheme, transport in self._transports.items():
                self._transports[scheme] = options.wrap_transport(transport)
        for transport in self._transports.values():
            self._acceptor.add(transport.listen())
        return Record(
            name=self.info.name,
            id=self.info.id,
            incarnation=self.incarnation.hex(),
            host=self._host,
            addresses=self._acceptor.addresses,
        )

    def start(self) -> None:
        self.work.start()
        self.calls.start()
        self._acceptor.open()
        self.clock.start()

    def admit_members(self) -> None:
        """All members are known: peers are served from now on.

        A peer that started faster may have connected before. It waits, because what it calls could
        look for members that are not known here yet.
        """
        self._knows_group.set()

    def _new_peer(self, record: Record) -> Peer:
        shares = (
            self._options.shared_memory
            and record.host == self._host
            and "unix" in self._transports
            and shm.is_available()
        )
        return Peer(
            record.info,
            bytes.fromhex(record.incarnation),
            self._connect,
            self._new_multiplex,
            self._lost,
            shm.SharedMemory() if shares else None,
            (self._options.heartbeat_interval, self._options.heartbeat_timeout),
            self._on_late,
        )

    def _on_late(self, peer: Peer, receive: Callable[[], Frame | None]) -> None:
        def serve() -> None:
            frame = receive()
            if frame is not None:
                self._serve(peer.info.id, frame, _to_nobody)

        self.work.submit(serve)

    # -- connecting

    def _connect(self, peer: Peer, purpose: Purpose, seconds: float | None) -> Connection:
        if self._is_closing:
            raise WorkerLost(
                f"worker {peer.info.name!r} cannot be called: this worker is shutting down",
                worker=peer.info.name,
                reason="this worker is shutting down",
            )
        peer.begun.wait_until_told()
        address = self._address_of(peer)
        scheme = address.partition(":")[0]
        timeout = self._options.connect_timeout
        end = math.inf
        if seconds is not None and max(seconds, _LEAST_TO_CONNECT) < timeout:
            timeout = max(seconds, _LEAST_TO_CONNECT)
            end = time.monotonic() + timeout
        connection: Connection | None = None
        try:
            connection = self._transports[scheme].connect(address, timeout)
            connection.set_timeout(timeout)
            peer.watch(connection)
            introduce(
                connection,
                self._key,
                Identity(self.info.id, peer.info.id, purpose, self.incarnation, peer.incarnation),
            )
            connection.set_timeout(None)
        except BaseException as error:
            if connection is not None:
                peer.remove(connection)
                connection.close()
            if isinstance(error, OSError):  # this process has no descriptor or memory left
                raise TelegradError(
                    f"worker {peer.info.name!r} cannot be connected to from here: {error}"
                ) from None
            if not isinstance(error, _FAILURES_TO_CONNECT):
                raise
            is_late = isinstance(error, TransportTimeout)
            if is_late:
                error = TransportTimeout(f"no answer within {timeout:g} seconds")
            if time.monotonic() >= end or (is_late and end < math.inf):
                raise TransportTimeout(f"no connection within {timeout:g} seconds") from None
            raise peer.unreachable(error) from None
        return connection

    def _address_of(self, peer: Peer) -> str:
        record = self.members.record_of(peer.info.id)
        if record is None:  # it left just now
            raise has_left(peer.info.name)
        for address in record.addresses:
            scheme = address.partition(":")[0]
            if scheme in self._transports and (scheme != "unix" or record.host == self._host):
                return address
        raise WorkerLost(
            f"worker {peer.info.name!r} listens at {', '.join(record.addresses) or 'no address'}, "
            f"and this worker speaks {', '.join(self._transports)}: give both the same transport "
            "and TLS options",
            worker=peer.info.name,
            reason="no transport in common",
        )

    def address_of(self, worker_id: int) -> str:
        """The address of another worker."""
        return self._address_of(self.members.peer(worker_id))

    def answers(self, record: Record) -> bool:
        """Whether the worker of a record is alive, by connecting to its addresses.

        For a Unix socket that is enough: its name is random, and it ends with the process. A TCP
        port may belong to another program by now, so there the worker has to prove itself.
        """
        identity = Identity(
            self.info.id,
            record.id,
            Purpose.PROBE,
            self.incarnation,
            bytes.fromhex(record.incarnation),
        )
        timeout = self._options.connect_timeout
        for address in record.addresses:
            scheme = address.partition(":")[0]
            if scheme not in self._transports or (scheme == "unix" and record.host != self._host):
                continue
            try:
                connection = self._transports[scheme].connect(address, timeout)
            except ConnectionClosed:
                continue
            try:
                connection.set_timeout(timeout, time.monotonic() + timeout)
                if scheme == "unix":
                    connection.channel_binding()
                else:
                    introduce(connection, self._key, identity)
            except _FAILURES_TO_CONNECT:
                continue
            finally:
                connection.close()
            return True
        return False

    # -- accepting connections

    def _welcome(self, identity: Identity, connection: Connection) -> None:
        """Runs a connection that another worker has opened, to its end."""
        peer = self.members.known_peer(identity.worker_id)
        if peer is None:
            connection.close()
            return
        if identity.purpose is Purpose.MULTIPLEX:
            peer.reopened()
        peer.add(connection)
        if self._is_closing:
            connection.interrupt()  # `close` may have missed it
        if identity.purpose in (Purpose.MULTIPLEX, Purpose.SECOND_MULTIPLEX):
            is_second = identity.purpose is Purpose.SECOND_MULTIPLEX
            try:
                peer.adopt(self._new_multiplex(peer, connection), is_second=is_second)
            except ConnectionClosed as error:
                peer.remove(connection)
                self._acceptor.warn_once(f"a connection could not be served: {error}")
        else:
            self._serve_lane(peer, connection)

    def _recognise(self, identity: Identity) -> None:
        self._knows_group.wait()  # ends when the group is known, or by `close`
        peer = self.members.known_peer(identity.worker_id)
        if peer is None or peer.incarnation != identity.incarnation:
            record = self._directory.record_of(identity.worker_id)
            if record is None or record.incarnation != identity.incarnation.hex():
                raise ProtocolError(f"worker {identity.worker_id} is not part of the group")
            self.members.introduce(record)

    def _serve_lane(self, peer: Peer, lane: Connection) -> None:
        try:
            self._reception.serve_lane(peer.info.id, lane, peer.begun)
        except (ConnectionClosed, TransportTimeout):
            pass  # the caller gave up, left or died; the multiplex knows which
        except ProtocolError as error:
            self._acceptor.warn_once(f"worker {peer.info.name!r} broke the protocol: {error}")
        finally:
            peer.remove(lane)
            lane.close()

    def _new_multiplex(self, peer: Peer, connection: Connection) -> Multiplex:
        return Multiplex(
            connection,
            f"{self.info.name}-{peer.info.name}",
            partial(self._on_request, peer),
            partial(self._on_closed, peer),
            self._on_thread_start,
            self.work.submit,
        )

    def _on_request(self, peer: Peer, multiplex: Multiplex, frame: Frame) -> None:
        if frame.kind is Kind.GOODBYE:
            peer.lose(_HAS_LEFT)
        elif frame.kind is Kind.PING:
            _pong(multiplex)  # at once: work in the pool may take longer than the heartbeat
        elif frame.kind is Kind.DECLINED:
            peer.declined(frame.body)
        else:
            name = self._function_in(frame)
            run = partial(self._serve_timed, name, peer.info.id, frame, multiplex)
            if self._quick.is_quick(name):
                run()
            elif frame.kind in _CALLS:
                self.calls.submit(frame.flags // Flags.DEPTH_ONE, run)
            else:
                self.work.submit(run)

    def _serve_timed(self, name: bytes, source: int, frame: Frame, multiplex: Multiplex) -> None:
        peer = self.members.known_peer(source)
        if peer is not None and peer.begun.loss_told is not None:
            peer.begun.wait_until_told()
        begun = time.perf_counter()
        try:
            self._serve(source, frame, multiplex.send)
        except BaseException:  # it could not even be answered: end the wait at the other end
            multiplex.interrupt()
            raise
        self._quick.ran(name, time.perf_counter() - begun)

    def _on_closed(self, peer: Peer, multiplex: Multiplex, reason: str) -> None:
        if not self._is_closing:
            peer.multiplex_ended(multiplex, reason)

    # -- watching

    def watch_losses(self, callback: Callable[[int, str], None]) -> None:
        self._loss_watchers.append(callback)

    def _lost(self, peer: Peer, loss: DeclareLost) -> None:
        if self._is_closing:
            return
        reason = loss.reason
        if reason == _HAS_LEFT:
            _log.info("worker %s has shut down", peer.info.name)
        else:
            _log.info("worker %s is lost: %s", peer.info.name, reason)
        if loss.by_silence:
            self.given_up[peer.info.id] = reason
        if peer.memory is not None:
            peer.memory.close()
            peer.memory = shm.SharedMemory()
        worker, watchers = peer.info.id, list(self._loss_watchers)
        untold = list(watchers)
        told = threading.Event()
        for one in (peer, self.members.known_peer(worker)):  # it may have been replaced
            if one is not None and untold:
                one.begun.loss_told = told

        def tell(watcher: Callable[[int, str], None]) -> None:
            try:
                watcher(worker, reason)
            finally:
                untold.remove(watcher)
                if not untold:
                    told.set()

        for watcher in watchers:
            self.work.submit(partial(tell, watcher))

    def _tick(self, now: float) -> None:
        senders = sum(peer.waiting_senders for peer in self.members.peers())
        self.work.tick(senders)
        self.calls.tick(senders)
        self._reception.tick(now)
        self._acceptor.tick(now)
        trims = now - self._trimmed_at > _TRIM_SECONDS
        for peer in self.members.peers():
            if peer.tick(now):
                peer.ping()
            if trims and peer.trim(now):
                self.work.submit(peer.decline)
        if trims:
            self._trimmed_at = now
            self._memory_pool.trim(now)

    # -- ending

    def hold_requests(self) -> None:
        """Requests that come from now on wait until `close`, or the end of the process."""

        def hold(source: int, frame: Frame, send: Send) -> None:
            self._is_over.wait()

        self._serve = hold
        self._reception.serve_by(hold)

    def fall_silent(self) -> None:
        """Answers nothing from now on, pings included; peers notice the end of the process, or the
        silence. Only connections are left, and threads that wait on them."""
        self.clock.stop()
        self.work.fall_silent(timeout=1.0)  # its threads are idle
        self.calls.fall_silent(timeout=1.0)

    def close(self, *, patience: float) -> None:
        """Ends all listeners, connections and threads, and so every wait on them.

        Args:
            patience: seconds to wait for threads that run a program's own code.
        """
        self._is_closing = True
        self._knows_group.set()
        self._is_over.set()
        self._acceptor.close()
        self.clock.stop()
        goodbye_until = time.monotonic() + _GOODBYE_SECONDS
        peers = self.members.peers()
        for peer in peers:
            peer.close(goodbye_until=goodbye_until)
        self._reception.close()
        deadline = time.monotonic() + patience
        self.calls.drain(timeout=patience)
        self.work.drain(timeout=max(0.0, deadline - time.monotonic()))
        for peer in peers:
            peer.join()
        self.calls.close(timeout=max(0.0, deadline - time.monotonic()))
        self.work.close(timeout=max(0.0, deadline - time.monotonic()))
        with self._threads_lock:
            threads = set(self._threads)
        for thread in threads - {threading.current_thread()}:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("a call is still running on %s while its worker ends", thread.name)

    def _spawn(self, role: str, target: Callable[[], None]) -> None:
        def run() -> None:
            self._on_thread_start()
            try:
                target()
            except TelegradError:
                _log.exception("%s: a connection ended by an error", self.info.name)
            finally:
                with self._threads_lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=f"{self.info.name}-{role}", daemon=True)
        with self._threads_lock:
            thread.start()
            self._threads.add(thread)  # its end waits for the lock


def _to_nobody(*parts: object) -> None:
    """The answer to a late reply: there is none."""


def _pong(multiplex: Multiplex) -> None:
    try:
        multiplex.send_if_free(Kind.PONG)
    except (ConnectionClosed, TransportTimeout):
        pass  # its reader notices the end too
