"""A pass on one worker, and the work that arrives for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from telegrad.autograd.contexts.context import DistAutogradContext
from telegrad.autograd.local.local_pass import LocalPass
from telegrad.autograd.passes.protocol import Credit, PassControl, PassShare, Reports
from telegrad.autograd.torch_internals import is_profiler_enabled
from telegrad.ids import worker_of
from telegrad.rpc.connections.conversation import Interruption

__all__ = ["Arrival", "LivePass", "OwnPass"]


class LivePass(LocalPass):
    """A pass on one worker: its part of the graph, and its share of the credit."""

    def __init__(
        self,
        pass_id: int,
        context: DistAutogradContext,
        worker: int,
        *,
        retain_graph: bool,
        create_graph: bool,
        control: PassControl | None = None,
    ) -> None:
        super().__init__(
            context.sends.copy(),
            retain_graph=retain_graph,
            create_graph=create_graph,
            context_id=context.id,
        )
        self.id = pass_id
        self.context = context
        self.share = PassShare(worker, control)

    @property
    def initiator(self) -> int:
        return worker_of(self.id)


class OwnPass(LivePass):
    """A pass at its initiator, where `backward` was called, with the view of the whole pass. Made
    on the thread that called `backward`."""

    def __init__(
        self,
        pass_id: int,
        context: DistAutogradContext,
        worker: int,
        *,
        retain_graph: bool,
        create_graph: bool,
    ) -> None:
        self.control = PassControl()
        super().__init__(
            pass_id,
            context,
            worker,
            retain_graph=retain_graph,
            create_graph=create_graph,
            control=self.control,
        )
        self.is_over = False
        self.error: BaseException | None = None
        self.caller_thread = threading.get_ident()
        self.is_driven_by_caller = is_profiler_enabled()
        """The waves run on the caller's thread, because a profiler watches it."""
        self.interruption = Interruption()
        """Ends the caller's wait on a lane."""

    def finish(self, error: BaseException | None) -> None:
        """Ends the pass: `backward` returns, or raises the error."""
        context = self.context
        with context.lock:
            context.passes.pop(self.id, None)
            if not self.is_over:
                self.error = error
                self.is_over = True
                context.notify()
        if error is not None:
            self.interruption.interrupt()


@dataclass(slots=True)
class Arrival:
    """What makes a worker run a wave: roots, the gradients of a send function, or a strike."""

    into: LivePass
    credit: Credit
    reports: Reports
    roots: Sequence[torch.Tensor] = ()
    message_id: int = -1
    gradients: list[torch.Tensor | None] | None = None
    live: frozenset[int] | None = None
