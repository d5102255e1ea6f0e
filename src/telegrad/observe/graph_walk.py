"""Torch's graph on one worker as boxes, inputs first: what `describe` does on either face.

The faces differ in the nodes that stand for messages, and say so in a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.futures import Future

from telegrad.autograd.torch_internals import AccumulateGrad
from telegrad.errors import NotInitialized, RemoteError, RpcTimeout, WorkerLost
from telegrad.observe.boxes import Box, BoxKind, DistributedGraph, Size, WorkerGraph

__all__ = ["GraphWalk", "answers_of", "whole"]

Entry = tuple[Any, int]
"""A node, and which of its outputs."""


class GraphWalk:
    """
    Args:
        roots: nodes where backward passes begin.
    """

    def __init__(self, roots: Iterable[Any] = ()) -> None:
        self.roots = set(roots)
        self.boxes: list[Box] = []
        self._keys: dict[Any, int] = {}

    def visit(self, nodes: Iterable[Any]) -> None:
        """Makes boxes of these nodes and of all that they were made from."""
        todo = [node for node in nodes if node not in self._keys]
        while todo:
            node = todo[-1]
            if node in self._keys:
                todo.pop()
                continue
            before = self.inputs_of(node)
            missing = [n for n in before if n not in self._keys]
            if missing:
                todo += missing
                continue
            todo.pop()
            box = self.box_of(node, before)
            self._keys[node] = box.key
            self.boxes.append(box)

    def inputs_of(self, node: Any) -> list[Any]:
        return [following for following, _ in node.next_functions if following is not None]

    def box_of(self, node: Any, before: list[Any]) -> Box:
        if isinstance(node, AccumulateGrad):
            leaf: torch.Tensor = node.variable  # type: ignore[attr-defined]
            return Box(
                key=len(self.boxes),
                kind=BoxKind.LEAF,
                names=(("leaf", 1),),
                sizes=(_size(tuple(leaf.shape), leaf.dtype),),
                leaf_count=1,
                leaf_bytes=leaf.numel() * leaf.element_size(),
                gradient_count=int(self.has_gradient(leaf)),
            )
        return Box(
            key=len(self.boxes),
            kind=BoxKind.OPERATION,
            names=((node.name(), 1),),
            inputs=self._keys_of(before),
            sizes=tuple(_size_at((node, number)) for number in range(len(node._input_metadata))),
            is_root=node in self.roots,
        )

    def has_gradient(self, leaf: torch.Tensor) -> bool:
        raise NotImplementedError

    def receive(self, node: Any, message: int, peer: int, outputs: Iterable[int]) -> Box:
        """The end of a message that came here.

        Args:
            outputs: those of the node's that are tensors of the message.
        """
        return Box(
            key=len(self.boxes),
            kind=BoxKind.RECEIVE,
            names=(("receive", 1),),
            sizes=tuple(_size_at((node, number)) for number in outputs),
            message=message,
            peer=peer,
            is_root=node in self.roots,
        )

    def add_send(self, message: int, peer: int, entries: Sequence[Entry]) -> None:
        """Adds the end of a message that left here.

        Args:
            entries: what it carried; all of it visited.
        """
        self.boxes.append(
            Box(
                key=len(self.boxes),
                kind=BoxKind.SEND,
                names=(("send", 1),),
                inputs=self._keys_of(node for node, _ in entries),
                sizes=tuple(map(_size_at, entries)),
                message=message,
                peer=peer,
            )
        )

    def _keys_of(self, nodes: Iterable[Any]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._keys[node] for node in nodes))


def _size_at(entry: Entry) -> Size:
    node, number = entry
    metadata = node._input_metadata[number]
    return _size(tuple(metadata.shape), metadata.dtype)


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> Size:
    count = 1
    for length in shape:
        count *= length
    return Size(shape, str(dtype).removeprefix("torch."), count * dtype.itemsize)


def answers_of(
    asked: Mapping[int, Future[Any]], timeout: float, troubles: dict[int, str]
) -> Iterator[tuple[int, Any]]:
    """What workers answer. Why others do not is put into `troubles`."""
    for worker, answer in asked.items():
        try:  # ends in the answer, the loss of the worker, or the timeout
            found = answer.wait()
        except WorkerLost as error:
            troubles[worker] = f"lost: {error.reason or error}"
        except RpcTimeout:
            troubles[worker] = f"did not answer within {timeout:g} seconds"
        except (NotInitialized, RemoteError) as error:
            troubles[worker] = f"cannot tell: {error}"
        else:
            yield worker, found


def whole(
    context_id: int | None,
    boxes: Mapping[int, Sequence[Box]],
    troubles: Mapping[int, str],
    name_of: Callable[[int], str],
) -> DistributedGraph:
    """The graph of all workers that have answered, or could not."""
    return DistributedGraph(
        context_id=context_id,
        workers=tuple(
            WorkerGraph(
                worker=worker,
                name=name_of(worker),
                boxes=tuple(boxes.get(worker, ())),
                trouble=troubles.get(worker, ""),
            )
            for worker in sorted({*boxes, *troubles})
        ),
    )
