"""The callee's end of recorded calls.

A call is named by an id of its caller's. Here the id names an *entry*: the edges of what was
returned, and all nodes behind them. The walk that finds these also finds the `Received` nodes that
the result depends on, mostly that of the call itself. They are *below* it, and the reply names
them, so that the caller's graph has an edge wherever there is a dependency. A function that keeps a
tensor from one call for the next makes two entries share nodes. Which entries reach a node is
noted, because a pass must run a shared node once, when all of its gradient is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from telegrad.autograd.plain.nodes import ReceivedNode, is_sink
from telegrad.autograd.torch_internals import (
    AccumulateGrad,
    has_tensor_hooks,
    post_accumulate_hooks,
)
from telegrad.wire.tensor_table.layout import is_leaf

__all__ = ["Entries", "Entry", "Export", "Walk", "edges_of", "walk"]

Export = Callable[[list[Tensor | None]], Any]
"""Takes gradients of exported leaves, and returns what the caller gets for them."""


def _edge_of(tensor: Tensor) -> GradientEdge:
    if is_leaf(tensor):
        return get_gradient_edge(tensor)
    node: Any = tensor.grad_fn
    return GradientEdge(node, tensor.output_nr)


def edges_of(node: Any) -> list[tuple[Any, int]]:
    if is_sink(node):
        return []
    return [(n, nr) for n, nr in node.next_functions if n is not None]


class Walk(NamedTuple):
    """What lies behind some nodes, those included."""

    nodes: set[Any]
    leaves: list[Any]
    sinks: list[Any]
    """`Received` and `Stub` nodes."""


def walk(nodes: Iterable[Any]) -> Walk:
    seen: set[Any] = set()
    leaves: list[Any] = []
    sinks: list[Any] = []
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if not is_sink(node):
            stack += [n for n, _ in node.next_functions if n is not None]
        elif isinstance(node, AccumulateGrad):
            leaves.append(node)
        else:
            sinks.append(node)
    return Walk(seen, leaves, sinks)


class Entry:
    """
    Attributes:
        below: the calls that what was returned depends on, this one first.
        shares: other entries that reach nodes of this one.
        exported: leaves whose gradients the caller gets, with what makes them ready for that.
        of_pass: the pass whose gradients these are, if they are gradients that are recorded: it
            brings none for them itself.
    """

    def __init__(
        self,
        call: int,
        edges: Sequence[GradientEdge],
        exported: tuple[Sequence[Tensor], Export] | None,
        of_pass: tuple[int, int] | None,
    ) -> None:
        self.call = call
        self.of_pass = of_pass
        self.edges = edges
        self.exported = exported
        self.nodes, self.leaves, self.sinks = walk(edge.node for edge in edges)
        self.below = [call, *sorted({sink.call for sink in self.sinks} - {call})]
        self.shares: set[Entry] = set()
        self.reaches_others = any(
            isinstance(sink, ReceivedNode) and sink.call != call for sink in self.sinks
        )


class Entries:
    """Those of one worker. Threads may use it freely."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards both tables, and what passes have kept
        self._by_call: dict[int, Entry] = {}
        self._users: dict[Any, Entry | set[Entry]] = {}
        """By node, the entries that reach it: nearly always one."""
        self._above: dict[int, set[Entry]] = {}
        """By call, the entries whose results depend on it."""

    def __len__(self) -> int:
        return len(self._by_call)

    def get(self, call: int) -> Entry | None:
        return self._by_call.get(call)

    def users(self, node: Any) -> Collection[Entry]:
        users = self._users.get(node, ())
        return (users,) if isinstance(users, Entry) else users

    def related_to(self, call: int, *, accumulate: bool) -> set[Entry]:
        """Those whose results depend on what came with a call, and those that reach a node of
        theirs, but for leaves that may get their gradients in parts."""
        related: set[Entry] = set()
        for entry in self._above.get(call, ()):
            related.add(entry)
            for node in entry.nodes:
                if not self.may_run_in_parts(node, accumulate=accumulate):
                    related.update(self.users(node))
        return related

    def calls(self) -> list[int]:
        return list(self._by_call)

    def add(
        self,
        call: int,
        tensors: Sequence[Tensor],
        exported: tuple[Sequence[Tensor], Export] | None = None,
        *,
        of_pass: tuple[int, int] | None = None,
    ) -> Entry:
        entry = Entry(call, list(map(_edge_of, tensors)), exported, of_pass)
        with self.lock:
            shared = self._users.keys() & entry.nodes
            self._users.update(dict.fromkeys(entry.nodes - shared, entry))
            for node in shared:
                users = set(self.users(node))
                if not isinstance(node, AccumulateGrad):
                    for other in users:
                        entry.shares.add(other)
                        other.shares.add(entry)
                self._users[node] = {*users, entry}
            self._by_call[call] = entry
            for each in entry.below:
                self._above.setdefault(each, set()).add(entry)
        return entry

    def drop(self, calls: Iterable[int]) -> list[Entry]:
        """Returns what it drops: destructors run when the caller lets go of that, not under the
        lock."""
        dropped: list[Entry] = []
        with self.lock:
            for call in calls:
                entry = self._by_call.pop(call, None)
                if entry is None:
                    continue
                dropped.append(entry)
                for other in entry.shares:
                    other.shares.discard(entry)
                for each in entry.below:
                    above = self._above.get(each)
                    if above is not None:
                        above.discard(entry)
                        if not above:
                            del self._above[each]
                for node in entry.nodes:
                    users = self._users[node]
                    if users is entry:
                        del self._users[node]
                    elif isinstance(users, set):
                        users.discard(entry)
                        if not users:
                            del self._users[node]
        return dropped

    def runs_through(self, will_run: Callable[[Any], bool]) -> bool:
        """Whether a pass that began here runs nodes that a call by another worker has reached."""
        with self.lock:
            return any(will_run(node) for node in self._users if not is_sink(node))

    def is_alone(self, entry: Entry, *, accumulate: bool) -> bool:
        """Whether gradients of the entry can be run at once: nothing in it waits for others."""
        if entry.shares or entry.reaches_others:
            return False
        return not (
            accumulate
            and any(len(self.users(leaf)) > 1 and _is_watched(leaf) for leaf in entry.leaves)
        )

    def may_run_in_parts(self, node: Any, *, accumulate: bool) -> bool:
        """Whether a node is a leaf that may get its gradient in several parts."""
        if not isinstance(node, AccumulateGrad):
            return False
        return not (accumulate and len(self.users(node)) > 1 and _is_watched(node))


def _is_watched(leaf: Any) -> bool:
    """Whether a hook sees the leaf's gradient; the one that exports it does not count."""
    variable = leaf.variable
    if has_tensor_hooks(variable):
        return True
    hooks = post_accumulate_hooks(variable).values()
    return any(not hasattr(hook, "exports_leaf") for hook in hooks)
