"""What a distributed graph consists of, as values: boxes, on workers, joined by messages.

Nothing here knows torch, so a graph can be sent, kept, compared and drawn anywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Box", "BoxKind", "DistributedGraph", "Size", "WorkerGraph"]


class BoxKind(enum.Enum):
    LEAF = "leaf"
    OPERATION = "operation"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Size:
    """What a tensor takes."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A node of the graph, or several that are folded into one. Inputs are those of the forward
    direction: what the node's result was made from."""

    key: int
    kind: BoxKind
    names: tuple[tuple[str, int], ...]
    """The operations in it and how often each occurs, in the order of the forward direction."""
    inputs: tuple[int, ...] = ()
    sizes: tuple[Size, ...] = ()
    """The tensors that come out of it; of a message, those that it carries."""
    message: int | None = None
    peer: int | None = None
    """The worker at the other end of a message."""
    is_root: bool = False
    """A backward pass begins here."""
    leaf_count: int = 0
    leaf_bytes: int = 0
    gradient_count: int = 0
    """How many of its leaves have a gradient in the context; 0 if there is no context."""

    @property
    def node_count(self) -> int:
        return sum(count for _, count in self.names)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGraph:
    """One worker's part."""

    worker: int
    name: str
    boxes: tuple[Box, ...] = ()
    trouble: str = ""
    """Why there is no description of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedGraph:
    context_id: int | None
    """None: it is the graph behind tensors, and no context's."""
    workers: tuple[WorkerGraph, ...]

    @property
    def messages(self) -> dict[int, Box]:
        """Message id → its send, or its receive if the sender is not known."""
        found: dict[int, Box] = {}
        for _, box in self.boxes():
            if box.message is not None and (box.kind is BoxKind.SEND or box.message not in found):
                found[box.message] = box
        return found

    def boxes(self) -> Iterator[tuple[int, Box]]:
        for part in self.workers:
            for box in part.boxes:
                yield part.worker, box

    def used(self) -> set[tuple[int, int]] | None:
        """(worker, key) of all that the roots depend on; None if no root is known. What was sent
        to a worker that cannot be asked may be used there, and counts as used."""
        by_key = {(worker, box.key): box for worker, box in self.boxes()}
        senders = {box.message: at for at, box in by_key.items() if box.kind is BoxKind.SEND}
        todo = [at for at, box in by_key.items() if box.is_root]
        if not todo:
            return None
        told = {part.worker for part in self.workers if not part.trouble}
        todo += [
            at for at, box in by_key.items() if box.kind is BoxKind.SEND and box.peer not in told
        ]
        seen = set(todo)
        while todo:
            worker, key = todo.pop()
            box = by_key[worker, key]
            before = [(worker, input_) for input_ in box.inputs]
            if box.kind is BoxKind.RECEIVE and box.message in senders:
                before.append(senders[box.message])
            for at in before:
                if at not in seen:
                    seen.add(at)
                    todo.append(at)
        return seen
