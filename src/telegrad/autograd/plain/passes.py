"""Backward passes as one worker takes part in them.

A pass begins where a program calls `loss.backward()` or `torch.autograd.grad`; it is named after
that worker and torch's number for it. Gradients that come for an entry are run through torch's
engine at once if no other entry reaches its nodes, which is the usual case. Otherwise they are
*kept*, and the `Collect` node of a call asks for them. When it runs, every `Post` whose entry
reaches the sink of that call has run, or never will. So a node is ready if each entry that reaches
it has delivered, or depends on that call itself. What flows from ready nodes into others is kept as
well. What is left at the end leads to leaves only; whoever has something left says so in its
replies, and the worker where the pass began tells it to finish, at torch's end-of-backward
callback.

So a hook on a shared part, or on a leaf that several calls use, sees the total, once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from telegrad.autograd.local.waves import use_up_warning
from telegrad.autograd.plain.entries import Entries, Entry, Walk, edges_of, walk
from telegrad.autograd.plain.nodes import (
    accumulates,
    keeps_graph,
    will_run,
)
from telegrad.autograd.thread_state import peek, stash
from telegrad.autograd.torch_internals import (
    input_metadata,
    post_accumulate_hooks,
    run_backward,
)
from telegrad.errors import BackwardError

if TYPE_CHECKING:
    from telegrad.autograd.plain.record import Record

__all__ = [
    "Modes",
    "Pass",
    "PassName",
    "Passes",
    "Report",
    "Run",
    "current_served_run",
    "watch_exported",
]

PassName = tuple[int, int]
"""The worker where a pass began, and torch's number for it there."""

_RUN = "telegrad.autograd.plain.run"
_mark = get_gradient_edge(torch.zeros((), requires_grad=True))
"""A leaf that all such runs have as a second root: a pass inside of one, of a hook, say, does not
run it. With a single root, torch takes that for a node that will not run, and hooks of
`register_multi_grad_hook` on it are not called."""
_MARK_GRADIENT = torch.zeros(())


class Modes(NamedTuple):
    """How a pass goes: `backward` and `grad` have arguments for it."""

    keep_graph: bool
    create_graph: bool
    accumulate: bool

    def as_bits(self) -> int:
        return self.keep_graph | self.create_graph << 1 | self.accumulate << 2

    @staticmethod
    def from_bits(bits: int) -> Modes:
        return Modes(bool(bits & 1), bool(bits & 2), bool(bits & 4))


class Report(NamedTuple):
    """What a worker answers to gradients.

    Attributes:
        found: the gradients of what the call had brought; None if they are not there yet.
        later: workers that have kept something.
        is_run: whether all has been run that the message brought.
        exported: what the caller gets for the leaves that the call has exported.
    """

    found: list[Tensor | None] | None
    later: list[int]
    is_run: bool
    exported: Any = None


class Pass:
    """What one pass has kept on one worker, and what it waits for."""

    def __init__(self, name: PassName, lock: threading.RLock) -> None:
        self.name = name
        self._lock = lock  # that of the entries; guards the two below
        self.kept: dict[tuple[Any, int], Tensor] = {}
        self.kept_at: dict[Any, list[tuple[Any, int]]] = {}  # by node
        self.delivered: set[Entry] = set()
        self.found: dict[int, list[Tensor | None]] = {}
        self.exported: dict[Any, Tensor] = {}  # by leaf
        self.posts: dict[int, list[tuple[Record, Callable[[], Report]]]] = {}
        """By call: whose results depend on it, and what waits for the answer to their gradients."""
        self.later: set[int] = set()
        self.tokens: list[Tensor] = []  # of deliveries that are recorded themselves
        self.modes: Modes | None = None
        self.flights: list[set[Any]] = []
        """Nodes that are being run: what they lead to has not got all of its gradient."""
        self.messages = 0  # being served: one may come back here while another is under way

    def concerned(self) -> list[Entry]:
        """Entries whose exported leaves it may reach. One that it has not delivered to is reached
        through a shared graph: results of `submit` are fetched by calls of their own."""
        return list({*self.delivered, *(e for d in self.delivered for e in d.shares)})

    def keep(self, edge: tuple[Any, int], gradient: Tensor) -> None:
        with self._lock:
            before = self.kept.get(edge)
            if before is None:
                self.kept_at.setdefault(edge[0], []).append(edge)
            self.kept[edge] = gradient if before is None else before + gradient

    def take(self, nodes: set[Any]) -> list[tuple[GradientEdge, Tensor]]:
        """What was kept for any of these nodes."""
        with self._lock:
            edges = [edge for node in nodes for edge in self.kept_at.pop(node, ())]
            return [(GradientEdge(*edge), self.kept.pop(edge)) for edge in edges]


