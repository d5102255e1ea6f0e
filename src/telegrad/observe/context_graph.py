"""The graph of a context on all its workers, as a plain description that can be drawn or checked.

Each worker describes its own part: the send functions and recv nodes of the context, the roots of
passes that began there, and everything of torch's graph between them. Whoever asks follows the
contacts from worker to worker, the way a release does, so it finds every worker that the context
reached. The question is no call of the context: looking changes nothing.

A worker that does not answer is part of the description too, with the reason; what its peers
exchanged with it is still known from them. So the question ends: in an answer, in the loss of the
worker, or at the timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.futures import Future

from telegrad import autograd
from telegrad.autograd.contexts.context import DistAutogradContext, EnteredContext
from telegrad.autograd.contexts.message_nodes import RecvNode
from telegrad.autograd.passes.roots import tensors_of
from telegrad.observe.boxes import Box, DistributedGraph
from telegrad.observe.folding import fold
from telegrad.observe.graph_walk import GraphWalk, answers_of, whole
from telegrad.rpc.group import current
from telegrad.rpc.seams import NO_CONTEXT

__all__ = ["describe", "describe_here"]


@dataclass
class _Part:
    """One worker's part in the making."""

    boxes: tuple[Box, ...] = ()
    contacts: set[int] = field(default_factory=set)
    is_known: bool = True


def describe(
    context_id: int,
    roots: Sequence[torch.Tensor] = (),
    *,
    most_boxes: int = 0,
    timeout: float = 5.0,
) -> DistributedGraph:
    """The graph of a live context on every worker that it has reached.

    Args:
        roots: tensors on this worker that the graph leads to, in addition to the roots of backward
            passes that have begun; usually the loss.
        most_boxes: each worker's part is folded until it has about so many boxes besides
            its messages; 0 folds nothing.
        timeout: seconds for which a worker may keep silent; then it is described as being in
            trouble.

    Raises:
        ContextError: there is no such context on this worker.
        NotInitialized: this process is no worker.
        TypeError: `roots` are not tensors.
    """
    engine = autograd._engine()
    tensors_of("draw", context_id, roots)
    context = engine.retrieve(context_id)
    parts = {engine.worker_id: _describe(context, roots, most_boxes)}
    troubles: dict[int, str] = {}
    worker = current.acting()
    asked = {engine.worker_id}
    while worker is not None:
        contacts = {contact for part in parts.values() for contact in part.contacts} - asked
        if not contacts:
            break
        asked |= contacts
        answers: dict[int, Future[Any]] = {}
        with EnteredContext(NO_CONTEXT):
            for contact in sorted(contacts):
                answers[contact] = worker.agent.call_async(
                    contact, describe_here, (context_id, most_boxes), timeout=timeout
                )
        for contact, part in answers_of(answers, timeout, troubles):
            parts[contact] = part
            if not part.is_known:
                troubles[contact] = "does not know this context: released, or started again"

    def name_of(id_: int) -> str:
        return (worker and worker.agent.network.members.name_of(id_)) or f"worker {id_}"

    return whole(context_id, {id_: part.boxes for id_, part in parts.items()}, troubles, name_of)


def describe_here(context_id: int, most_boxes: int) -> _Part:
    """This worker's part; asked by another."""
    context = autograd._engine().find(context_id)
    return _Part(is_known=False) if context is None else _describe(context, (), most_boxes)


def _describe(
    context: DistAutogradContext, roots: Sequence[torch.Tensor], most_boxes: int
) -> _Part:
    boxes = _Walk(context, roots).boxes
    return _Part(tuple(fold(boxes, most_boxes) if most_boxes else boxes), context.contacts.copy())


class _Walk(GraphWalk):
    """One worker's part of a context."""

    def __init__(self, context: DistAutogradContext, roots: Sequence[torch.Tensor]) -> None:
        living = [root for root in (*roots, *context.living_roots()) if root.grad_fn is not None]
        super().__init__(root.grad_fn for root in living)
        self._gradients = set(context.gradients.copy())
        sends = context.sends.copy()
        for node in context.recvs.copy().values():
            self.visit([node])
        for sent in sends.values():
            self.visit(node for node, _ in sent.next_functions if node is not None)
        self.visit(self.roots)
        for message, sent in sends.items():
            entries = [(node, number) for node, number in sent.next_functions if node is not None]
            self.add_send(message, sent.to, entries)

    def inputs_of(self, node: Any) -> list[Any]:
        if type(node) is RecvNode:
            return []  # what made it is on another worker; its own next function is a stand-in
        return super().inputs_of(node)

    def box_of(self, node: Any, before: list[Any]) -> Box:
        if type(node) is not RecvNode:
            return super().box_of(node, before)
        received = node.received
        outputs = range(len(received.outputs))
        return self.receive(node, received.message_id, received.source, outputs)

    def has_gradient(self, leaf: torch.Tensor) -> bool:
        return leaf in self._gradients
