"""Walks through torch's local graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from telegrad.autograd.contexts.message_nodes import AccumulateGrad, RecvNode, SendFunction

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
"""Send functions of a worker whose graphs are walked one by one in a pass. If there are more, edges
are counted, in all of them at once (`Frontier`)."""

_SOON = 128  # nodes: a walk of that many takes as long as a short call

# A graph of more nodes for each of its ends is not small: the engine looks at each of them once
# more to find out what leads to what it is to catch.
_MOST_NODES_FOR_AN_END = 16

_kinds_of_torch: set[type] = set()
"""Types of nodes that are known to be torch's own, in C++, and recv nodes."""

new_edge: Callable[[tuple[Any, int, None]], GradientEdge] = partial(tuple.__new__, GradientEdge)
"""Makes a gradient edge, which is a named tuple, sooner."""


class Graph:
    """All nodes that edges lead to, directly or not.

    Attributes:
        leaves: those of them that end in a leaf.
        recvs: those that end in what came from another worker.
    """

    __slots__ = ("_ends", "leaves", "nodes", "recvs")

    def __init__(self, nodes: set[Any], leaves: list[Any], recvs: list[Any]) -> None:
        self.nodes = nodes
        self.leaves = leaves
        self.recvs = recvs
        self._ends: tuple[GradientEdge, ...] | None = None

    def ends(self) -> tuple[GradientEdge, ...]:
        """The edges at which gradients can be caught that flow out of it: those into its leaves,
        then those into its recv nodes. There are none if it is not small, or if one of its nodes
        may object, as that of a checkpoint does."""
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
    """Whether none of the nodes is that of a function that a program has made."""
    kinds = set(map(type, nodes))
    if kinds <= _kinds_of_torch:
        return True
    for kind in kinds:
        if issubclass(kind, BackwardCFunction) and kind is not RecvNode:
            return False
        _kinds_of_torch.add(kind)
    return True


def successors(node: Any) -> list[Any]:
    if type(node) is RecvNode:
        return []
    return [edge[0] for edge in node.next_functions if edge[0] is not None]


def walk(entries: Iterable[Sequence[Any]], most: int | None = None) -> Graph:
    """The graph that edges lead to; no more than so many nodes of it."""
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
                node = edges[0][0]  # on along a chain, as most nodes are in one
                if node is None or node in seen:
                    break
            else:
                return Graph(seen, leaves, recvs)
    return Graph(seen, leaves, recvs)


def graph_behind(sent: SendFunction) -> Graph:
    """What the gradients of a message run through."""
    if sent.graph is None:
        sent.graph = walk(sent.next_functions)
    return sent.graph


def look_ahead(sent: SendFunction) -> None:
    """There is time: finds out what gradients will run through, if that does not take long."""
    if sent.graph is None:
        graph = walk(sent.next_functions, _SOON)
        if len(graph.nodes) < _SOON:
            sent.graph = graph
            graph.ends()


def messages_behind(entries: Iterable[Sequence[Any]]) -> set[int]:
    """The received messages that edges lead to."""
    return {node.received.message_id for node in walk(entries).recvs}
