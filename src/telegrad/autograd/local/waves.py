"""Calls of torch's own engine.

A wave is one call over all nodes that may run. Each node runs once in a pass and each hook sees the
total once; usually there is exactly one wave.

Where a ready node has an edge into a node that must wait, the gradient of that edge is kept until
the other is ready. Torch's engine does not compute such an edge (it is on no path to what was
asked for), so a hook after the node calls the node once more by hand, on a thread where no engine
runs: there the node computes all its edges. Only C++ nodes on that boundary are called twice, and
they are functions without side effects, unless saved-tensor hooks give them some: then the second
call may fail, and the error says why. Python nodes compute all their edges anyway. A call by
hand skips the engine's checks, so shape and type are reduced to those of the edge here.

Since a node runs once in a pass, each wave may free what it ran through: `retain_graph=False`
means in every wave what it means in plain torch.

A small graph whose ends nobody watches takes a shorter way: the engine catches what flows out of
it, as for `torch.autograd.grad`, and does not run the nodes at its ends. For a leaf that takes 2 µs
instead of 7.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.graph import GradientEdge

from telegrad.autograd.contexts.message_nodes import (
    AccumulateGrad,
    Received,
    RecvNode,
    current_wave,
    enter_wave,
    is_watched,
)
from telegrad.autograd.local.checkpoints import Checkpoints
from telegrad.autograd.local.grad_field import GradLoan, is_ddp_possible, needs_grad_field
from telegrad.autograd.local.leaves import add, adopt
from telegrad.autograd.local.unwatched import OwnHook, unwatched
from telegrad.autograd.local.walks import Graph, are_all_of_torch, new_edge
from telegrad.errors import BackwardError
from telegrad.threads import heed_num_threads

if TYPE_CHECKING:
    from telegrad.autograd.local.local_pass import LocalPass

__all__ = [
    "NO_BOUNDARY",
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

NO_BOUNDARY: Mapping[Any, set[Any]] = {}

_torchs_engine = torch.autograd.Variable._execution_engine
_BackwardCFunction = torch.autograd.function.BackwardCFunction

Outgoing: TypeAlias = tuple[Received, list[torch.Tensor | None]]
"""The gradients of a received message, on their way back to who sent it."""

LeafGradient: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""What a wave found at a leaf: the leaf, its gradient, and what that takes the place of, if a
reducer has made it of what an earlier wave of the same pass found there."""


def can_catch(graph: Graph) -> bool:
    """Whether what flows out of a graph may be caught, for nobody watches its ends."""
    return bool(
        graph.ends()
        and not any(map(is_watched, graph.recvs))
        and (not graph.leaves or unwatched.include_all(graph.leaves))
        and not _profiler_enabled()
    )


def catch(
    owner: LocalPass, graph: Graph, entering: Entering
) -> tuple[list[Outgoing], list[LeafGradient]]:
    """Runs a graph, and returns what flows out of it."""
    around = current_wave()
    if around is not None:  # a hook of it runs this pass, whose nodes may be its own as well
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
            # Nobody refers to it but our name, if it can be taken over as it is.
            found.append((leaf, adopt(gradient, leaf, references=1), None))
    outgoing: list[Outgoing] = []
    for node in graph.recvs:
        gradients = [caught.pop() for _ in node.received.outputs]
        for gradient in gradients:
            if gradient is not None:
                outgoing.append((node.received, gradients))
                break
    return outgoing, found


class Wave:
    """One call of torch's engine."""

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
            may_be_of_ddp = is_ddp_possible()
            self._lent = [
                node
                for node in leaves
                if needs_grad_field(node.variable, may_be_of_ddp) or unwatched.has_post_hooks(node)
            ]
            if self._lent:
                self._leaves = [node for node in leaves if node not in self._lent]
        self._watched: set[Any] = set()
        self._handles: list[Any] = []
        self._silenced: dict[Any, _Silenced] = {}
        self._found: dict[Any, torch.Tensor] = {}
        self._outgoing: list[Outgoing] = []

    def run(
        self, entering: Entering, sinks: tuple[GradientEdge, ...]
    ) -> tuple[list[Outgoing], list[LeafGradient]]:
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
                    # Others that run a pass inside of theirs, and were made with care, refuse to
                    # where not all gradients are asked for: these would end in `.grad`.
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
                silenced.give_back()
            if loan is not None:
                lent = loan.give_back()
        entering.clear()  # what entered must not count as a reference to what came out
        found: list[LeafGradient] = []
        for node in self._found:
            found.append((node.variable, self._take(node), None))
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
        """A checkpoint's inner pass will come to this leaf."""
        if needs_grad_field(node.variable, is_ddp_possible()):
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
        """Called by a recv node: `gradients` is what entered it."""
        for gradient in gradients:
            if gradient is not None:
                self._outgoing.append((node.received, list(gradients)))
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
        # Referred to by the dictionary and by nobody else, if it can be taken over as it is.
        return adopt(self._found[node], node.variable, references=1)

    def _watch_boundary(self, node: Any) -> None:
        reached = functools.partial(self._boundary_reached, node)
        handle = unwatched.register(node.register_hook, reached)
        self._handles.append(handle)
        if not isinstance(node, _BackwardCFunction):
            self._silenced[node] = _Silenced(self, handle)

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
            by_hand = _call_elsewhere(node, entered, self._owner.create_graph)
            whole = [a if a is not None else b for a, b in zip(out, by_hand, strict=True)]
            whole = silenced.run(whole, entered)
        held = self._boundary[node]
        for (target, number), gradient in zip(node.next_functions, whole, strict=True):
            if gradient is not None and target in held:
                self._owner.enter(target, number, _fit(gradient, target, number))
        if silenced is None or not silenced:
            return None
        return tuple([None if a is None else b for a, b in zip(out, whole, strict=True)])


