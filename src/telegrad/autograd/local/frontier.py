"""Which nodes of a local graph may run, when gradients arrive from several sources over time.

A node may run when everything that can still reach it has arrived, because it must run once, on
its total. This is topological counting: `_open[node]` is how many of its incoming edges, from
nodes and from sources, are not yet *settled*. An edge is settled when its origin has run, or will
never run. A node whose edges are all settled is ready if a gradient has reached it; otherwise it is
skipped, which settles its own edges.

The graph is walked once per pass and each edge is settled once, so the cost is linear in the size
of the graph, however many sources there are and in whatever order they arrive. (Rejected: computing
for every arrival the set of nodes that the awaited sources lead to. It is simpler, and quadratic in
a chain of calls.)

*Free* nodes are sinks where a sum in parts is as good as the total, leaves without hooks: they
are never waited for.

Nothing here depends on torch: nodes are any hashable values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

__all__ = ["Frontier"]

Node = TypeVar("Node", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


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
        self._successors = successors
        self._is_free = is_free
        self._awaited: dict[Key, Sequence[Node]] = dict(sources)
        self._open: dict[Node, int] = {}
        self._next: dict[Node, Sequence[Node]] = {}
        self._free: set[Node] = set()
        self._reached: set[Node] = set()
        self._settled: list[Node] = []
        entered = list(roots)
        self._walk(entered)
        for nodes in self._awaited.values():
            self._walk(nodes)
        for node in entered:
            self._settle(node, is_reached=True)

    @property
    def awaited(self) -> Mapping[Key, Sequence[Node]]:
        """The sources that may still arrive."""
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

    def add_source(self, key: Key, nodes: Sequence[Node]) -> None:
        """Adds a source that was not expected at the start."""
        self._walk(nodes)
        self._awaited[key] = nodes

    def arrive(self, key: Key) -> None:
        """The gradients of a source have arrived."""
        for node in self._awaited.pop(key):
            self._settle(node, is_reached=True)

    def strike_off(self, keys: Iterable[Key]) -> None:
        """The sources will never arrive."""
        for key in keys:
            for node in self._awaited.pop(key):
                self._settle(node, is_reached=False)

    def advance(self) -> list[Node]:
        """Everything that can run now; it counts as run from now on."""
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
        return [*ready, *free_reached]

    def _walk(self, entries: Iterable[Node]) -> None:
        open_, next_, free = self._open, self._next, self._free
        todo: list[Sequence[Node]] = [list(entries)]
        while todo:
            for node in todo.pop():
                if node in open_:
                    open_[node] += 1
                elif node not in free:
                    following = self._successors(node)
                    if not following and self._is_free(node):
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