class Run:
    """One run of torch's engine that belongs to a pass.

    Args:
        modes: None for a pass that began here: torch knows.
    """

    def __init__(self, one: Pass, modes: Modes | None = None) -> None:
        self.one = one
        self._modes = modes
        self.waits: list[Callable[[], Report]] = []
        self.exports: set[int] = set()
        """Leaves, by identity, whose gradients go to the caller."""

    def modes(self) -> Modes:
        create_graph = torch.is_grad_enabled()
        if self._modes is None:
            return Modes(keeps_graph(), create_graph, accumulates())
        return self._modes._replace(create_graph=create_graph)

    def wait_all(self) -> None:
        while self.waits:
            self.waits.pop()()


def current_served_run() -> Run | None:
    """The run that the engine is in on this thread, if gradients from elsewhere have begun it."""
    run: Run | None = peek(_RUN, None)
    return run if run is not None and will_run(_mark.node) else None


class Passes:
    """Those that began elsewhere and have something to do here.

    Args:
        own_pass: finds a pass that began on this worker, by torch's number.
    """

    def __init__(
        self, worker_id: int, entries: Entries, own_pass: Callable[[int], Pass | None]
    ) -> None:
        self._worker_id = worker_id
        self._entries = entries
        self._own_pass = own_pass
        self._passes: dict[PassName, Pass] = {}

    def __len__(self) -> int:
        return len(self._passes)

    def names(self) -> list[PassName]:
        return list(self._passes)

    def drop(self, is_to_go: Callable[[PassName], bool]) -> None:
        """Lets go of passes that will not go on."""
        with self._entries.lock:
            gone = [self._passes.pop(name) for name in list(self._passes) if is_to_go(name)]
        del gone

    def deliver(
        self, name: PassName, call: int, modes: Modes, gradients: Sequence[Tensor | None]
    ) -> Report:
        """Gradients of what an entry returned: runs it, or keeps them."""
        entries = self._entries
        with entries.lock:
            entry = entries.get(call)
            if entry is None:
                raise RuntimeError(
                    "Trying to backward through a remote call a second time: what it needs was "
                    "freed by the first pass. Pass retain_graph=True to all passes but the last"
                )
            is_alone = entries.is_alone(entry, accumulate=modes.accumulate)
        one = self._enter(name)
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(entry.edges, gradients, strict=True)
            if gradient is not None
        ]
        try:
            if is_alone:
                if not modes.keep_graph:
                    entries.drop([call])
                self._run(one, pairs, entry, [], modes, [entry])
            else:
                with entries.lock:
                    for edge, gradient in pairs:
                        one.keep((edge.node, edge.output_nr), gradient)
                    one.delivered.add(entry)
                    one.modes = modes
        except BaseException:
            self._leave(one)
            raise
        return self._report(one, call, is_run=is_alone, entry=entry)

    def ask(self, name: PassName, call: int, modes: Modes) -> Report:
        """Runs what leads to the sink of a call, and what else is ready by then."""
        one, entries = self._enter(name), self._entries
        try:
            with entries.lock:
                # What else has been kept neither leads to these entries' nodes nor is ready, but
                # for leaves that can wait. A pass may have kept thousands, and each is asked for.
                related = entries.related_to(call, accumulate=modes.accumulate)
                starts = {n for entry in related for n in entry.nodes if n in one.kept_at}
                nodes, leaves, sinks = walk(starts)
                # What leads to parameters of a module only must run for this call, or nothing
                # brings their gradients to the caller. It runs again if there is more to come.
                may_repeat: set[Any] = set()
                asked = entries.get(call)
                if asked is not None and asked.exported is not None:
                    may_repeat = nodes - _leading_to(sinks, nodes) - set(leaves)
                repeats = False
                behind = walk(n for flight in one.flights for n in flight)[0]
                ready = set()
                for node in nodes:
                    if entries.may_run_in_parts(node, accumulate=modes.accumulate):
                        ready.add(node)
                        continue
                    users = [user for user in entries.users(node) if user.of_pass != name]
                    if node in behind:
                        continue
                    is_ready = any(call in user.below for user in users) and all(
                        user in one.delivered or call in user.below for user in users
                    )
                    if is_ready or node in may_repeat:
                        ready.add(node)
                        repeats |= not is_ready
                # The engine goes any way that leads to a leaf, also through a node that is not
                # ready: such a leaf must wait, too.
                ready -= walk(nodes - ready)[0]
                pairs = one.take(ready)
                one.flights.append(ready)  # before another thread looks for what is ready
                concerned = one.concerned()
            border = [n for n in ready if any(m not in ready for m, _ in edges_of(n))]
            part = Walk(ready, [n for n in leaves if n in ready], [n for n in sinks if n in ready])
            once = modes._replace(keep_graph=modes.keep_graph or repeats)
            self._run(one, pairs, part, border, once, concerned)
            with entries.lock:
                one.flights = [flight for flight in one.flights if flight is not ready]
        except BaseException:
            self._leave(one)
            raise
        return self._report(one, call, is_run=True, entry=asked)

    def finish(self, name: PassName) -> list[int]:
        """The end of a pass: what has been kept leads to leaves only. Returns who has more."""
        one = self._enter(name)
        try:
            with self._entries.lock:
                kept, one.kept, one.kept_at = one.kept, {}, {}
                # of calls whose gradients the pass does not need
                one.found.clear()
                unclaimed, one.exported = one.exported, {}
                concerned = one.concerned()
            modes = one.modes
            if modes is not None and modes.accumulate and kept:
                pairs = [(GradientEdge(*edge), gradient) for edge, gradient in kept.items()]
                part = walk(edge.node for edge, _ in pairs)
                create_graph = any(gradient.requires_grad for gradient in kept.values())
                modes = modes._replace(create_graph=create_graph)
                self._run(one, pairs, part, [], modes, concerned)
                if one.exported:
                    raise BackwardError(
                        "a parameter of a remote module has a hook on its worker, and several "
                        "calls use it: register the hook on the parameter at the driver"
                    )
            if modes is not None and modes.accumulate and unclaimed:
                raise BackwardError(
                    "the gradient of a parameter of a remote module has no way to its `.grad`: the "
                    "module was called, by another worker or in another graph, before its result "
                    "was used here. Pass the result on as an argument"
                )
        except BaseException:
            self._leave(one)
            raise
        return self._report(one, -1, is_run=True, entry=None).later

    def _enter(self, name: PassName) -> Pass:
        with self._entries.lock:
            one = self._own_pass(name[1]) if name[0] == self._worker_id else None
            if one is None:
                one = self._passes.setdefault(name, Pass(name, self._entries.lock))
            one.messages += 1
            return one

    def _leave(self, one: Pass) -> None:
        """After an error, which ends the pass."""
        with self._entries.lock:
            one.messages -= 1
            self._passes.pop(one.name, None)

    def _report(self, one: Pass, call: int, *, is_run: bool, entry: Entry | None) -> Report:
        exported = None
        if entry is not None and entry.exported is not None and is_run:
            leaves, export = entry.exported
            gradients = [one.exported.pop(leaf, None) for leaf in leaves]
            try:
                exported = export(gradients)
            except BaseException:  # such gradients cannot be exported
                self._leave(one)
                raise
        dropped: list[Entry] = []
        with self._entries.lock:
            found = one.found.pop(call, None)
            later, one.later = one.later, set()
            one.messages -= 1
            if one.kept or one.found or one.exported or one.messages:
                later.add(self._worker_id)
            else:
                self._passes.pop(one.name, None)
                if one.modes is not None and not one.modes.keep_graph:
                    dropped = self._entries.drop([e.call for e in one.delivered])
        del dropped
        return Report(found, sorted(later), is_run, exported)

    def _run(
        self,
        one: Pass,
        pairs: Sequence[tuple[GradientEdge, Tensor]],
        part: Walk | Entry,
        border: Sequence[Any],
        modes: Modes,
        entries: Sequence[Entry],
    ) -> None:
        """One run of torch's engine over a part of the graph. Gradients that leave it are kept: a
        node on its border is run once more for them afterwards, because with `inputs` the engine
        computes only what leads to one."""
        ready, leaves = part.nodes, part.leaves
        targets = [*part.sinks, *border]
        exports = {id(t): t for e in entries if e.exported is not None for t in e.exported[0]}
        if modes.accumulate:
            targets += leaves
        elif exports:
            targets += [n for n in leaves if id(n.variable) in exports]
        if not pairs or not targets:
            return
        run = Run(one, modes)
        run.exports = set(exports)
        borders = [_Border(node, ready, one) for node in border]
        aside = [(t, t.grad) for t in exports.values() if t.grad is not None]
        for tensor, _ in aside:
            tensor.grad = None
        if modes.create_graph:
            use_up_warning()
        outer = peek(_RUN, None)
        stash(_RUN, run)
        try:
            with torch.enable_grad():  # else create_graph has no effect
                # torch.autograd.backward without its checks of what users pass, which take longer
                # than a small graph does.
                run_backward(
                    (*[edge for edge, _ in pairs], _mark),
                    (*[gradient for _, gradient in pairs], _MARK_GRADIENT),
                    modes.keep_graph or bool(border),
                    modes.create_graph,
                    (*[GradientEdge(n, 0) for n in targets], _mark),
                    True,
                    True,
                )
            for each in borders:  # inside of the pass a node leaves out what that does not need
                each.run_again(create_graph=modes.create_graph)
            run.wait_all()
        finally:
            stash(_RUN, outer)
            for each in borders:
                each.remove()
            for tensor, gradient in aside:
                tensor.grad = gradient


