"""One worker's part of one pass: torch's own engine, in waves.

Sources are the roots and the send functions, sinks the leaves and the recv nodes. A wave is one
call of torch's C++ engine over all nodes that may run (`frontier` says which). Each node runs once
in a pass and each hook sees the total once; usually there is exactly one wave.

Where a ready node has an edge into a node that must wait, the gradient of that edge is kept until
the other is ready. Torch's engine does not compute such an edge (it is on no path to what was
asked for), so a hook after the node calls the node once more by hand, on a thread where no engine
runs: there the node computes all its edges. Only C++ nodes on that boundary are called twice, and
they are functions without side effects; Python nodes compute all their edges anyway. A call by
hand skips the engine's checks, so shape and type are reduced to those of the edge here.

Since a node runs once in a pass, each wave may free what it ran through: `retain_graph=False`
means in every wave what it means in plain torch.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import GradientEdge

from telegrad.autograd.frontier import Frontier
from telegrad.autograd.leaves import Loans, add, adopt, is_hooked, needs_grad_field
from telegrad.autograd.nodes import (
    AccumulateGrad,
    Received,
    RecvNode,
    SendFunction,
    current_wave,
    enter_wave,
    is_watched,
)
from telegrad.autograd.pass_protocol import Standing
from telegrad.threads import heed_num_threads

__all__ = ["LocalPass", "Outgoing"]

_loans = Loans()

_Entering: TypeAlias = dict[GradientEdge, torch.Tensor]
"""Gradients on their way into nodes."""

_new_edge: Callable[[tuple[Any, int, None]], GradientEdge] = functools.partial(
    tuple.__new__, GradientEdge
)
"""Makes a gradient edge, which is a named tuple, sooner."""

_NO_BOUNDARY: Mapping[Any, set[Any]] = {}

_BackwardCFunction = torch.autograd.function.BackwardCFunction


class Outgoing(NamedTuple):
    """The gradients of a received message, on their way back to who sent it."""

    received: Received
    gradients: list[torch.Tensor | None]


LeafGradient: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""What a wave found at a leaf: the leaf, its gradient, and what that takes the place of, if a
reducer has made it of what an earlier wave of the same pass found there."""


def successors(node: Any) -> list[Any]:
    if type(node) is RecvNode:
        return []
    return [edge[0] for edge in node.next_functions if edge[0] is not None]


