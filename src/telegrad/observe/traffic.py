"""How much a worker sends and receives: bytes, messages, calls.

Counting is an instrument between the agent and its transport, so a program that does not ask for it
pays nothing::

    init_rpc(name, rpc_backend_options=RpcOptions(wrap_transport=Traffic()))
    ...
    print(traffic())                          # this worker
    print(rpc.rpc_sync("worker1", traffic))   # another

Bytes are those of whole messages, whichever way they take: what goes through shared memory counts
as if it went through the socket. Messages of a worker to itself never reach a transport, and do not
count.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from telegrad.errors import TelegradError
from telegrad.rpc.group import current
from telegrad.transport.base import Connection, Transport
from telegrad.transport.wrapping import WrappedConnection, WrappedTransport
from telegrad.wire.frames import BUFFER, HEADER, Frame, Kind

__all__ = ["Traffic", "TrafficCount", "traffic"]

_CALLS = (Kind.CALL, Kind.REMOTE)


@dataclass(frozen=True, kw_only=True)
class TrafficCount:
    """What a worker has exchanged with others since it started."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    calls_made: int = 0
    calls_served: int = 0


class Traffic:
    """Give it to `RpcOptions(wrap_transport=...)`. It can be pickled, and every process counts for
    itself."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards the set below and the sum
        self._meters: set[_Meter] = set()
        self._ended: Counter[str] = Counter()

    def __call__(self, transport: Transport) -> Transport:
        return WrappedTransport(transport, lambda connection: _MeteredConnection(connection, self))

    def __reduce__(self) -> tuple[type[Traffic], tuple[()]]:
        return Traffic, ()

    @property
    def count(self) -> TrafficCount:
        """What this process has counted so far."""
        with self._lock:
            total = self._ended.copy()
            for meter in self._meters:
                total.update(vars(meter))
        return TrafficCount(**total)

    def begin(self) -> _Meter:
        meter = _Meter()
        with self._lock:
            self._meters.add(meter)
        return meter

    def end(self, meter: _Meter) -> None:
        with self._lock:
            if meter in self._meters:
                self._meters.discard(meter)
                self._ended.update(vars(meter))


def traffic() -> TrafficCount:
    """What this worker has exchanged with others.

    Raises:
        TelegradError: it was not started with a `Traffic`.
        NotInitialized: this process is no worker.
    """
    instrument = current.current().agent.options.wrap_transport
    if not isinstance(instrument, Traffic):
        raise TelegradError(
            "this worker does not count its traffic: start it with "
            "RpcOptions(wrap_transport=telegrad.observe.Traffic())"
        )
    return instrument.count


@dataclass(eq=False)
class _Meter:
    """The counts of one connection. One thread sends and one receives at a time, and each has
    fields of its own: no lock is needed."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    calls_made: int = 0
    calls_served: int = 0


class _MeteredConnection(WrappedConnection):
    def __init__(self, connection: Connection, traffic: Traffic) -> None:
        super().__init__(connection)
        self._traffic = traffic
        self._meter = traffic.begin()
        # What is called often and not counted, without a step in between.
        self.poll = connection.poll  # type: ignore[method-assign]
        self.has_more = connection.has_more  # type: ignore[method-assign]
        self.glance = connection.glance  # type: ignore[method-assign]
        self.rest = connection.rest  # type: ignore[method-assign]
        self.set_timeout = connection.set_timeout  # type: ignore[method-assign]

    def send(
        self,
        kind: Kind,
        flags: int = 0,
        call_id: int = 0,
        context_id: int = -1,
        message_id: int = -1,
        body: Sequence[bytes | memoryview] = (),
        buffers: Sequence[memoryview] = (),
    ) -> None:
        super().send(kind, flags, call_id, context_id, message_id, body, buffers)
        meter = self._meter
        meter.messages_sent += 1
        meter.calls_made += kind in _CALLS
        meter.bytes_sent += (
            HEADER.size
            + sum(len(part) for part in body)
            + sum(BUFFER.size + buffer.nbytes for buffer in buffers)
        )

    def receive(self) -> Frame:
        frame = super().receive()
        self._count(frame)
        return frame

    def receive_now(self) -> Frame | None:
        frame = super().receive_now()
        if frame is not None:
            self._count(frame)
        return frame

    def _count(self, frame: Frame) -> None:
        meter = self._meter
        meter.messages_received += 1
        meter.calls_served += frame.kind in _CALLS
        meter.bytes_received += (
            HEADER.size
            + len(frame.body)
            + sum(BUFFER.size + memoryview(buffer).nbytes for buffer in frame.buffers)
        )

    def close(self) -> None:
        super().close()
        self._traffic.end(self._meter)
