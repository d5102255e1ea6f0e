"""Walks through torch's local graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from torch.autograd.graph import GradientEdge

from telegrad.autograd.contexts.message_nodes import RecvNode, SendFunction
from telegrad.autograd.torch_internals import AccumulateGrad, PythonNode

__all__ = [
    "MOST_WALKED",
    "Graph",
    "are_all_of_torch",
    "graph_behind",
    "look_ahead",
    "messages_behind",
    "new_edge",
    "successors",
    "walk",
]

MOST_WALKED = 2
"""How many send functions of a worker a pass walks one by one. With more of them, the edges of all
are counted at once (`Frontier`)."""

_SOON = 128  # nodes: walking so many takes as long as a short call

# To capture gradients at its ends, the engine visits all nodes of a graph once more. A graph with
# more nodes per end than this is too large for that to pay.
_MOST_NODES_FOR_AN_END = 16

_kinds_of_torch: set[type] = set()
"""Known types of nodes that are torch's own, in C++, and recv nodes."""

new_edge: Callable[[tuple[Any, int, None]], GradientEdge] = partial(tuple.__new__, GradientEdge)
"""Makes a gradient edge, a named tuple, without the checks of its constructor."""


class Graph:
    """All nodes that edges lead to, directly or not.

    Attributes:
        leaves: the AccumulateGrad nodes among them.
        recvs: the recv nodes among them.
    """

    __slots__ = ("_ends", "leaves", "nodes", "recvs")

    def __init__(self, nodes: set[Any], leaves: list[Any], recvs: list[Any]) -> None:
        self.nodes = nodes
        self.leaves = leaves
        self.recvs = recvs
        self._ends: tuple[GradientEdge, ...] | None = None

    def ends(self) -> tuple[GradientEdge, ...]:
        """The edges into its leaves, then those into its recv nodes, where the engine can capture
        the gradients. Empty if the graph is not small, or if one of its nodes may refuse to run in
        such a call, as a checkpoint does."""
        if self._ends is None:
            most = _MOST_NODES_FOR_AN_END * (len(self.leaves) + len(self.recvs))
            if len(self.nodes) > most or not are_all_of_torch(self.nodes):
                self._ends = ()
            else:
                ends = [*map(new_edge, zip(self.leaves, repeat(0), repeat(None)))]
                for node in self.recvs:
                    for number in range(len(node.received.outputs)):
                        ends.append(new_edge((node, number, None)))
                self._ends = tuple(ends)
        return self._ends


def are_all_of_torch(nodes: Iterable[Any]) -> bool:
    """Whether no node belongs to a `torch.autograd.Function` of the program."""
    kinds = set(map(type, nodes))
    if kinds <= _kinds_of_torch:
        return True
    for kind in kinds:
        if issubclass(kind, PythonNode) and kind is not RecvNode:
            return False
        _kinds_of_torch.add(kind)
    return True


def successors(node: Any) -> list[Any]:
    if type(node) is RecvNode:
        return []
    return [edge[0] for edge in node.next_functions if edge[0] is not None]


def walk(entries: Iterable[Sequence[Any]], most: int | None = None) -> Graph:
    """The graph that edges lead to; at most so many nodes of it."""
    seen: set[Any] = set()
    leaves: list[Any] = []
    recvs: list[Any] = []
    todo: list[Iterable[Sequence[Any]]] = [entries]
    see, push, pop = seen.add, todo.append, todo.pop
    steps = repeat(None) if most is None else repeat(None, most)  # one for each node
    while todo:
        for edge in pop():
            node = edge[0]
            if node is None or node in seen:
                continue
            for _ in steps:
                see(node)
                kind = type(node)
                if kind is AccumulateGrad:
                    leaves.append(node)
                    break
                if kind is RecvNode:
                    recvs.append(node)
                    break
                edges = node.next_functions
                if len(edges) != 1 and not (len(edges) == 2 and edges[1][0] is None):
                    push(edges)
                    break
                node = edges[0][0]  # follows a chain: most nodes are in one
                if node is None or node in seen:
                    break
            else:
                return Graph(seen, leaves, recvs)
    return Graph(seen, leaves, recvs)


def graph_behind(sent: SendFunction) -> Graph:
    """What the gradients of a sent message run through."""
    if sent.graph is None:
        sent.graph = walk(sent.next_functions)
    return sent.graph


def look_ahead(sent: SendFunction) -> None:
    """Walks ahead of time what gradients will run through, if that does not take long."""
    if sent.graph is None:
        graph = walk(sent.next_functions, _SOON)
        if len(graph.nodes) < _SOON:
            sent.graph = graph
            graph.ends()


def messages_behind(entries: Iterable[Sequence[Any]]) -> set[int]:
    """The received messages that edges lead to."""
    return {node.received.message_id for node in walk(entries).recvs}