class LocalPass:
    """The state of one pass on one worker. Used by one thread at a time.

    Args:
        sends: the send functions of the context that may get gradients in this pass.
    """

    def __init__(
        self, sends: dict[int, SendFunction], *, retain_graph: bool, create_graph: bool
    ) -> None:
        self.sends = sends
        self._awaited = {id_ for id_, sent in sends.items() if not sent.is_spent}
        self._retain_graph = retain_graph
        self._create_graph = create_graph
        self._frontier: Frontier[int, Any] | None = None
        self._arrived: list[int] = []
        self._below: set[Any] = set()
        self._saved_walk: tuple[int, Sequence[Any]] | None = None
        self._freedom: dict[Any, bool] = {}
        self._entering: _Entering = {}
        self.lent: dict[torch.Tensor, torch.Tensor] = {}
        """What was found in `.grad` of leaves that had to be lent to their hooks."""

    @property
    def standing(self) -> Standing:
        """To be asked when nothing runs."""
        if self._entering:
            return Standing.WAITING
        return Standing.OPEN if self._awaited or self._arrived else Standing.CLOSED

    def enter_roots(self, roots: Sequence[torch.Tensor]) -> None:
        for root in roots:
            self._enter(root.grad_fn, root.output_nr, torch.ones_like(root))

    def arrive(self, message_id: int, gradients: list[torch.Tensor | None]) -> None:
        """The gradients of a message that this worker sent have come; they are taken out of the
        list, so that nobody else refers to them.

        Raises:
            KeyError: this worker never sent such a message.
        """
        sent = self.sends[message_id]
        for (node, number), gradient in zip(sent.next_functions, gradients, strict=True):
            if gradient is not None and node is not None:
                self._enter(node, number, gradient)
        gradients.clear()
        self._awaited.discard(message_id)
        self._arrived.append(message_id)
        if not self._retain_graph:
            sent.is_spent = True

    def foresee(self) -> None:
        """Something is awaited, and there is time: finds out now what will have to be known.
        Another thread may be running this pass meanwhile."""
        awaited = tuple(self._awaited)
        if len(awaited) == 1:
            for node, _ in self.sends[awaited[0]].next_functions:
                self._is_free(node)

    def _is_free(self, node: Any) -> bool:
        """Whether a node is a leaf that no hook watches: it never needs to be waited for."""
        is_free = self._freedom.get(node)
        if is_free is None:
            is_free = type(node) is AccumulateGrad and not is_hooked(node)
            self._freedom[node] = is_free
        return is_free

    def strike_off_all_but(self, live: Iterable[int]) -> None:
        """No send but these can arrive any more."""
        dead = self._awaited.difference(live)
        self._awaited -= dead
        if self._frontier is not None:
            self._frontier.strike_off(dead & self._frontier.awaited.keys())

    def reachability(self) -> tuple[set[int], dict[int, set[int]]]:
        """The received messages that waiting gradients lead to, and those that each awaited send
        leads to."""
        waiting = _messages_behind(self._entering)
        return waiting, {
            id_: _messages_behind(self.sends[id_].next_functions) for id_ in self._awaited
        }

    def run(self) -> tuple[list[Outgoing], list[LeafGradient]]:
        """Runs all that can run now.

        Raises:
            Exception: whatever a backward function or a hook raised.
        """
        if self._frontier is None and len(self._awaited) < 2:
            leaves = self._leaves_of_unblocked()
            if leaves is not None:
                self._arrived.clear()
                entering, self._entering = self._entering, {}
                if leaves:
                    if len(entering) == len(leaves) and _all_nodes(entering, self._is_free):
                        return [], self._into_free_leaves(entering)
                elif _all_nodes(entering, _is_passed_through):
                    return _pass_through(entering), []
                return _Wave(self, leaves, _NO_BOUNDARY).run(entering, ())
        frontier = self._settle_arrivals()
        ready, boundary = frontier.advance()
        if boundary:
            self._hold_leaves_below(frontier, ready, boundary)
        entering, free = self._take_ready(frontier, ready)
        outgoing: list[Outgoing] = []
        found: list[LeafGradient] = []
        if entering and _all_nodes(entering, _is_passed_through):
            outgoing = _pass_through(entering)
        elif entering:
            leaves = [node for node in ready if type(node) is AccumulateGrad]
            sinks: tuple[GradientEdge, ...] = ()
            if boundary:
                asked = [node for node in ready if type(node) is RecvNode]
                sinks = tuple(GradientEdge(node, 0) for node in (*asked, *leaves, *boundary))
            outgoing, found = _Wave(self, leaves, boundary).run(entering, sinks)
            if boundary:  # free leaves that were held below it have got gradients by hand
                _, held = self._take_ready(frontier, ())
                for key, gradient in held.items():
                    before = free.get(key)
                    free[key] = gradient if before is None else add(before, gradient)
                gradient = before = None  # type: ignore[assignment]  # counted by `adopt`
        if free:
            found += self._into_free_leaves(free)
        return outgoing, found

    def _take_ready(
        self, frontier: Frontier[int, Any], ready: Iterable[Any]
    ) -> tuple[_Entering, _Entering]:
        """Takes what may go on now: into nodes that are ready, and into free leaves."""
        entering: _Entering = {}
        free: _Entering = {}
        kept: _Entering = {}
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

    def _into_free_leaves(self, entering: _Entering) -> list[LeafGradient]:
        """A free leaf has no hooks: what is for it needs no engine."""
        if self._create_graph:
            return [(_leaf_of(key), gradient, None) for key, gradient in entering.items()]
        found: list[LeafGradient] = []
        for key in entering:
            leaf = _leaf_of(key)
            found.append((leaf, adopt(entering[key], leaf, references=1), None))
        return found

    def _leaves_of_unblocked(self) -> Sequence[Any] | None:
        """The leaves of all that has entered, if nothing that is awaited can block any of it.

        That is plain if nothing is awaited. For one awaited send, two walks tell, and the second is
        saved for when it arrives. For more, counting (`Frontier`) is cheaper.
        """
        if not self._awaited:
            if self._saved_walk is not None and self._arrived == [self._saved_walk[0]]:
                return self._saved_walk[1]
            return _walk(self._entering)[1]
        (last,) = self._awaited
        entered, leaves = _walk(self._entering)
        if not leaves and self.sends[last].is_of_leaves:
            return leaves
        awaited, their_leaves = _walk(self.sends[last].next_functions)
        for node in entered & awaited:
            if not self._is_free(node):
                return None
        self._saved_walk = (last, their_leaves)
        return leaves

    def _hold_leaves_below(
        self, frontier: Frontier[int, Any], ready: list[Any], boundary: dict[Any, set[Any]]
    ) -> None:
        """Keeps free leaves out of a wave that has a boundary, if they are below it.

        The engine runs every node on a path to what it is asked for, so asking for such a leaf
        would run the nodes that must wait. `_below` is all that was ever below a boundary in this
        pass, so that each node is looked at once: holding a leaf without need does no harm.
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
                self._frontier.add_source(
                    id_,
                    [node for node, _ in self.sends[id_].next_functions],
                    successors,
                    self._is_free,
                )
            self._frontier.arrive(id_)
        self._arrived.clear()
        return self._frontier

    def _enter(self, node: Any, number: int, gradient: torch.Tensor) -> None:
        key = _new_edge((node, number, None))
        before = self._entering.get(key)
        self._entering[key] = gradient if before is None else add(before, gradient)


class _Wave:
    """One call of torch's engine."""

    __slots__ = ("_boundary", "_found", "_leaves", "_lent", "_outgoing", "_owner")

    def __init__(
        self, owner: LocalPass, leaves: Sequence[Any], boundary: Mapping[Any, set[Any]]
    ) -> None:
        self._owner = owner
        self._boundary = boundary
        self._leaves = leaves
        self._lent: Sequence[Any] = ()
        if leaves:
            is_ddp_possible = torch.distributed.is_initialized()
            self._lent = [
                node for node in leaves if needs_grad_field(node.variable, is_ddp_possible)
            ]
            if self._lent:
                self._leaves = [node for node in leaves if node not in self._lent]
        self._found: dict[Any, torch.Tensor] = {}
        self._outgoing: list[Outgoing] = []

    def run(
        self, entering: _Entering, sinks: tuple[GradientEdge, ...]
    ) -> tuple[list[Outgoing], list[LeafGradient]]:
        owner = self._owner
        handles: list[Any] = []
        for node in self._leaves:
            handles.append(node.register_prehook(functools.partial(self._leaf_reached, node)))
        for node in self._boundary:
            handles.append(node.register_hook(functools.partial(self._boundary_reached, node)))
        before = _loans.borrow(self._borrowed()) if self._lent else []
        wave_before = enter_wave(self)
        lent: list[torch.Tensor | None] = []
        try:
            _run_engine(
                tuple(entering),
                tuple(entering.values()),
                owner._retain_graph or owner._create_graph,
                owner._create_graph,
                sinks,
            )
        finally:
            enter_wave(wave_before)
            for handle in handles:
                handle.remove()
            if before:
                lent = _loans.give_back(before)
        entering.clear()  # what entered must not count as a reference to what came out
        found: list[LeafGradient] = []
        for node in self._found:
            found.append((node.variable, self._take(node), None))
        for number, ((leaf, _), gradient) in enumerate(zip(before, lent, strict=True)):
            if gradient is not None:
                is_of_this_wave = number < len(self._lent)
                replaced = None if is_of_this_wave else owner.lent[leaf]
                found.append((leaf, gradient, replaced))
                owner.lent[leaf] = gradient
        return self._outgoing, found

    def _borrowed(self) -> list[torch.Tensor]:
        """The leaves of this wave whose `.grad` is needed, and those of earlier waves: when the
        last parameter of a bucket is reached, DistributedDataParallel reduces them all, and writes
        to all of them."""
        leaves = [node.variable for node in self._lent]
        here = set(leaves)
        return leaves + [leaf for leaf in self._owner.lent if leaf not in here]

    def recv_reached(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called by a recv node: `gradients` is what entered it."""
        for gradient in gradients:
            if gradient is not None:
                self._outgoing.append(Outgoing(node.received, list(gradients)))
                return

    def _leaf_reached(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> Any:
        if current_wave() is not self:
            return None
        gradient = gradients[0]
        if gradient is not None:
            before = self._found.get(node)
            self._found[node] = gradient if before is None else add(before, gradient)
        return (None,)

    def _take(self, node: Any) -> torch.Tensor:
        if self._owner._create_graph:
            return self._found[node]
        # Referred to by the dictionary and by nobody else, if it can be taken over as it is.
        return adopt(self._found[node], node.variable, references=1)

    def _boundary_reached(
        self,
        node: Any,
        out: Sequence[torch.Tensor | None],
        entered: Sequence[torch.Tensor | None],
    ) -> None:
        if current_wave() is not self:
            return
        if not isinstance(node, _BackwardCFunction):
            out = _call_elsewhere(node, entered, self._owner._create_graph)
        held = self._boundary[node]
        for (target, number), gradient in zip(node.next_functions, out, strict=True):
            if gradient is not None and target in held:
                self._owner._enter(target, number, _fit(gradient, target, number))


def _call_elsewhere(node: Any, entered: Sequence[torch.Tensor | None], create_graph: bool) -> Any:
    """Calls the node on a thread of its own: on this one the engine would tell it which edges to
    leave out."""
    outcome: list[Any] = []

    def call() -> None:
        heed_num_threads()
        try:
            with torch.set_grad_enabled(create_graph):
                outcome.append(node(*entered))
        except Exception as error:  # noqa: BLE001  raised again on the thread that asked
            outcome.append(error)

    thread = threading.Thread(target=call, name="telegrad-edge")
    thread.start()
    thread.join()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0] if isinstance(outcome[0], tuple) else (outcome[0],)


def _fit(gradient: torch.Tensor, node: Any, number: int) -> torch.Tensor:
    """What the engine does to a gradient before it enters a node."""
    expected = node._input_metadata[number]
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    if gradient.dtype != expected.dtype:
        if gradient.is_complex() and not expected.dtype.is_complex:
            gradient = gradient.real
        gradient = gradient.to(expected.dtype)
    return gradient


def _run_engine(
    roots: tuple[GradientEdge, ...],
    gradients: tuple[torch.Tensor, ...],
    retain_graph: bool,
    create_graph: bool,
    inputs: tuple[GradientEdge, ...],
) -> None:
    if create_graph:
        _use_up_warning()
    # torch.autograd.backward with the checks of user input left out: they take longer than a
    # small graph.
    torch.autograd.Variable._execution_engine.run_backward(
        roots, gradients, retain_graph, create_graph, inputs, True, True
    )


@functools.cache
def _use_up_warning() -> None:
    """Torch warns once in a process that `.grad` will refer to its own graph: ours never does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        leaf = torch.zeros((), requires_grad=True)
        torch.autograd.backward(leaf * 2, create_graph=True)
        leaf.grad = None


def _walk(entries: Iterable[Sequence[Any]]) -> tuple[set[Any], list[Any]]:
    """All nodes that edges lead to, directly or not, and those of them that are leaves."""
    seen: set[Any] = set()
    leaves: list[Any] = []
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
                    break
                edges = node.next_functions
                if len(edges) == 1 or (len(edges) == 2 and edges[1][0] is None):
                    node = edges[0][0]  # on along a chain, as most nodes are in one
                else:
                    push(edges)
                    break
    return seen, leaves


def _messages_behind(entries: Iterable[Sequence[Any]]) -> set[int]:
    return {node.received.message_id for node in _walk(entries)[0] if type(node) is RecvNode}


def _all_nodes(entering: _Entering, is_so: Callable[[Any], bool]) -> bool:
    return all(map(is_so, [edge[0] for edge in entering]))


def _is_passed_through(node: Any) -> bool:
    return type(node) is RecvNode and not is_watched(node)


def _pass_through(entering: _Entering) -> list[Outgoing]:
    """What enters recv nodes and nothing else: it goes on as it is."""
    outgoing: dict[Any, list[torch.Tensor | None]] = {}
    for (node, number, _), gradient in entering.items():
        gradients = outgoing.get(node)
        if gradients is None:
            received: Received = node.received  # type: ignore[attr-defined]
            gradients = outgoing[node] = [None] * len(received.outputs)
        gradients[number] = gradient
    return [Outgoing(node.received, gradients) for node, gradients in outgoing.items()]


def _leaf_of(edge: GradientEdge) -> torch.Tensor:
    node: Any = edge.node
    leaf: torch.Tensor = node.variable
    return leaf
