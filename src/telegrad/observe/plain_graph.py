"""The graph behind tensors that plain calls have returned, on all workers, as a description.

Each worker describes what is behind its end of the calls it is asked about. That leads to further
calls, and so to further workers, or to more of one that has been asked: it is asked again, with all
calls, until nothing new turns up. Looking changes nothing.

A call is two messages at most: one for its arguments, one for its results. Those without a tensor
that requires grad are no part of the graph, and neither are *tokens*, which carry no data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.futures import Future

from telegrad.autograd.plain import engine_here
from telegrad.autograd.plain.nodes import CollectNode, PostNode, ReceivedNode, StubNode
from telegrad.autograd.plain.record import Record
from telegrad.autograd.torch_internals import AccumulateGrad
from telegrad.ids import worker_of
from telegrad.observe.boxes import Box, DistributedGraph
from telegrad.observe.folding import fold
from telegrad.observe.graph_walk import GraphWalk, answers_of, whole

__all__ = ["describe_plain"]


@dataclass
class _Part:
    """One worker's part, the calls that it leads to, by worker, and those that it has freed."""

    boxes: Sequence[Box]
    calls: dict[int, set[int]]
    freed: int


def describe_plain(
    roots: Sequence[Tensor], *, most_boxes: int = 0, timeout: float = 5.0
) -> DistributedGraph:
    """The graph behind tensors of this worker; usually one, the loss.

    Args:
        most_boxes: each worker's part is folded until it has about so many boxes besides
            its messages; 0 folds nothing.
        timeout: seconds for which a worker may keep silent; then it is described as being in
            trouble.

    Raises:
        NotInitialized: this process is no worker.
        TypeError: `roots` are not tensors.
        ValueError: a root does not require grad.
    """
    engine = engine_here()
    here = engine.worker_id
    for number, root in enumerate(roots):
        if not isinstance(root, Tensor):
            raise TypeError(f"draw(): roots[{number}] must be a tensor, got {type(root).__name__}")
        if root.grad_fn is None:
            raise ValueError(
                f"draw(): roots[{number}] has no history: draw what a computation with gradients "
                "has returned, before backward() or with retain_graph=True"
            )
    parts = {here: _describe((), most_boxes, roots)}
    troubles: dict[int, str] = {}
    asked: dict[int, set[int]] = {}
    while True:
        wanted: dict[int, set[int]] = {}
        for part in parts.values():
            for worker, calls in part.calls.items():
                wanted.setdefault(worker, set()).update(calls)
        changed = {w: calls for w, calls in wanted.items() if calls > asked.get(w, set())}
        if not changed:
            break
        asked.update(changed)
        answers: dict[int, Future[Any]] = {}
        for worker, calls in changed.items():
            if worker == here:
                parts[here] = _describe(calls, most_boxes, roots)
            elif worker not in troubles:
                answers[worker] = engine.agent.call_async(
                    worker, _describe, (calls, most_boxes), timeout=timeout
                )
        parts.update(answers_of(answers, timeout, troubles))
    for worker, part in parts.items():
        if part.freed:
            troubles[worker] = "has freed its graph in a backward pass"
    return whole(None, {id_: part.boxes for id_, part in parts.items()}, troubles, engine.name_of)


def _describe(calls: Collection[int], most_boxes: int, roots: Sequence[Tensor] = ()) -> _Part:
    """This worker's part; asked by another, or by itself."""
    walk = _Walk(roots)
    entries = engine_here().entries
    freed = 0
    for call in sorted(calls):
        entry = entries.get(call)
        if entry is None:
            freed += 1
            continue
        walk.follow(edge.node for edge in entry.edges)
        walk.add_send(
            _arguments(call) + 1, worker_of(call), [(e.node, e.output_nr) for e in entry.edges]
        )
    return _Part(fold(walk.boxes, most_boxes) if most_boxes else walk.boxes, walk.calls, freed)


def _arguments(call: int) -> int:
    """The number of the message in a picture; that of the results is the next."""
    return 2 * call


class _Walk(GraphWalk):
    def __init__(self, roots: Sequence[Tensor]) -> None:
        super().__init__(root.grad_fn for root in roots)
        self.calls: dict[int, set[int]] = {}
        self._collects: dict[Any, bool] = {}  # found → done
        self.follow(self.roots)

    def follow(self, nodes: Iterable[Any]) -> None:
        """Visits the nodes, and what calls that they depend on have sent."""
        self.visit(nodes)
        while todo := [node for node, is_done in self._collects.items() if not is_done]:
            for node in todo:
                self._collects[node] = True
                self._visit_arguments(node)

    def _visit_arguments(self, collect: Any) -> None:
        record: Record = collect.record
        _, *edges = collect.next_functions  # the first is the anchor
        entries = []
        for is_token, (node, number) in zip(record.is_token, edges, strict=False):
            if isinstance(node, CollectNode):
                self._collects.setdefault(node, False)
            elif node is not None and not is_token:
                entries.append((node, number))
        if entries:
            self.visit(node for node, _ in entries)
            self.add_send(_arguments(record.call), record.to, entries)

    def inputs_of(self, node: Any) -> list[Any]:
        if isinstance(node, PostNode):
            for before, _ in node.next_functions:
                if isinstance(before, CollectNode):
                    self._collects.setdefault(before, False)
        if isinstance(node, PostNode | ReceivedNode | StubNode | AccumulateGrad):
            return []  # what made it is on another worker
        return super().inputs_of(node)

    def box_of(self, node: Any, before: list[Any]) -> Box:
        outputs = [n for n, meta in enumerate(node._input_metadata) if tuple(meta.shape) != (0,)]
        if isinstance(node, PostNode):
            record: Record = node.record
            self.calls.setdefault(record.to, set()).add(record.call)
            return self.receive(node, _arguments(record.call) + 1, record.to, outputs)
        if isinstance(node, ReceivedNode):
            return self.receive(node, _arguments(node.call), worker_of(node.call), outputs)
        return super().box_of(node, before)

    def has_gradient(self, leaf: Tensor) -> bool:
        return False  # that of a remote module's parameter is with its stand-in, on another worker
