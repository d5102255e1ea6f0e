"""Walks through torch's local graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from telegrad.autograd.nodes import AccumulateGrad, RecvNode, SendFunction

__all__ = [
    "MOST_WALKED",
    "Graph",
    "graph_behind",
    "look_ahead",
    "messages_behind",
    "successors",
    "walk",
]

MOST_WALKED = 2
"""Send functions of a worker whose graphs are walked one by one in a pass. If there are more, edges
are counted, in all of them at once (`Frontier`)."""

_SOON = 128  # nodes: a walk of that many takes as long as a short call


class Graph(NamedTuple):
    """All nodes that edges lead to, directly or not.

    Attributes:
        leaves: those of them that end in a leaf.
        recvs: those that end in what came from another worker.
    """

    nodes: set[Any]
    leaves: list[Any]
    recvs: list[Any]


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


def messages_behind(entries: Iterable[Sequence[Any]]) -> set[int]:
    """The received messages that edges lead to."""
    return {node.received.message_id for node in walk(entries).recvs}