def _leading_to(sinks: Sequence[Any], nodes: set[Any]) -> set[Any]:
    before: dict[Any, list[Any]] = {}
    for node in nodes:
        for behind, _ in edges_of(node):
            before.setdefault(behind, []).append(node)
    leading, stack = set(sinks), list(sinks)
    while stack:
        for node in before.get(stack.pop(), ()):
            if node not in leading:
                leading.add(node)
                stack.append(node)
    return leading


class _Border:
    """A node of which some edges lead out of what is run: keeps the gradients for these."""

    def __init__(self, node: Any, ready: set[Any], one: Pass) -> None:
        self._node = node
        self._ready = ready
        self._one = one
        self._entered: list[Sequence[Tensor | None]] = []
        is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        # A Python function gives all of its edges at once.
        hook = node.register_hook if is_python else node.register_prehook
        self._handle = hook(self._left if is_python else self._entered_by)

    def _is_its_pass(self) -> bool:
        """And not another one that goes through the node at the same time."""
        run = current_served_run()
        return run is not None and run.one is self._one

    def _entered_by(self, gradients: Sequence[Tensor | None]) -> None:
        if self._is_its_pass():
            self._entered.append(gradients)

    def _left(self, gradients: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> None:
        if self._is_its_pass():
            self._keep(self._node.next_functions, gradients)

    def _keep(self, edges: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
        for (node, nr), gradient in zip(edges, gradients, strict=False):
            if node is not None and node not in self._ready and gradient is not None:
                shape = input_metadata(node)[nr].shape
                self._one.keep((node, nr), gradient.sum_to_size(shape))

    def run_again(self, *, create_graph: bool) -> None:
        for gradients in self._entered:
            with torch.set_grad_enabled(create_graph):
                out = self._node(*gradients)
            self._keep(self._node.next_functions, out if isinstance(out, tuple) else (out,))

    def remove(self) -> None:
        self._handle.remove()


def export_hook(leaf: Tensor) -> None:
    """Runs after a leaf has got its gradient: takes that away, if it is for a caller."""
    run = current_served_run()
    if run is None or id(leaf) not in run.exports or leaf.grad is None:
        return
    gradient, leaf.grad = leaf.grad, None
    before = run.one.exported.get(leaf)
    run.one.exported[leaf] = gradient if before is None else before + gradient


export_hook.exports_leaf = True  # type: ignore[attr-defined]


def watch_exported(leaf: Tensor) -> None:
    """Twice at once does no harm: the second hook finds nothing."""
    if export_hook not in post_accumulate_hooks(leaf).values():
        leaf.register_post_accumulate_grad_hook(export_hook)  # type: ignore[no-untyped-call]
