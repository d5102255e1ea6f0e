"""Calls of torch's own engine.

A wave is one call over all nodes that may run. Each node runs once in a pass and each hook sees the
total once; usually there is exactly one wave. Where a ready node leads to one that must wait, see
`boundary`.

Since a node runs once in a pass, each wave may free what it ran through: `retain_graph=False`
means in every wave what it means in plain torch.

A small graph without hooks at its ends takes a shorter way: the engine captures the gradients
there, as for `torch.autograd.grad`, and does not run the nodes at the ends. For a leaf that takes
2 µs instead of 7.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge

from telegrad.autograd.contexts.message_nodes import (
    Received,
    RecvNode,
    current_wave,
    enter_wave,
    is_watched,
)
from telegrad.autograd.local.boundary import SilencedHooks, call_elsewhere, fit
from telegrad.autograd.local.checkpoints import Checkpoints
from telegrad.autograd.local.grad_field import GradLoan, needs_grad_field
from telegrad.autograd.local.leaves import add, adopt
from telegrad.autograd.local.unwatched import unwatched
from telegrad.autograd.local.walks import Graph, are_all_of_torch, new_edge
from telegrad.autograd.torch_internals import (
    IDLE_ROOT,
    AccumulateGrad,
    PythonNode,
    has_default_group,
    is_profiler_enabled,
    run_backward,
)
from telegrad.errors import BackwardError

if TYPE_CHECKING:
    from telegrad.autograd.local.local_pass import LocalPass

__all__ = [
    "Entering",
    "LeafGradient",
    "Outgoing",
    "Wave",
    "can_catch",
    "catch",
    "use_up_warning",
]

Entering: TypeAlias = dict[GradientEdge, torch.Tensor]
"""Gradients on their way into nodes."""

Outgoing: TypeAlias = tuple[Received, list[torch.Tensor | None]]
"""The gradients of a received message, on their way back to its sender."""

LeafGradient: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""What a wave found at a leaf: the leaf, its gradient, and the gradient that this one replaces: a
reducer makes it from what an earlier wave of the same pass found there."""

_IDLE_GRADIENT = torch.zeros(())


def can_catch(graph: Graph) -> bool:
    """Whether the engine may capture the gradients at the ends of a graph: no hook is there."""
    return bool(
        graph.ends()
        and not any(map(is_watched, graph.recvs))
        and (not graph.leaves or unwatched.include_all(graph.leaves))
        and not is_profiler_enabled()
    )


def catch(
    owner: LocalPass, graph: Graph, entering: Entering
) -> tuple[list[Outgoing], list[LeafGradient]]:
    """Runs a graph, and returns the gradients at its ends."""
    around = current_wave()
    if around is not None:  # a hook of it runs this pass, which may reach the same nodes
        enter_wave(None)
    try:
        caught: list[Any] = [*_run_engine(owner, entering, graph.ends(), accumulates=False)]
    finally:
        if around is not None:
            enter_wave(around)
    entering.clear()  # what entered must not count as a reference to what came out
    caught.reverse()
    found: list[LeafGradient] = []
    for node in graph.leaves:
        gradient = caught.pop()
        if gradient is not None:
            leaf = node.variable
            found.append((leaf, adopt(gradient, leaf, references=1), None))
    outgoing: list[Outgoing] = []
    for node in graph.recvs:
        gradients = [caught.pop() for _ in node.received.outputs]
        if any(gradient is not None for gradient in gradients):
            outgoing.append((node.received, gradients))
    return outgoing, found