class _Silenced:
    """The hooks of others after a node on the boundary. The engine would show them the gradients of
    some of its edges only, so while this wave runs they are run by it, on all of them."""

    def __init__(self, wave: Wave, own: Any) -> None:
        self._wave = wave
        self._hooks: dict[int, Any] = own.hooks_dict_ref()
        self._others: dict[int, _Quiet] = {}
        with _silencing:
            for id_, hook in tuple(self._hooks.items()):
                if type(hook) is not OwnHook:
                    quiet = hook if type(hook) is _Quiet else _Quiet(hook)
                    quiet.waves.append(wave)
                    self._others[id_] = self._hooks[id_] = quiet

    def __bool__(self) -> bool:
        return bool(self._others)

    def run(
        self, out: Sequence[torch.Tensor | None], entered: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """What comes out of the node after them."""
        for quiet in self._others.values():  # also one that another has just removed, as in torch
            changed = quiet.hook(tuple(out), tuple(entered))
            if changed is not None:
                out = changed if isinstance(changed, tuple) else (changed,)
        return out

    def give_back(self) -> None:
        with _silencing:
            for id_, quiet in self._others.items():
                quiet.waves.remove(self._wave)
                if not quiet.waves and id_ in self._hooks:
                    self._hooks[id_] = quiet.hook


class _Quiet:
    """A hook that has its turn later in some waves, and as ever in whatever else runs meanwhile."""

    __slots__ = ("hook", "waves")

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.waves: list[Wave] = []

    def __call__(self, *gradients: Any) -> Any:
        return None if current_wave() in self.waves else self.hook(*gradients)


_silencing = threading.RLock()  # guards which hooks are quiet, and in which waves


def _call_elsewhere(node: Any, entered: Sequence[torch.Tensor | None], create_graph: bool) -> Any:
    """Calls the node on a thread of its own: on this one the engine would tell it which edges to
    leave out."""
    outcome: list[Any] = []

    def call() -> None:
        heed_num_threads()
        try:
            with torch.set_grad_enabled(create_graph):
                outcome.append(node(*entered))
        except BaseException as error:  # noqa: BLE001 - raised again on the thread that asked
            outcome.append(error)

    thread = threading.Thread(target=call, name="telegrad-edge")
    thread.start()
    thread.join()
    error = outcome[0]
    if isinstance(error, Exception):
        raise BackwardError(
            f"{node.name()} failed when it was computed a second time: {type(error).__name__}: "
            f"{error}. It lies where gradients of this worker and of another meet, and such a "
            "function is computed twice in a pass, so its saved tensors are unpacked twice. If "
            "saved_tensors_hooks or a checkpoint do not allow that, keep the function that uses "
            "the result of the call out of them"
        ) from error
    if isinstance(error, BaseException):
        raise error
    return outcome[0] if isinstance(outcome[0], tuple) else (outcome[0],)


def _fit(gradient: torch.Tensor, node: Any, number: int) -> torch.Tensor:
    """What the engine does to a gradient before it enters a node."""
    expected = node._input_metadata[number]
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    if gradient.dtype != expected.dtype:
        gradient = gradient.to(expected.dtype)
    return gradient


_idle = torch.zeros((), requires_grad=True)
_to_nothing: Any = torch._C._functions.UndefinedGrad()
_idle_edge = GradientEdge(_to_nothing(_idle).grad_fn, 0)
"""Leads to nothing that is ever computed."""


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
    # torch.autograd.backward with the checks of user input left out: they take longer than a
    # small graph.
    roots, gradients = tuple(entering), tuple(entering.values())
    if len(roots) == 1 and unwatched.are_hooks_possible():
        # Of a single root, torch's engine says that it will not be executed, and a hook on several
        # tensors, of which this is one, would not wait for the others.
        roots, gradients = (*roots, _idle_edge), (*gradients, _idle)
    came: Sequence[torch.Tensor | None] = _torchs_engine.run_backward(
        roots,
        gradients,
        owner.retain_graph or create_graph,
        create_graph,
        sinks,
        True,
        accumulates,
    )
    return came


@functools.cache
def use_up_warning() -> None:
    """Torch warns once in a process that `.grad` will refer to its own graph: ours never does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        leaf = torch.zeros((), requires_grad=True)
        torch.autograd.backward(leaf * 2, create_graph=True)
        leaf.grad = None
