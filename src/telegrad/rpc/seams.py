"""The interfaces between an agent and the layers above.

The RRef table, the autograd engine and membership use `Messenger`, so they run unchanged on a real
agent and on the simulated network of `telegrad.testing`. `Recorder` points the other way: through
it autograd takes part in every call, and the agent need not know about gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from telegrad.rpc.connections.conversation import Interruption
from telegrad.wire.frames import Kind

__all__ = ["NO_CONTEXT", "Handler", "Messenger", "Recorder", "Rescue", "Timer"]

NO_CONTEXT = -1
"""The context id of a message that belongs to no autograd context."""

Handler = Callable[[int, Any], Any]
"""Takes the sender's worker id and the message's body.

Runs on a thread where it may block and run user code. Its return value answers a `request` (a
`torch.futures.Future` does so when it is done), and is dropped for a `post`.
"""


Rescue = Callable[[int, "bytes | memoryview", Exception], None]
"""Takes the sender's worker id, an undecoded message, and why it could not be handled."""


class Timer(Protocol):
    """A pending `call_later`."""

    def cancel(self) -> None: ...


class Messenger(Protocol):
    """The part of an agent that protocols use. Bodies are values that the codec can pack."""

    @property
    def worker_id(self) -> int: ...

    def name_of(self, worker: int) -> str:
        """A worker's name, even after it has left."""

    def post(self, to: int, kind: Kind, body: Any, *, reach: bool = False) -> None:
        """Sends a message without an answer; also to this worker itself.

        Posts may arrive in any order. Returns once the bytes are sent, so tensors in the body may
        be changed afterwards.

        Args:
            reach: connect again to a peer that counts as lost. For messages about what was learned
                after the loss; protocols have handled the rest.

        Raises:
            WorkerLost: the peer counts as lost. If it is lost now, the watchers are called.
            SerializationError: the body cannot be packed.
        """

    def converse(
        self,
        to: int,
        kind: Kind,
        body: Any,
        interruption: Interruption,
        meanwhile: Callable[[], None],
    ) -> list[tuple[Kind, Any]]:
        """Like `post`, but waits until the handler is done, or has called `end_conversation`.
        Returns the messages that it has posted to this worker meanwhile, for the caller to handle.
        An interruption ends the wait with an empty list, and the messages arrive as usual.

        Args:
            meanwhile: called once the message is sent, for short work that is due anyway.

        Raises:
            WorkerLost, SerializationError
        """

    def end_conversation(self) -> None:
        """In a handler: ends the conversation in which the sender waits, if it does."""

    def request(
        self, to: int, kind: Kind, body: Any, *, timeout: float | None = None
    ) -> torch.futures.Future[Any]:
        """Sends a message with an answer. The future ends with that, `RpcTimeout`, `WorkerLost`, or
        the handler's exception. `timeout` None means the agent's default, 0 none."""

    def handle(self, kind: Kind, handler: Handler, rescue: Rescue | None = None) -> None:
        """Registers the handler of a kind of message; once per kind, before the agent starts.

        A thread may wait for the effect of a posted message. So if the message cannot be decoded or
        its handler raises, `rescue` is called to end that wait. Without one, or if it fails, too,
        the sender counts as lost, which ends every wait.
        """

    def offer(
        self, kind: Kind, take: Callable[[int], bytes | None], can_wait: Callable[[bytes], bool]
    ) -> None:
        """Sends small messages together with calls to the same worker.

        Args:
            take: called with the worker's id before a call is sent; returns the body of a post, or
                None. It must be fast. The message is lost if the call cannot be sent.
            can_wait: called at the receiver with the message's body: whether to handle it after the
                call. Otherwise it is handled before the call.
        """

    def watch_losses(self, callback: Callable[[int, str], None]) -> None:
        """Runs `callback(worker_id, reason)` once for each loss of a worker, on a thread of its
        own.
        A worker that returns under its id may be lost again."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Runs `callback` once, on the agent's clock thread: it must be short and must not
        block."""

    def run_aside(self, work: Callable[[], None]) -> None:
        """Runs `work` soon, on a thread that it may block, as a timer must not."""


class Recorder(Protocol):
    """Autograd's part in each message. An agent without a recorder records nothing."""

    def current_context(self) -> int:
        """The context of this thread, or `NO_CONTEXT`. Each call calls it: it must be fast."""

    def record_send(self, context_id: int, to: int, tensors: Sequence[torch.Tensor]) -> int:
        """A message of this context is sent to worker `to`.

        Args:
            tensors: those in the message that require grad; may be empty.

        Returns:
            The message's autograd id, which is sent with it.
        """

    def foresee(self, context_id: int, message_id: int) -> None:
        """An answer was sent, and its receiver is busy with it: the time to prepare for its
        gradients. It should not take longer than a short call."""

    def record_receive(
        self, context_id: int, message_id: int, source: int, tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The message has arrived: gives each of `tensors` its history. They required grad at the
        sender and do not here. Outside any context (`NO_CONTEXT`), their history stayed behind.

        Returns:
            The tensors to use instead, in the same order.
        """

    def enter(self, context_id: int) -> AbstractContextManager[None]:
        """Makes the context current on this thread while one of its calls runs here."""
