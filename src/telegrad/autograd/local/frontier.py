"""Which nodes of a local graph may run, when gradients arrive from several sources over time.

A node may run when everything that can still reach it has arrived, because it must run once, on
its total. This is topological counting: `_open[node]` is how many of its incoming edges, from
nodes and from sources, are not yet *settled*. An edge is settled when its origin has run, or will
never run. A node whose edges are all settled is ready if a gradient reaches it and is passed over,
settling its own edges, if none does.

The graph is walked once for a pass and each edge is settled once, so the cost is linear however
many sources there are and in whatever order they arrive. (Rejected: the set of nodes reachable
from what is still awaited, anew for every arrival: simpler, and quadratic in a chain of calls.)

*Free* nodes are sinks where a sum in parts is as good as the total, leaves without hooks: they
are never waited for.

Nothing here knows torch: nodes are any hashable values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Frontier", "Step"]

Node = TypeVar("Node", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Step(Generic[Node]):
    """What may run now."""

    ready: list[Node]
    boundary: dict[Node, set[Node]]
    """Ready nodes with edges into nodes that are not: those edges' gradients must be kept."""


class Frontier(Generic[Key, Node]):
    """The progress of one pass through one local graph.

    Args:
        roots: nodes where gradients enter at the start.
        sources: what may still arrive, and the nodes its gradients enter.
        successors: the nodes that a node's gradients go to, with repetition.
        is_free: whether a sink never needs to be waited for.
    """

    def __init__(
        self,
        roots: Iterable[Node],
        sources: Mapping[Key, Sequence[Node]],
        successors: Callable[[Node], Sequence[Node]],
        is_free: Callable[[Node], bool],
    ) -> None:
        self._awaited: dict[Key, Sequence[Node]] = dict(sources)
        self._open: dict[Node, int] = {}
        self._next: dict[Node, Sequence[Node]] = {}
        self._free: set[Node] = set()
        self._reached: set[Node] = set()
        self._settled: list[Node] = []
        entered = list(roots)
        self._walk(entered, successors, is_free)
        for nodes in self._awaited.values():
            self._walk(nodes, successors, is_free)
        for node in entered:
            self._settle(node, is_reached=True)

    @property
    def awaited(self) -> Mapping[Key, Sequence[Node]]:
        """The sources that have neither arrived nor been struck off."""
        return self._awaited

    @property
    def waiting(self) -> set[Node]:
        """Nodes that a gradient has reached and that cannot run yet."""
        return self._reached

    def is_free(self, node: Node) -> bool:
        """Whether the node is a sink that is never waited for."""
        return node in self._free

    def is_open(self, node: Node) -> bool:
        """Whether something that may still arrive leads to the node."""
        return node in self._open

    def next_of(self, node: Node) -> Sequence[Node]:
        """The node's successors; also of a node that has run."""
        return self._next.get(node, ())

    def add_source(
        self,
        key: Key,
        nodes: Sequence[Node],
        successors: Callable[[Node], Sequence[Node]],
        is_free: Callable[[Node], bool],
    ) -> None:
        """Something else may arrive, that was not expected at the start."""
        self._walk(nodes, successors, is_free)
        self._awaited[key] = nodes

    def arrive(self, key: Key) -> None:
        """The source's gradients have come."""
        for node in self._awaited.pop(key):
            self._settle(node, is_reached=True)

    def strike_off(self, keys: Iterable[Key]) -> None:
        """The sources will never arrive."""
        for key in keys:
            for node in self._awaited.pop(key):
                self._settle(node, is_reached=False)

    def advance(self) -> Step[Node]:
        """Everything that can run now; it counts as run from here on."""
        ready: list[Node] = []
        todo, self._settled = self._settled, []
        free_reached: set[Node] = set()
        reached, open_, next_, free = self._reached, self._open, self._next, self._free
        while todo:
            node = todo.pop()
            is_reached = node in reached
            if is_reached:
                reached.discard(node)
                ready.append(node)
            del open_[node]
            for successor in next_[node]:
                if successor in free:
                    if is_reached:
                        free_reached.add(successor)
                    continue
                if is_reached:
                    reached.add(successor)
                open_[successor] -= 1
                if not open_[successor]:
                    todo.append(successor)
        boundary: dict[Node, set[Node]] = {}
        if reached:  # else nothing waits, so no edge leads to something that waits
            for node in ready:
                held = {s for s in next_.get(node, ()) if s in open_}
                if held:
                    boundary[node] = held
        ready += free_reached
        return Step(ready, boundary)

    def _walk(
        self,
        entries: Iterable[Node],
        successors: Callable[[Node], Sequence[Node]],
        is_free: Callable[[Node], bool],
    ) -> None:
        open_, next_, free = self._open, self._next, self._free
        todo: list[Sequence[Node]] = [list(entries)]
        while todo:
            for node in todo.pop():
                if node in open_:
                    open_[node] += 1
                elif node not in free:
                    following = successors(node)
                    if not following and is_free(node):
                        free.add(node)
                    else:
                        open_[node] = 1
                        next_[node] = following
                        todo.append(following)

    def _settle(self, node: Node, *, is_reached: bool) -> None:
        if node in self._free:
            return
        if is_reached:
            self._reached.add(node)
        self._open[node] -= 1
        if not self._open[node]:
            self._settled.append(node)
