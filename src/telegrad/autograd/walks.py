"""Walks through torch's local graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from telegrad.autograd.nodes import AccumulateGrad, RecvNode

__all__ = ["Graph", "messages_behind", "successors", "walk"]


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


def walk(entries: Iterable[Sequence[Any]]) -> Graph:
    """The graph that edges lead to."""
    seen: set[Any] = set()
    leaves: list[Any] = []
    recvs: list[Any] = []
    todo: list[Iterable[Sequence[Any]]] = [entries]
    see, push, pop = seen.add, todo.append, todo.pop
    while todo:
        for edge in pop():
            node = edge[0]
            while node is not None and node not in seen:
                see(node)
                kind = type(node)
                if kind is AccumulateGrad:
                    leaves.append(node)
                    break
                if kind is RecvNode:
                    recvs.append(node)
                    break
                edges = node.next_functions
                if len(edges) == 1 or (len(edges) == 2 and edges[1][0] is None):
                    node = edges[0][0]  # on along a chain, as most nodes are in one
                else:
                    push(edges)
                    break
    return Graph(seen, leaves, recvs)


def messages_behind(entries: Iterable[Sequence[Any]]) -> set[int]:
    """The received messages that edges lead to."""
    return {node.received.message_id for node in walk(entries).recvs}
