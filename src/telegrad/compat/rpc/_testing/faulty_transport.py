"""A transport that loses and delays chosen messages, named as torch names its kinds of message.

A lost message never arrives, and nobody is told: the sender's protocol sends it again, or its call
times out. A delayed message leaves later, while the sender goes on and its timeouts run.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from telegrad.compat.rpc.internal import builtin_name
from telegrad.compat.torchscript.scripted import Target
from telegrad.rpc.references.fetch import REMOTE_HEAD
from telegrad.transport.base import Connection, Transport
from telegrad.transport.wrapping import LateConnection, WrappedTransport, without_rider
from telegrad.wire.frames import Flags, Frame, Kind
from telegrad.wire.function_names import function_named, name_in

__all__ = ["FaultPlan", "call_kind", "faulty_transport"]

_NAMES = {
    Kind.RREF_FORK: ("RREF_FORK_REQUEST",),
    Kind.RREF_CHILD_ACCEPTED: ("RREF_CHILD_ACCEPT",),
    Kind.RREF_DELETE: ("RREF_USER_DELETE",),
    Kind.RREF_FETCH: ("SCRIPT_RREF_FETCH_CALL", "PYTHON_RREF_FETCH_CALL"),
    Kind.CONTEXT_RELEASE: ("CLEANUP_AUTOGRAD_CONTEXT_REQ",),
    Kind.GRADIENTS: ("BACKWARD_AUTOGRAD_REQ",),
}


def call_kind(prefix: str, func: Any) -> str:
    """Torch has one kind of call for operators and TorchScript, and one for Python."""
    is_script = isinstance(func, torch.jit.ScriptFunction | Target)
    if is_script or builtin_name(func) is not None:
        return f"SCRIPT_{prefix}"
    return f"PYTHON_{prefix}"


class FaultPlan:
    """Which messages are lost, and which are late.

    Args:
        to_fail: names of messages; the first `num_fail_sends` sends of each are lost.
        to_delay: seconds by name.
    """

    def __init__(
        self, to_fail: Sequence[str], to_delay: Mapping[str, float], num_fail_sends: int
    ) -> None:
        self._to_fail = frozenset(to_fail)
        self._to_delay = dict(to_delay)
        self._num_fail_sends = num_fail_sends
        self._lock = threading.Lock()  # guards the counts
        self._counts: collections.Counter[bytes] = collections.Counter()

    def loses(self, names: Sequence[str], identity: bytes) -> bool:
        """Whether this sending of a message is to be lost."""
        if self._to_fail.isdisjoint(names):
            return False
        with self._lock:
            self._counts[identity] += 1
            return self._counts[identity] <= self._num_fail_sends

    def delay(self, names: Sequence[str]) -> float:
        return max((self._to_delay.get(name, 0.0) for name in names), default=0.0)


def faulty_transport(inner: Transport, plan: FaultPlan) -> Transport:
    """A transport whose messages the plan loses or delays."""
    return WrappedTransport(inner, lambda connection: _FaultyConnection(connection, plan))


class _FaultyConnection(LateConnection):
    def __init__(self, connection: Connection, plan: FaultPlan) -> None:
        super().__init__(connection)
        self._plan = plan
        self._owed: collections.deque[Frame] = collections.deque()  # answers to lost messages

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
        # Upstream has no riders: one is lost as the message would be that it stands for.
        flags, body, own = without_rider(flags, body, self._loses_rider)
        names = _names(kind, [own])
        if names and self._plan.loses(names, kind.to_bytes(1, "little") + b"".join(body)):
            if flags & Flags.NO_ANSWER:
                self._owed.append(Frame(Kind.RECEIPT, 0, call_id, -1, -1, b""))
            return
        message = (kind, flags, call_id, context_id, message_id, body, buffers)
        delay = self._plan.delay(names)
        if delay:
            self.send_later(delay, *message)
        else:
            self.send_now(*message)

    def _loses_rider(self, kind: Kind, payload: bytes) -> bool:
        names = _NAMES.get(kind, ())
        return bool(names) and self._plan.loses(names, kind.to_bytes(1, "little") + payload)

    def poll(self) -> bool:
        return bool(self._owed) or super().poll()

    def receive(self) -> Frame:
        return self._owed.popleft() if self._owed else super().receive()


def _names(kind: Kind, body: Sequence[bytes | memoryview]) -> tuple[str, ...]:
    if kind is Kind.CALL:
        return (call_kind("CALL", _function(b"".join(body), 0)),)
    if kind is Kind.REMOTE:
        return (call_kind("REMOTE_CALL", _function(b"".join(body), REMOTE_HEAD.size)),)
    return _NAMES.get(kind, ())


def _function(body: bytes, offset: int) -> Any:
    """The function that a call names; None if it is sent whole."""
    name, _ = name_in(body, offset)
    return function_named(name) if name else None
