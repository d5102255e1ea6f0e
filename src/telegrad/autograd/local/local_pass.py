"""One worker's part of one pass: what has come, what is awaited, and what can run.

Gradients enter at the roots and the send functions, and leave at the leaves and the recv nodes.
What may run now runs in a wave, a call of torch's engine (`waves`). `frontier` says which nodes
these are, unless all of them are. Free leaves, which have no hooks, are never waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from telegrad.autograd.contexts.message_nodes import (
    Received,
    RecvNode,
    SendFunction,
    is_watched,
)
from telegrad.autograd.local.frontier import Frontier
from telegrad.autograd.local.leaves import add, adopt
from telegrad.autograd.local.unwatched import unwatched
from telegrad.autograd.local.walks import (
    MOST_WALKED,
    Graph,
    graph_behind,
    look_ahead,
    messages_behind,
    new_edge,
    successors,
    walk,
)
from telegrad.autograd.local.waves import (
    Entering,
    LeafGradient,
    Outgoing,
    Wave,
    can_catch,
    catch,
)
from telegrad.autograd.passes.protocol import Standing
from telegrad.autograd.torch_internals import AccumulateGrad
from telegrad.rpc.seams import NO_CONTEXT

__all__ = ["LocalPass"]


class LocalPass:
    """The state of one pass on one worker. Used by one thread at a time.

    Args:
        sends: the send functions of the context that may get gradients in this pass.
    """

    def __init__(
        self,
        sends: dict[int, SendFunction],
        *,
        retain_graph: bool,
        create_graph: bool,
        context_id: int = NO_CONTEXT,
    ) -> None:
        self.context_id = context_id
        self.sends = sends
        self._awaited = {id_ for id_, sent in sends.items() if not sent.is_spent}
        self.retain_graph = retain_graph
        self.create_graph = create_graph
        self.is_kept = False
        """The initiator has asked for reachability: it will end the pass here."""
        self._frontier: Frontier[int, Any] | None = None
        self._arrived: list[int] = []
        self._delayed: list[Any] = []
        self._below: set[Any] = set()
        self._sole: int | None = None  # the message whose gradients are all that has entered
        self._freedom: dict[Any, bool] = {}
        self._entering: Entering = {}
        self.lent: dict[torch.Tensor, torch.Tensor] = {}
        """The gradients of leaves whose `.grad` was lent to their hooks."""

    @property
    def standing(self) -> Standing:
        """Valid while nothing runs."""
        if self._entering:
            return Standing.WAITING
        if self._awaited or self._arrived or self.is_kept:
            return Standing.OPEN
        return Standing.CLOSED

    def enter_roots(self, roots: Sequence[torch.Tensor]) -> None:
        for root in roots:
            self.enter(root.grad_fn, root.output_nr, torch.ones_like(root))

    def arrive(self, message_id: int, gradients: list[torch.Tensor | None]) -> None:
        """Takes in the gradients of a message that this worker sent. Empties the list, so that no
        other reference to them remains.

        Raises:
            KeyError: this worker never sent such a message.
        """
        sent = self.sends[message_id]
        self._sole = None if self._entering else message_id
        for (node, number), gradient in zip(sent.next_functions, gradients, strict=True):
            if gradient is not None and node is not None:
                self.enter(node, number, gradient)
        gradients.clear()
        self._awaited.discard(message_id)
        self._arrived.append(message_id)
        if not self.retain_graph:
            sent.is_spent = True

    def foresee(self) -> None:
        """Finds out what the next gradients will run through, while they are awaited. Another
        thread may be running this pass at the same time."""
        awaited = tuple(self._awaited)
        if len(awaited) == 1:
            sent = self.sends[awaited[0]]
            look_ahead(sent)
            if sent.is_of_leaves:
                for node, _ in sent.next_functions:
                    self._is_free(node)

    def _is_free(self, node: Any) -> bool:
        """Whether a node is a leaf without hooks, which is never waited for."""
        is_free = self._freedom.get(node)
        if is_free is None:
            is_free = type(node) is AccumulateGrad and unwatched.includes(node)
            self._freedom[node] = is_free
        return is_free

    def strike_off_all_but(self, live: Iterable[int]) -> None:
        """Stops waiting for all other sends: they can no longer arrive."""
        dead = self._awaited.difference(live)
        self._awaited -= dead
        if self._frontier is not None:
            self._frontier.strike_off(dead & self._frontier.awaited.keys())

    def reachability(self) -> tuple[set[int], dict[int, set[int]]]:
        """The received messages that waiting gradients lead to, and those that each awaited send
        leads to."""
        return messages_behind(self._entering), {
            id_: messages_behind(self.sends[id_].next_functions) for id_ in self._awaited
        }

    def run(self) -> tuple[list[Outgoing], list[LeafGradient]]:
        """Runs all that can run now.

        Raises:
            Exception: a backward function or a hook raised it.
        """
        if self._frontier is None and len(self._awaited) < MOST_WALKED:
            graph = self._graph_of_unblocked()
            if graph is not None:
                leaves, recvs, size = graph.leaves, graph.recvs, len(graph.nodes)
                self._arrived.clear()
                entering, self._entering = self._entering, {}
                if len(leaves) == size == len(entering) and _are_all(self._is_free, entering):
                    return [], self._into_free_leaves(entering)
                if len(recvs) == size and _are_all(_is_passed_through, entering):
                    return _pass_through(entering), []
                if can_catch(graph):
                    return catch(self, graph, entering)
                return Wave(self, graph.nodes, leaves, {}).run(entering, ())
        return self._run_ready(self._settle_arrivals())

    def _run_ready(self, frontier: Frontier[int, Any]) -> tuple[list[Outgoing], list[LeafGradient]]:
        ready = frontier.advance()
        boundary: dict[Any, set[Any]] = {}
        if self._delayed or (frontier.waiting and _lead_to_open(frontier, ready)):
            ready, boundary = self._delay(frontier, ready)
        if boundary:
            self._hold_leaves_below(frontier, ready, boundary)
        entering, free = self._take_ready(frontier, ready)
        outgoing: list[Outgoing] = []
        found: list[LeafGradient] = []
        if entering and _are_all(_is_passed_through, entering):
            outgoing = _pass_through(entering)
        elif entering:
            leaves = [node for node in ready if type(node) is AccumulateGrad]
            sinks: tuple[GradientEdge, ...] = ()
            if boundary:
                asked = [node for node in ready if type(node) is RecvNode]
                sinks = tuple(GradientEdge(node, 0) for node in (*asked, *leaves, *boundary))
            outgoing, found = Wave(self, ready, leaves, boundary).run(entering, sinks)
            if boundary:  # calls by hand have entered gradients into free leaves below it
                _, held = self._take_ready(frontier, ())
                for key, gradient in held.items():
                    before = free.get(key)
                    free[key] = gradient if before is None else add(before, gradient)
                gradient = before = None  # type: ignore[assignment]  # else `adopt` counts them
        if free:
            found += self._into_free_leaves(free)
        return outgoing, found

    def _delay(
        self, frontier: Frontier[int, Any], ready: list[Any]
    ) -> tuple[list[Any], dict[Any, set[Any]]]:
        """While nodes have to wait, only what leads to other workers runs: others may wait for it.
        The rest runs later with those nodes, in one wave, as in one process: a hook on several
        tensors sees their gradients together, and fewer nodes are on the boundary.

        Returns:
            What runs now, and its boundary.
        """
        # Predecessors come first in both lists. Free leaves run with the nodes that lead to them.
        candidates = self._delayed + [node for node in ready if not frontier.is_free(node)]
        self._delayed = []
        chosen = candidates
        boundary: dict[Any, set[Any]] = {}
        if frontier.waiting:
            leading: set[Any] = set()
            for node in reversed(candidates):
                if type(node) is RecvNode or not leading.isdisjoint(frontier.next_of(node)):
                    leading.add(node)
            chosen = [node for node in candidates if node in leading]
            self._delayed = [node for node in candidates if node not in leading]
            delayed = set(self._delayed)
            for node in chosen:
                held = {n for n in frontier.next_of(node) if n in delayed or frontier.is_open(n)}
                if held:
                    boundary[node] = held
        free = {n for node in chosen for n in frontier.next_of(node) if frontier.is_free(n)}
        return [*chosen, *free], boundary

    def _take_ready(
        self, frontier: Frontier[int, Any], ready: Iterable[Any]
    ) -> tuple[Entering, Entering]:
        """Takes out the gradients for nodes that are ready, and those for free leaves."""
        entering: Entering = {}
        free: Entering = {}
        kept: Entering = {}
        for key, gradient in self._entering.items():
            node = key[0]
            if frontier.is_free(node):
                free[key] = gradient
            elif node in ready:
                entering[key] = gradient
            else:
                kept[key] = gradient
        self._entering = kept
        return entering, free

    def _into_free_leaves(self, entering: Entering) -> list[LeafGradient]:
        """A free leaf has no hooks, so its gradient needs no engine."""
        found: list[LeafGradient] = []
        for key in entering:
            leaf = key[0].variable  # type: ignore[attr-defined]  # AccumulateGrad has it
            found.append((leaf, adopt(entering[key], leaf, references=1), None))
        return found

    def _graph_of_unblocked(self) -> Graph | None:
        """The graph behind all that has entered, if no awaited send can block any of it.

        If nothing is awaited, that is so. For one awaited send, two walks decide it, and the second
        is kept for when that send arrives. For more, counting (`Frontier`) is cheaper.
        """
        if self._sole is not None:  # more may lie behind it than what has got a gradient
            entered = graph_behind(self.sends[self._sole])
        else:
            entered = walk(self._entering)
        if not self._awaited:
            return entered
        (last,) = self._awaited
        if not entered.leaves and self.sends[last].is_of_leaves:
            return entered
        for node in entered.nodes & graph_behind(self.sends[last]).nodes:
            if not self._is_free(node):
                return None
        return entered

    def _hold_leaves_below(
        self, frontier: Frontier[int, Any], ready: list[Any], boundary: dict[Any, set[Any]]
    ) -> None:
        """Keeps free leaves below the boundary out of a wave.

        The engine runs every node on a path to what it is asked for, so asking for such a leaf
        would run the nodes that must wait. `_below` collects everything that was ever below a
        boundary in this pass, so each node is visited once: holding a leaf without need is
        harmless.
        """
        below = self._below
        todo = [node for held in boundary.values() for node in held]
        while todo:
            node = todo.pop()
            if node not in below:
                below.add(node)
                todo += frontier.next_of(node)
        barred = {node for node in ready if frontier.is_free(node) and node in below}
        if barred:
            for node in ready:
                held = barred.intersection(frontier.next_of(node))
                if held:
                    boundary.setdefault(node, set()).update(held)
            ready[:] = [node for node in ready if node not in barred]

    def _settle_arrivals(self) -> Frontier[int, Any]:
        if self._frontier is None:
            sources = {
                id_: [node for node, _ in self.sends[id_].next_functions if node is not None]
                for id_ in (*self._awaited, *self._arrived)
            }
            in_sources = {node for id_ in self._arrived for node in sources[id_]}
            roots = {edge.node for edge in self._entering} - in_sources
            self._frontier = Frontier(roots, sources, successors, self._is_free)
        for id_ in self._arrived:
            if id_ not in self._frontier.awaited:  # spent in an earlier pass, and here again
                nodes = [node for node, _ in self.sends[id_].next_functions]
                self._frontier.add_source(id_, nodes)
            self._frontier.arrive(id_)
        self._arrived.clear()
        return self._frontier

    def enter(self, node: Any, number: int, gradient: torch.Tensor) -> None:
        key = new_edge((node, number, None))
        before = self._entering.get(key)
        self._entering[key] = gradient if before is None else add(before, gradient)


def _are_all(is_so: Callable[[Any], bool], entering: Entering) -> bool:
    for edge in entering:  # noqa: SIM110 - a generator takes twice as long
        if not is_so(edge[0]):
            return False
    return True


def _lead_to_open(frontier: Frontier[int, Any], nodes: Iterable[Any]) -> bool:
    return any(frontier.is_open(next_) for node in nodes for next_ in frontier.next_of(node))


def _is_passed_through(node: Any) -> bool:
    return type(node) is RecvNode and not is_watched(node)


def _pass_through(entering: Entering) -> list[Outgoing]:
    """Sends on what enters recv nodes only, as it is."""
    outgoing: dict[Any, list[torch.Tensor | None]] = {}
    for (node, number, _), gradient in entering.items():
        gradients = outgoing.get(node)
        if gradients is None:
            received: Received = node.received  # type: ignore[attr-defined]
            gradients = outgoing[node] = [None] * len(received.outputs)
        gradients[number] = gradient
    return [(node.received, gradients) for node, gradients in outgoing.items()]
