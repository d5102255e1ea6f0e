"""The contexts of one worker: made, entered, recorded into, released.

This is the `Recorder` that the agent calls for each message. It carries out what `lifetime` decides
about which workers keep a context.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import torch

from telegrad.autograd.contexts.context import (
    DistAutogradContext,
    EnteredContext,
    check_context_id,
    set_thread_context,
    thread_context,
)
from telegrad.autograd.contexts.gathered import Gathered, ids_in
from telegrad.autograd.contexts.lifetime import (
    Acknowledge,
    ContextLifetimes,
    Effect,
    Free,
    TellHeld,
    TellReleased,
)
from telegrad.autograd.contexts.message_nodes import SendFunction, recv_history
from telegrad.autograd.contexts.stopped_gradients import as_marked_leaf
from telegrad.autograd.local.walks import MOST_WALKED, look_ahead
from telegrad.drop_in import torch_phrase
from telegrad.errors import ContextError
from telegrad.ids import WorkerCounter
from telegrad.rpc.seams import NO_CONTEXT, Messenger, Timer
from telegrad.wire.frames import Kind

__all__ = ["ContextRegistry"]

RETRY_SECONDS = 1.0
RELEASE_SECONDS = 0.005
ACKNOWLEDGE_SECONDS = 0.2  # well under a retry


class ContextRegistry:
    """All contexts that live on one worker.

    Args:
        messenger: the agent; None for a worker without one, whose contexts are local.
        first_id: the first of the ids made here.
    """

    def __init__(
        self,
        worker_id: int,
        messenger: Messenger | None,
        first_id: int = 0,
    ) -> None:
        self._messenger = messenger
        self._context_ids = WorkerCounter(worker_id, first_id)
        self._message_ids = WorkerCounter(worker_id, first_id)
        self._contexts: dict[int, DistAutogradContext] = {}
        self._lifetimes = ContextLifetimes(worker_id)
        self._lifetimes_lock = threading.RLock()  # guards the two above
        self._is_retry_planned = False
        self._is_closed = False
        self._retry_timer: Timer | None = None
        self._releases = Gathered(
            messenger, Kind.CONTEXT_RELEASE, RELEASE_SECONDS, self._nothing_to_release
        )
        self._acknowledgements = Gathered(
            messenger, Kind.CONTEXT_RELEASED, ACKNOWLEDGE_SECONDS, _not_acknowledged
        )
        self._holdings = Gathered(messenger, Kind.CONTEXT_HELD, RELEASE_SECONDS, self._has_no_maker)
        self._gathered = (self._releases, self._acknowledgements, self._holdings)
        if messenger is not None:
            messenger.handle(Kind.CONTEXT_HELD, self._holding_told)
            messenger.handle(Kind.CONTEXT_RELEASE, self._release_told)
            messenger.handle(Kind.CONTEXT_RELEASED, self._release_acknowledged)
            messenger.offer(Kind.CONTEXT_RELEASE, self._releases.take, self._are_light)

    # For the public functions

    @property
    def max_id(self) -> int:
        return self._context_ids.max_id

    @property
    def contexts(self) -> list[DistAutogradContext]:
        return list(self._contexts.values())

    def new(self) -> DistAutogradContext:
        """Makes a context and makes it current on this thread.

        Raises:
            ContextError: this thread has one already.
        """
        current = self.current_context()
        if current != NO_CONTEXT:
            raise ContextError(
                "this thread is already inside a dist_autograd.context(): contexts cannot be "
                "nested; leave that one first"
                + torch_phrase(f"Already have an autograd context id for this thread: {current}")
            )
        context = DistAutogradContext(self._context_ids.next())
        set_thread_context(context.id)  # first, so that it can be found after Ctrl-C
        with self._lifetimes_lock:
            self._lifetimes.began(context.id)
            self._contexts[context.id] = context
        return context

    def retrieve(self, context_id: int) -> DistAutogradContext:
        """Raises ContextError if there is no such context here, TypeError if it is not an id."""
        context = self._contexts.get(context_id) if isinstance(context_id, int) else None
        if context is None:
            phrase = torch_phrase(f"Could not find autograd context with id: {context_id}")
            check_context_id(context_id, phrase)
            raise ContextError(
                f"there is no autograd context {context_id} on this worker: it was never made, or "
                "it was released. Is this inside its `with dist_autograd.context()` block?" + phrase
            )
        return context

    def find(self, context_id: int) -> DistAutogradContext | None:
        return self._contexts.get(context_id)

    def current(self) -> DistAutogradContext:
        """Raises ContextError if this thread is in none."""
        context_id = thread_context()
        if context_id == NO_CONTEXT:
            raise ContextError(
                "this thread is not inside an autograd context: make one by `with "
                "dist_autograd.context() as context_id:`, or join that of another thread by "
                "dist_autograd.join_context(context_id)"
                + torch_phrase("Current thread doesn't have a valid autograd context")
            )
        return self.retrieve(context_id)

    def release(self, context_id: int) -> None:
        """Frees the context here and on every worker that knows it.

        Raises:
            ContextError: there is no such context here.
        """
        if thread_context() == context_id:
            set_thread_context(NO_CONTEXT)
        if context_id not in self._contexts:
            self.retrieve(context_id)
        try:
            self._release(context_id)
        except BaseException:  # such as Ctrl-C
            self._release(context_id)
            self._free(context_id)
            self._plan_retry()  # sends the releases that were not sent
            raise

    def _release(self, context_id: int) -> None:
        with self._lifetimes_lock:
            effects = self._lifetimes.released(context_id)
        self._carry_out(effects)

    def close(self) -> None:
        """The agent is shutting down: drops all contexts without telling others, and ends their
        passes."""
        self._is_closed = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        for gathered in self._gathered:
            gathered.close()
        with self._lifetimes_lock:
            contexts = list(self._contexts.values())
            self._contexts.clear()
        for context in contexts:
            self._freed(context)

    def _forget_worker(self, worker: int) -> None:
        with self._lifetimes_lock:
            effects = self._lifetimes.lost(worker)
        self._carry_out(effects)

    # For the agent: `Recorder`

    def current_context(self) -> int:
        """The context of this thread if it lives on this worker, else `NO_CONTEXT`."""
        context_id = thread_context()
        return context_id if context_id in self._contexts else NO_CONTEXT

    def enter(self, context_id: int) -> EnteredContext:
        """Makes the context current on this thread while one of its calls runs here. If it was
        released, the call runs without a context and records nothing."""
        if context_id not in self._contexts and context_id != NO_CONTEXT:
            with self._lifetimes_lock:
                if self._lifetimes.is_released(context_id):
                    context_id = NO_CONTEXT
                elif context_id not in self._contexts:  # another thread may have made it meanwhile
                    self._lifetimes.began(context_id)
                    self._contexts[context_id] = DistAutogradContext(context_id)
        return EnteredContext(context_id)

    def record_send(self, context_id: int, to: int, tensors: Sequence[torch.Tensor]) -> int:
        message_id = self._message_ids.next()
        context = self._meet(context_id, to)
        if context is not None and tensors:
            context.sends[message_id] = SendFunction(tensors, to)
        return message_id

    def foresee(self, context_id: int, message_id: int) -> None:
        context = self._contexts.get(context_id)
        if context is None or len(context.sends) > MOST_WALKED:
            return
        sent = context.sends.get(message_id)
        if sent is not None and not sent.is_of_leaves:
            try:
                look_ahead(sent)
            except Exception:  # noqa: BLE001 - the pass will meet it and report it
                return

    def record_receive(
        self, context_id: int, message_id: int, source: int, tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        if context_id == NO_CONTEXT:
            worker = self._messenger.name_of(source) if self._messenger is not None else str(source)
            return [as_marked_leaf(tensor, worker) for tensor in tensors]
        context = self._meet(context_id, source)
        if context is None:
            return [tensor.requires_grad_() for tensor in tensors]
        if not tensors:
            return ()
        context.recvs[message_id], outputs = recv_history(message_id, source, tensors)
        return outputs

    def _meet(self, context_id: int, worker: int) -> DistAutogradContext | None:
        """The context, with this contact noted; None if it has been released."""
        context = self._contexts.get(context_id)
        if context is not None and worker in context.contacts:
            return context
        if context_id == NO_CONTEXT:
            return None
        with self._lifetimes_lock:
            effects = self._lifetimes.met(context_id, worker)
            is_alive = self._lifetimes.is_alive(context_id)
            if is_alive:
                context = self._contexts.get(context_id)
                if context is None:
                    context = self._contexts[context_id] = DistAutogradContext(context_id)
                context.contacts.add(worker)
        if effects:
            self._carry_out(effects)
        return context if is_alive else None

    # Between workers

    def _release_told(self, source: int, message: bytes) -> None:
        effects: list[Effect] = []
        with self._lifetimes_lock:
            for context_id in ids_in(message):
                effects += self._lifetimes.released(context_id, told_by=source)
        self._carry_out(effects)

    def _are_light(self, message: bytes) -> bool:
        """Whether freeing these contexts can wait."""
        for context_id in ids_in(message):
            context = self._contexts.get(context_id)
            if context is not None and not context.is_light():
                return False
        return True

    def _release_acknowledged(self, source: int, message: bytes) -> None:
        self._nothing_to_release(source, ids_in(message))

    def _holding_told(self, source: int, message: bytes) -> None:
        effects: list[Effect] = []
        with self._lifetimes_lock:
            for context_id in ids_in(message):
                effects += self._lifetimes.held(context_id, source)
                context = self._contexts.get(context_id)
                if context is not None:
                    context.contacts.add(source)
        self._carry_out(effects)

    def _has_no_maker(self, worker: int, context_ids: Sequence[int]) -> None:
        """The worker that made the contexts was gone before they came here."""
        self._forget_worker(worker)

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Free):
                self._free(effect.context_id)
            elif isinstance(effect, TellReleased):
                self._releases.add(effect.worker, effect.context_id)
                if not self._is_retry_planned:
                    self._plan_retry()
            elif isinstance(effect, TellHeld):
                self._holdings.add(effect.worker, effect.context_id)
                self._plan_retry()
            elif isinstance(effect, Acknowledge):
                self._acknowledgements.add(effect.worker, effect.context_id)

    def _free(self, context_id: int) -> None:
        context = self._contexts.pop(context_id, None)
        if context is not None:
            self._freed(context)

    def _freed(self, context: DistAutogradContext) -> None:
        """A context has ended; called once for each, however it ends."""

    def send_gathered(self) -> None:
        """Sends now what is collected for later."""
        for gathered in self._gathered:
            gathered.send()

    def _nothing_to_release(self, worker: int, context_ids: Sequence[int]) -> None:
        """The worker has freed the contexts, or is gone."""
        with self._lifetimes_lock:
            for context_id in context_ids:
                self._lifetimes.acknowledged(context_id, worker)

    def _plan_retry(self) -> None:
        if self._is_retry_planned:
            return
        with self._lifetimes_lock:
            if self._is_retry_planned or not self._lifetimes.has_unacknowledged:
                return
            self._is_retry_planned = True
        if self._messenger is not None and not self._is_closed:
            self._retry_timer = self._messenger.call_later(RETRY_SECONDS, self._retry)

    def _retry(self) -> None:
        with self._lifetimes_lock:
            self._is_retry_planned = False
            effects = [] if self._is_closed else self._lifetimes.retry()
        if effects and self._messenger is not None:
            self._messenger.run_aside(partial(self._carry_out, effects))
        self._plan_retry()


def _not_acknowledged(worker: int, context_ids: Sequence[int]) -> None:
    """The worker is gone, or this one is shutting down. If it lives, it repeats the release."""
