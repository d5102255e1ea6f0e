"""In the place of `torch.distributed.rpc._testing`: an agent whose messages are lost or late.

A lost message never arrives, and nobody is told: the sender's protocol sends it again, or its call
times out. A delayed message leaves later, while the sender goes on and its timeouts run. Messages
are chosen by torch's names for their kinds.
"""

from __future__ import annotations

import collections
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from telegrad.compat.rpc import backend_registry, constants
from telegrad.compat.rpc.agents import TensorPipeAgent
from telegrad.compat.rpc.internal import builtin_name
from telegrad.compat.rpc.options import RpcBackendOptions, to_rpc_options
from telegrad.compat.torchscript.scripted import Target
from telegrad.errors import RpcTimeout, TelegradError
from telegrad.rpc.calls.outcome import timeout_text
from telegrad.rpc.references.fetch import REMOTE_HEAD
from telegrad.rpc.references.rref import RRef
from telegrad.testing.faults import Fault, FaultyConnection
from telegrad.transport.base import Transport
from telegrad.transport.wrapping import WrappedTransport
from telegrad.wire.frames import Flags, Frame, Kind
from telegrad.wire.function_names import function_named, name_in

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "is_available"]

_NAMES = {
    Kind.RREF_FORK: ("RREF_FORK_REQUEST",),
    Kind.RREF_CHILD_ACCEPTED: ("RREF_CHILD_ACCEPT",),
    Kind.RREF_DELETE: ("RREF_USER_DELETE",),
    Kind.RREF_FETCH: ("SCRIPT_RREF_FETCH_CALL", "PYTHON_RREF_FETCH_CALL"),
    Kind.CONTEXT_RELEASE: ("CLEANUP_AUTOGRAD_CONTEXT_REQ",),
    Kind.GRADIENTS: ("BACKWARD_AUTOGRAD_REQ",),
}


def is_available() -> bool:
    """True."""
    return True


