"""Faults as data: what goes wrong in a run, said before it begins.

::

    faults = (
        Faults(seed=0)
        .drop(Kind.RREF_DELETE, times=3)
        .delay(Kind.CALL, seconds=0.1)
        .duplicate(Kind.RREF_FORK, times=1)
        .kill_at(Kind.GRADIENTS, after=2, on="worker2")
    )
    with cluster(3, wrap_transport=faults):
        ...

A `Faults` stands between a worker and its transport and acts on what the worker sends, by kind of
message. It is a value: each method returns a new one, it can be pickled, and every process counts
for itself. All that telegrad promises holds under any of them, with one exception that is in the
nature of the thing: a call whose request or reply is dropped ends in its timeout.

The first rule that applies to a message decides its fate. A delayed message is copied and sent
later by a thread of its own, so it may be overtaken.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from telegrad.rpc.group import current
from telegrad.transport.base import Connection, ConnectionClosed, Transport, TransportTimeout
from telegrad.transport.wrapping import WrappedConnection, WrappedTransport
from telegrad.wire.frames import Flags, Kind, split_rider

__all__ = ["Fault", "Faults", "FaultyConnection"]

Action = Literal["drop", "delay", "duplicate", "kill"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rule, and what it does to a message."""

    action: Action
    kind: Kind
    times: int | None = None
    """How often it strikes; None is always."""
    after: int = 0
    """How many messages of the kind pass before it strikes at all."""
    chance: float = 1.0
    on: str | None = None
    """The worker that it strikes; None is every one."""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.chance <= 1.0:
            raise ValueError(f"chance must be within 0 and 1, got {self.chance}")
        if self.after < 0 or self.seconds < 0 or (self.times is not None and self.times < 0):
            raise ValueError("times, after and seconds must not be negative")


@dataclass(frozen=True)
class Faults:
    """Give it to `RpcOptions(wrap_transport=...)`.

    Args:
        seed: decides where `chance` leaves a choice, in each process alike.
    """

    seed: int = 0
    rules: tuple[Fault, ...] = ()
    _campaign: _Campaign = field(
        default_factory=lambda: _Campaign(), init=False, repr=False, compare=False
    )

    def drop(
        self,
        kind: Kind,
        *,
        times: int | None = None,
        after: int = 0,
        chance: float = 1.0,
        on: str | None = None,
    ) -> Faults:
        """Messages of this kind do not arrive."""
        return self._and("drop", kind, times=times, after=after, chance=chance, on=on)

    def delay(
        self,
        kind: Kind,
        *,
        seconds: float,
        times: int | None = None,
        after: int = 0,
        chance: float = 1.0,
        on: str | None = None,
    ) -> Faults:
        """They arrive later; others may overtake them."""
        return self._and(
            "delay", kind, times=times, after=after, chance=chance, on=on, seconds=seconds
        )

    def duplicate(
        self,
        kind: Kind,
        *,
        times: int | None = None,
        after: int = 0,
        chance: float = 1.0,
        on: str | None = None,
    ) -> Faults:
        """They arrive twice."""
        return self._and("duplicate", kind, times=times, after=after, chance=chance, on=on)

    def kill_at(self, kind: Kind, *, after: int = 0, on: str | None = None) -> Faults:
        """The process dies (`kill -9`) when it is about to send one of these, after so many."""
        return self._and("kill", kind, times=1, after=after, on=on)

    def _and(self, action: Action, kind: Kind, **when: Any) -> Faults:
        return replace(self, rules=(*self.rules, Fault(action=action, kind=Kind(kind), **when)))

    @property
    def struck(self) -> Counter[tuple[str, Kind]]:
        """How often each action has struck each kind of message in this process."""
        return self._campaign.struck()

    def __call__(self, transport: Transport) -> Transport:
        return WrappedTransport(
            transport, lambda connection: FaultyConnection(connection, self.fate_of)
        )

    def __reduce__(self) -> tuple[type[Faults], tuple[int, tuple[Fault, ...]]]:
        return Faults, (self.seed, self.rules)

    def fate_of(self, kind: Kind, body: bytes = b"") -> Fault | None:
        """What happens to a message that is about to be sent; counts it."""
        rules = [rule for rule in self.rules if rule.kind is kind]
        return self._campaign.choose(self, rules) if rules else None


class _Campaign:
    """What has happened in this process so far."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._seen: Counter[Fault] = Counter()
        self._strikes: Counter[Fault] = Counter()
        self._random: random.Random | None = None

    def struck(self) -> Counter[tuple[str, Kind]]:
        with self._lock:
            counts: Counter[tuple[str, Kind]] = Counter()
            for rule, count in self._strikes.items():
                counts[rule.action, rule.kind] += count
            return counts

    def choose(self, faults: Faults, rules: Sequence[Fault]) -> Fault | None:
        worker = current.acting()
        name = None if worker is None else worker.info.name
        with self._lock:
            if self._random is None:
                self._random = random.Random(faults.seed)
            chosen = None
            for rule in rules:
                if rule.on is not None and rule.on != name:
                    continue
                self._seen[rule] += 1
                if chosen is None and self._strikes_now(rule, self._random):
                    self._strikes[rule] += 1
                    chosen = rule
            return chosen

    def _strikes_now(self, rule: Fault, chances: random.Random) -> bool:
        return (
            self._seen[rule] > rule.after
            and (rule.times is None or self._strikes[rule] < rule.times)
            and (rule.chance == 1.0 or chances.random() < rule.chance)
        )


class FaultyConnection(WrappedConnection):
    """A connection whose messages meet their fate on the way out.

    Args:
        fate_of: what happens to a message of this kind and body; None is nothing.
    """

    def __init__(
        self, connection: Connection, fate_of: Callable[[Kind, bytes], Fault | None]
    ) -> None:
        super().__init__(connection)
        self._fate_of = fate_of
        self._send_lock = threading.Lock()  # one message at a time leaves: late ones come between

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
        own = b"".join(body)
        if flags & Flags.RIDER and body:  # a message of its own, that travels in front of this one
            rider, payload, own = split_rider(own)
            fault = self._fate_of(rider, payload)
            if fault is not None and fault.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault is not None and fault.action == "drop":
                flags, body = flags & ~Flags.RIDER, [own]
        message = (kind, flags, call_id, context_id, message_id, body, buffers)
        fault = self._fate_of(kind, own)
        if fault is None:
            self._send_now(*message)
        elif fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "drop":
            self.drop(flags, call_id)
        elif fault.action == "delay":
            copies = [memoryview(bytes(buffer)) for buffer in buffers]
            late = (*message[:5], [b"".join(body)], copies)
            timer = threading.Timer(fault.seconds, self._send_late, late)
            timer.daemon = True
            timer.start()
        elif fault.action == "duplicate":
            self._send_now(*message)
            self._send_now(*message)

    def drop(self, flags: int, call_id: int) -> None:
        """A message is lost."""

    def _send_now(self, *message: Any) -> None:
        with self._send_lock:
            self._connection.send(*message)

    def _send_late(self, *message: Any) -> None:
        try:
            self._send_now(*message)
        except (ConnectionClosed, TransportTimeout):
            pass  # it came too late for this connection

    def close(self) -> None:
        self._connection.interrupt()  # ends a late message that is being sent
        with self._send_lock:
            self._connection.close()
