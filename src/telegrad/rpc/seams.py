"""What the layers above an agent may ask of it, and what it asks of them.

The RRef table, the autograd engine and membership are written against `Messenger`, so they run
unchanged on a real agent and on the simulated network of `telegrad.testing`. `Recorder` points the
other way: it is how autograd takes part in every call without the agent knowing what a gradient
is.
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

Runs on a thread of its own: it may block and may run user code. What it returns answers a
`request` (a returned `torch.futures.Future` answers when it is done) and is dropped for a `post`.
"""


Rescue = Callable[[int, "bytes | memoryview", Exception], None]
"""Takes the sender's worker id, a message as it came, and why it could not be handled."""


class Timer(Protocol):
    """A pending `call_later`."""

    def cancel(self) -> None: ...


class Messenger(Protocol):
    """The part of an agent that protocols stand on. Bodies are any value the codec can pack."""

    @property
    def worker_id(self) -> int: ...

    def name_of(self, worker: int) -> str:
        """What a worker is called, also one that is gone."""

    def post(self, to: int, kind: Kind, body: Any, *, reach: bool = False) -> None:
        """Sends a message that has no answer; also to oneself.

        No order is promised between two posts. Returns once the bytes have left, so tensors in
        the body may be changed afterwards.

        Args:
            reach: tries to connect again to a peer that counts as lost. For messages about what
                was learned after the loss; protocols have drawn their conclusions about the rest.

        Raises:
            WorkerLost: the peer is known to be gone. Otherwise its loss is told to the watchers.
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
        """Like `post`, but waits until the handler is done, or has said `end_conversation`, and
        returns what it has posted to this worker meanwhile; those messages are for the caller to
        handle. An interruption ends the wait with an empty list, and they take the usual way.

        Args:
            meanwhile: called once the message has left; something short that has to be done anyway.

        Raises:
            WorkerLost, SerializationError
        """

    def end_conversation(self) -> None:
        """Inside a handler: lets the sender go on, if it waits in a conversation."""

    def request(
        self, to: int, kind: Kind, body: Any, *, timeout: float | None = None
    ) -> torch.futures.Future[Any]:
        """Sends a message that is answered; ends in the answer, `RpcTimeout`, `WorkerLost` or what
        the handler raised. `timeout` None is the agent's default, 0 is none."""

    def handle(self, kind: Kind, handler: Handler, rescue: Rescue | None = None) -> None:
        """Registers the handler of a kind of message; once per kind, before the agent starts.

        Somebody may wait for what a posted message would have done. So if one cannot be decoded or
        its handler raises, `rescue` is called, to end that wait; without one, or if that fails too,
        the sender counts as lost, which ends every wait.
        """

    def offer(
        self, kind: Kind, take: Callable[[int], bytes | None], can_wait: Callable[[bytes], bool]
    ) -> None:
        """Lets small messages ride along with calls that go to the same worker anyway.

        Args:
            take: asked with the worker's id before a call leaves; returns the body of a post, or
                None. It must be fast. What it gives is lost if the call cannot be sent.
            can_wait: asked where such a message has come, with its body: whether it may be handled
                when the call has been answered. If not, the call waits for it.
        """

    def watch_losses(self, callback: Callable[[int, str], None]) -> None:
        """`callback(worker_id, reason)` runs once for each worker that is lost, on a thread of its
        own. A worker that comes back under its id is told apart by nobody: it may be lost again."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Runs `callback` once, on the agent's clock thread: it must be short and not block."""

    def run_aside(self, work: Callable[[], None]) -> None:
        """Runs `work` soon, on a thread that it may block: for what a timer must not do itself."""


class Recorder(Protocol):
    """What autograd does for each message. An agent without one records nothing."""

    def current_context(self) -> int:
        """The context of this thread, or `NO_CONTEXT`. Called for every call: must be fast."""

    def record_send(self, context_id: int, to: int, tensors: Sequence[torch.Tensor]) -> int:
        """A message of this context leaves for worker `to`.

        Args:
            tensors: those in the message that require grad; may be empty.

        Returns:
            the message's autograd id, which travels with it.
        """

    def foresee(self, context_id: int, message_id: int) -> None:
        """An answer has left, and whoever gets it is busy with it: there is time to find out what
        will have to be known when its gradients come. It should not take longer than a short
        call."""

    def record_receive(
        self, context_id: int, message_id: int, source: int, tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The message has arrived here: gives each of `tensors` its history. They required grad
        where it was sent, and do no more. Outside of any context, by `NO_CONTEXT`, they have left
        a history behind.

        Returns:
            the tensors to put in their places, in the same order.
        """

    def enter(self, context_id: int) -> AbstractContextManager[None]:
        """Makes the context current on this thread while a call of its runs here."""
