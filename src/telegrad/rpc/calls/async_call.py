"""A call that was made and is not waited for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from telegrad.errors import RpcTimeout, TelegradError, WorkerLost
from telegrad.rpc.calls.error_texts import timeout_text
from telegrad.rpc.calls.futures import CallFuture
from telegrad.rpc.calls.outcome import as_exception
from telegrad.rpc.connections.multiplex import PendingCall
from telegrad.rpc.connections.peer import Peer
from telegrad.rpc.seams import NO_CONTEXT
from telegrad.wire.codec import References
from telegrad.wire.frames import Frame

if TYPE_CHECKING:
    from telegrad.rpc.calls.agent import Agent

__all__ = ["AsyncCall", "NotSent"]

_log = logging.getLogger("telegrad.rpc")


class NotSent(TelegradError):
    """Something else, Ctrl-C say, ended a call before it was sent. The program gets that; this is
    for those who watch the call."""


class AsyncCall(PendingCall):
    """A call whose reply settles a future, within the context in which the call was made."""

    __slots__ = (
        "_agent",
        "_context",
        "begun",
        "future",
        "is_of_program",
        "on_failure",
        "peer",
        "references",
        "seconds",
        "to",
        "what",
    )

    def __init__(self, agent: Agent, to: int, context: int, what: Callable[[], str]) -> None:
        self._agent = agent
        self._context = context
        self.to = to
        self.what = what
        self.begun: list[bool] = []  # has an item once the request has begun to leave
        self.is_of_program = False  # which should hear of a failure, if that is its own
        self.on_failure: Callable[[Exception], None] | None = None
        self.references: References | None = None
        self.seconds = 0.0
        self.deadline = math.inf
        self.peer: Peer | None = None
        self.future: CallFuture[Any] = CallFuture()

    def succeed(self, frame: Frame) -> None:
        try:
            value = self._agent.result(self.to, frame, self.what)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
            self.settle_error(as_exception(error))
            return
        recorder = self._agent.service.recorder
        if self._context == NO_CONTEXT or recorder is None:
            self._settle(self.future.set_result, value)
        else:
            with recorder.enter(self._context):  # callbacks run in here
                self._settle(self.future.set_result, value)

    def settle_error(self, error: Exception) -> None:
        if self.on_failure is not None:
            self.on_failure(error)
        what = ""
        if self.is_of_program and not isinstance(error, WorkerLost | RpcTimeout | NotSent):
            what = f"{self.what()} on worker {self._agent.name_of(self.to)!r}"
        self._settle(self.future.fail, error, what)

    def _settle(self, settle: Callable[..., None], *outcome: Any) -> None:
        try:
            settle(*outcome)
        except RuntimeError:
            if not self.future.done():
                raise
            _log.warning(
                "the reply of %s came for a future that the program had completed", self.what()
            )

    def fail(self, reason: str) -> None:
        if self.peer is not None:
            self.settle_error(self.peer.loss(self.what()))
        else:
            name = self._agent.info.name
            self.settle_error(
                WorkerLost(
                    f"{self.what()} on this worker itself, {name!r}, was given up: {reason}",
                    worker=name,
                    reason=reason,
                )
            )

    def expire(self, *, was_sent: bool = True) -> None:
        if self.peer is not None:
            error = self.peer.timed_out(self.seconds, self.what(), was_sent=was_sent)
            self.settle_error(error)
        else:
            self.settle_error(
                RpcTimeout(
                    timeout_text("this worker itself", self.what(), self.seconds),
                    worker=self._agent.info.name,
                    seconds=self.seconds,
                )
            )