class FaultyTensorPipeRpcBackendOptions(RpcBackendOptions):
    """
    Args:
        messages_to_fail, messages_to_delay: torch's names of kinds of message.
        num_fail_sends: how often each message to fail is lost.
    """

    def __init__(
        self,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends


class FaultyTensorPipeAgent(TensorPipeAgent):
    """An agent for tests."""


class _Plan:
    """Which messages are lost, and which are late."""

    def __init__(self, options: FaultyTensorPipeRpcBackendOptions) -> None:
        self._options = options
        self._lock = threading.Lock()  # guards the counts
        self._counts: collections.Counter[bytes] = collections.Counter()

    def loses(self, names: Sequence[str], identity: bytes) -> bool:
        """Whether this sending of a message is to be lost."""
        if set(self._options.messages_to_fail).isdisjoint(names):
            return False
        with self._lock:
            self._counts[identity] += 1
            return self._counts[identity] <= self._options.num_fail_sends

    def delay(self, names: Sequence[str]) -> float:
        return max((self._options.messages_to_delay.get(name, 0.0) for name in names), default=0.0)

    def fate_of(self, kind: Kind, body: bytes) -> Fault | None:
        names = _names(kind, body)
        if self.loses(names, kind.to_bytes(1, "little") + body):
            return Fault(action="drop", kind=kind)
        delay = self.delay(names)
        return Fault(action="delay", kind=kind, seconds=delay) if delay else None


class _Connection(FaultyConnection):
    """Answers in the place of whoever would have got a message that is lost."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._owed: collections.deque[Frame] = collections.deque()

    def drop(self, flags: int, call_id: int) -> None:
        if flags & Flags.NO_ANSWER:
            self._owed.append(Frame(Kind.RECEIPT, 0, call_id, -1, -1, b""))

    def poll(self) -> bool:
        return bool(self._owed) or super().poll()

    def receive(self) -> Frame:
        return self._owed.popleft() if self._owed else super().receive()

    def receive_now(self) -> Frame | None:
        return self._owed.popleft() if self._owed else super().receive_now()


def _names(kind: Kind, body: bytes) -> tuple[str, ...]:
    if kind is Kind.CALL:
        return (_call_kind("CALL", _function(body, 0)),)
    if kind is Kind.REMOTE:
        return (_call_kind("REMOTE_CALL", _function(body, REMOTE_HEAD.size)),)
    return _NAMES.get(kind, ())


def _function(body: bytes, offset: int) -> Any:
    """The function that a call names; None if it is sent whole."""
    name, _ = name_in(body, offset)
    return function_named(name) if name else None


def _call_kind(prefix: str, func: Any) -> str:
    """Torch has one kind of call for operators and TorchScript, and one for Python."""
    is_script = isinstance(func, torch.jit.ScriptFunction | Target)
    if is_script or builtin_name(func) is not None:
        return f"SCRIPT_{prefix}"
    return f"PYTHON_{prefix}"


class _FaultyRemote:
    """`remote`, whose requests are lost, which the caller is told at once; and those to oneself
    are late: they pass no transport."""

    def __init__(self, agent: TensorPipeAgent, plan: _Plan, inner: Callable[..., RRef[Any]]):
        self._agent = agent
        self._plan = plan
        self._inner = inner

    def __call__(
        self,
        to: int,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> RRef[Any]:
        name = _call_kind("REMOTE_CALL", func)
        if self._plan.loses([name], uuid.uuid4().bytes):
            return self._lost(to, TelegradError(f"a {name} message was lost on purpose"))
        delay = self._plan.delay([name])
        seconds = self._agent.worker.agent.rpc_timeout if timeout is None else timeout
        if to != self._agent.id or not 0 < seconds < delay:
            return self._inner(to, func, args, kwargs, timeout)
        return self._late(name, seconds)

    def _lost(self, to: int, error: TelegradError) -> RRef[Any]:
        table = self._agent.worker.references.table
        if to == self._agent.id:
            entry, rref = table.new_owned()
            entry.creation_failed(error)
            entry.set_error(error)
        else:
            _, fork_id, rref = table.new_user(to)
            table.creation_failed(fork_id, error)
        return rref

    def _late(self, name: str, seconds: float) -> RRef[Any]:
        entry, rref = self._agent.worker.references.table.new_owned()
        error = RpcTimeout(
            timeout_text("this worker itself", f"remote({name})", seconds),
            worker=self._agent.name,
            seconds=seconds,
        )
        timer = threading.Timer(seconds, entry.creation_failed, (error,))
        timer.daemon = True
        timer.start()
        return rref


def _construct(
    rpc_timeout: float, init_method: str, **given: Any
) -> FaultyTensorPipeRpcBackendOptions:
    known = ("num_worker_threads", "messages_to_fail", "messages_to_delay", "num_fail_sends")
    return FaultyTensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        **{name: given[name] for name in known if name in given},
    )


def _start(
    store: Store, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    """Starts a worker whose transport, and whose calls to itself, are faulty."""
    backend_registry.check_start(store, rpc_backend_options, FaultyTensorPipeRpcBackendOptions)
    plan = _Plan(rpc_backend_options)

    def wrap(inner: Transport) -> Transport:
        return WrappedTransport(inner, lambda connection: _Connection(connection, plan.fate_of))

    rpc_options = replace(to_rpc_options(rpc_backend_options), wrap_transport=wrap)
    agent = backend_registry.start_agent(
        store, name, rank, world_size, rpc_backend_options, rpc_options, FaultyTensorPipeAgent
    )
    references: Any = agent.worker.references
    references.remote = _FaultyRemote(agent, plan, references.remote)
    return agent


if not backend_registry.backend_registered("FAULTY_TENSORPIPE"):
    backend_registry.register_backend("FAULTY_TENSORPIPE", _construct, _start)
