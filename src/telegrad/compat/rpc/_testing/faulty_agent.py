"""`FaultyTensorPipeAgent`: an agent whose messages are lost or late, as its options say."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch._C._distributed_c10d import Store

from telegrad.compat.rpc import constants
from telegrad.compat.rpc._testing.faulty_transport import (
    FaultPlan,
    call_kind,
    faulty_transport,
)
from telegrad.compat.rpc.agents import TensorPipeAgent
from telegrad.compat.rpc.backend_registry import start_agent
from telegrad.compat.rpc.options import RpcBackendOptions, to_rpc_options
from telegrad.errors import RpcTimeout, TelegradError
from telegrad.rpc.calls.error_texts import timeout_text
from telegrad.rpc.references.rref import RRef

__all__ = ["FaultyTensorPipeAgent", "FaultyTensorPipeRpcBackendOptions", "start"]


class FaultyTensorPipeRpcBackendOptions(RpcBackendOptions):
    """
    Args:
        num_fail_sends: how often each message to fail is lost.
        messages_to_fail, messages_to_delay: torch's names of kinds of message.
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


def start(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    options: FaultyTensorPipeRpcBackendOptions,
) -> FaultyTensorPipeAgent:
    """Starts a worker whose transport, and whose calls to itself, are faulty."""
    plan = FaultPlan(options.messages_to_fail, options.messages_to_delay, options.num_fail_sends)
    rpc_options = replace(
        to_rpc_options(options), wrap_transport=lambda inner: faulty_transport(inner, plan)
    )
    agent = start_agent(store, name, rank, world_size, options, rpc_options, FaultyTensorPipeAgent)
    assert isinstance(agent, FaultyTensorPipeAgent)
    references: Any = agent.worker.references
    references.remote = _FaultyRemote(agent, plan, references.remote)
    return agent


class _FaultyRemote:
    """`remote`, whose requests are lost, which the caller is told at once; and those to oneself
    are late: they pass no transport."""

    def __init__(
        self, agent: TensorPipeAgent, plan: FaultPlan, inner: Callable[..., RRef[Any]]
    ) -> None:
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
        name = call_kind("REMOTE_CALL", func)
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