class Wave:
    """One call of torch's engine.

    Args:
        nodes: what may run.
        leaves: the AccumulateGrad nodes among them.
        boundary: nodes among them with edges into nodes that must wait, and the latter.
    """

    __slots__ = (
        "_boundary",
        "_found",
        "_handles",
        "_leaves",
        "_lent",
        "_nodes",
        "_outgoing",
        "_owner",
        "_silenced",
        "_watched",
    )

    def __init__(
        self,
        owner: LocalPass,
        nodes: Collection[Any],
        leaves: Sequence[Any],
        boundary: Mapping[Any, set[Any]],
    ) -> None:
        self._owner = owner
        self._nodes = nodes
        self._boundary = boundary
        self._leaves = leaves
        self._lent: Sequence[Any] = ()
        if leaves:
            may_be_of_ddp = has_default_group()
            self._lent = [
                node
                for node in leaves
                if needs_grad_field(node.variable, may_be_of_ddp) or unwatched.has_post_hooks(node)
            ]
            if self._lent:
                self._leaves = [node for node in leaves if node not in self._lent]
        self._watched: set[Any] = set()
        self._handles: list[Any] = []
        self._silenced: dict[Any, SilencedHooks] = {}
        self._found: dict[Any, torch.Tensor] = {}
        self._outgoing: list[Outgoing] = []

    def run(
        self, entering: Entering, sinks: tuple[GradientEdge, ...]
    ) -> tuple[list[Outgoing], list[LeafGradient]]:
        """Runs the wave.

        Args:
            sinks: the edges that the engine is asked for; if there are none, it runs all nodes.
        """
        owner = self._owner
        loan = GradLoan() if self._lent else None
        lent: list[torch.Tensor | None] = []
        checkpoints = Checkpoints(self, owner.context_id, self._found_inside)
        wave_before = current_wave()
        try:
            for node in self._leaves:
                self._watch(node)
            for node in self._boundary:
                self._watch_boundary(node)
            if not sinks and not are_all_of_torch(self._nodes):
                checkpoints.attend(self._nodes)
                if not checkpoints:
                    # Other functions that run a pass inside theirs refuse to, if they ask torch
                    # whether all gradients are wanted: else what they find would end in `.grad`.
                    sinks = self._ends()
            if loan is not None:
                loan.borrow(self._borrowed())
            enter_wave(self)
            _run_engine(owner, entering, sinks)
        finally:
            enter_wave(wave_before)
            checkpoints.leave()
            for handle in self._handles:
                handle.remove()
            for silenced in self._silenced.values():
                silenced.restore()
            if loan is not None:
                lent = loan.give_back()
        entering.clear()  # what entered must not count as a reference to what came out
        found: list[LeafGradient] = []
        for node in self._found:
            # The dictionary holds the only reference, if the gradient can be adopted.
            found.append((node.variable, adopt(self._found[node], node.variable, 1), None))
        if loan is not None:
            for number, ((leaf, _), gradient) in enumerate(zip(loan.set_aside, lent, strict=True)):
                if gradient is not None:
                    is_of_this_wave = number < len(self._lent)
                    replaced = None if is_of_this_wave else owner.lent[leaf]
                    found.append((leaf, gradient, replaced))
                    owner.lent[leaf] = gradient
        return self._outgoing, found

    def _ends(self) -> tuple[GradientEdge, ...]:
        kinds = (AccumulateGrad, RecvNode)
        return tuple(new_edge((node, 0, None)) for node in self._nodes if type(node) in kinds)

    def _watch(self, node: Any) -> None:
        self._watched.add(node)
        reached = functools.partial(self._leaf_reached, node)
        self._handles.append(unwatched.register(node.register_prehook, reached))

    def _found_inside(self, node: Any) -> None:
        """The inner pass of a checkpoint will reach this leaf."""
        if needs_grad_field(node.variable, has_default_group()):
            raise BackwardError(
                "a reentrant checkpoint uses a parameter whose hooks look for its gradient in "
                "`.grad` (those of DistributedDataParallel or register_post_accumulate_grad_hook), "
                "which is not supported in a distributed backward pass: use "
                "checkpoint(..., use_reentrant=False)"
            )
        if node not in self._watched:
            self._watch(node)

    def _borrowed(self) -> list[torch.Tensor]:
        """The leaves of this wave whose `.grad` is needed, and those of earlier waves: when the
        last parameter of a bucket is reached, DistributedDataParallel reduces them all, and writes
        to all of them."""
        leaves = [node.variable for node in self._lent]
        here = set(leaves)
        return leaves + [leaf for leaf in self._owner.lent if leaf not in here]

    def recv_reached(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called by a recv node with the gradients that entered it."""
        if any(gradient is not None for gradient in gradients):
            self._outgoing.append((node.received, list(gradients)))

    def _leaf_reached(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> Any:
        if current_wave() is not self:
            return None
        gradient = gradients[0]
        if gradient is not None:
            before = self._found.get(node)
            self._found[node] = gradient if before is None else add(before, gradient)
        return (None,)

    def _watch_boundary(self, node: Any) -> None:
        reached = functools.partial(self._boundary_reached, node)
        handle = unwatched.register(node.register_hook, reached)
        self._handles.append(handle)
        if not isinstance(node, PythonNode):
            self._silenced[node] = SilencedHooks(self, handle)

    def _boundary_reached(
        self,
        node: Any,
        out: Sequence[torch.Tensor | None],
        entered: Sequence[torch.Tensor | None],
    ) -> Sequence[torch.Tensor | None] | None:
        if current_wave() is not self:
            return None
        whole = out
        silenced = self._silenced.get(node)
        if silenced is not None:
            by_hand = call_elsewhere(node, entered, self._owner.create_graph)
            whole = [a if a is not None else b for a, b in zip(out, by_hand, strict=True)]
            whole = silenced.run(whole, entered)
        held = self._boundary[node]
        for (target, number), gradient in zip(node.next_functions, whole, strict=True):
            if gradient is not None and target in held:
                self._owner.enter(target, number, fit(gradient, target, number))
        if not silenced:
            return None
        return tuple([None if a is None else b for a, b in zip(out, whole, strict=True)])


def _run_engine(
    owner: LocalPass,
    entering: Entering,
    sinks: tuple[GradientEdge, ...],
    *,
    accumulates: bool = True,
) -> Sequence[torch.Tensor | None]:
    create_graph = owner.create_graph
    if create_graph:
        use_up_warning()
    roots, gradients = tuple(entering), tuple(entering.values())
    if len(roots) == 1 and unwatched.are_hooks_possible():
        # With a single root, the engine claims that it will not run the root's node. A hook on
        # several tensors, the root among them, would then not wait for the others.
        roots, gradients = (*roots, IDLE_ROOT), (*gradients, _IDLE_GRADIENT)
    # torch.autograd.backward checks its arguments for longer than a small graph takes.
    keep_graph = owner.retain_graph or create_graph
    return run_backward(roots, gradients, keep_graph, create_graph, sinks, True, accumulates)


@functools.cache
def use_up_warning() -> None:
    """torch warns once in a process that `.grad` will refer to its own graph: ours never does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        leaf = torch.zeros((), requires_grad=True)
        torch.autograd.backward(leaf * 2, create_graph=True)
        leaf.grad = None
