"""The pass protocol alone: every delivery order of small graphs, random orders of large ones.

A distributed graph is drawn as plain numbers. Workers run it with `Frontier`, which knows no torch,
so the whole protocol runs here as it does in the engine, without tensors, threads or time.
"""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest

from telegrad.autograd.local.frontier import Frontier
from telegrad.autograd.passes.protocol import (
    AskReachability,
    Complete,
    EndPass,
    PassControl,
    PassShare,
    PassState,
    Standing,
    StrikeOff,
)
from telegrad.ids import COUNTER_BITS, worker_of


def message(worker, number):
    return (worker << COUNTER_BITS) + number


class Graph:
    """A DAG of (worker, number) nodes; edges between workers become messages.

    Nodes are numbered in topological order of the backward direction: an edge leads to a larger
    number. `uses` are the edges; node 0 is the root, on worker 0.
    """

    def __init__(self, places, uses):
        self.places = places
        self.next = {n: [] for n in range(len(places))}
        self.sends = {w: {} for w in range(max(places) + 1)}
        self.recv = {}  # pseudo node -> message
        for number, (a, b) in enumerate(uses):
            if places[a] == places[b]:
                self.next[a].append(b)
            else:
                id_ = message(places[b], number)
                self.sends[places[b]][id_] = [b]
                self.recv["recv", id_] = id_
                self.next[a].append(("recv", id_))

    def behind(self, nodes):
        seen, todo = set(), list(nodes)
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += self.next.get(node, ())
        return {self.recv[n] for n in seen if n in self.recv}

    def live(self):
        """(nodes, messages) that the root reaches over all workers."""
        seen, todo, messages = set(), [0], set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.recv:
                messages.add(self.recv[node])
                todo += self.sends[worker_of(self.recv[node])][self.recv[node]]
            else:
                todo += self.next[node]
        return {n for n in seen if n not in self.recv}, messages


class Member:
    def __init__(self, world, worker):
        self.world, self.worker = world, worker
        self.share = PassShare(worker, world.control if worker == 0 else None)
        self.is_kept = False
        graph = world.graph
        roots = [0] if worker == 0 else []
        self.frontier = Frontier(
            roots, graph.sends[worker], lambda n: graph.next.get(n, ()), lambda n: False
        )

    def advance(self):
        outgoing = []
        for node in self.frontier.advance():
            if node in self.world.graph.recv:
                outgoing.append(self.world.graph.recv[node])
            else:
                self.world.ran.append(node)
        if self.frontier.waiting:
            standing = Standing.WAITING
        else:
            is_open = self.frontier.awaited or self.is_kept
            standing = Standing.OPEN if is_open else Standing.CLOSED
        parcels = self.share.split(len(outgoing), standing) if outgoing else []
        for id_, (credit, reports) in zip(outgoing, parcels, strict=True):
            self.world.send(worker_of(id_), ("gradients", id_, credit, reports))
        if standing is Standing.CLOSED and self.worker != 0:
            del self.world.members[self.worker]
        if not outgoing:
            self.world.send(0, ("credit", *self.share.give_up(standing)))


class World:
    def __init__(self, graph):
        self.graph = graph
        self.members = {}
        self.control = PassControl()
        self.network = []
        self.ran = []
        self.completed = 0
        self.struck = set()
        self.crashed = set()
        first = self.member(0)
        first.share.take(Fraction(1), {})
        first.advance()

    def member(self, worker):
        if worker not in self.members:
            self.members[worker] = Member(self, worker)
        return self.members[worker]

    def send(self, to, what):
        self.network.append((to, what))

    def carry_out(self, effects):
        for effect in effects:
            if isinstance(effect, Complete):
                self.completed += 1
            elif isinstance(effect, EndPass):
                self.send(effect.worker, ("end",))
            elif isinstance(effect, AskReachability):
                self.send(effect.worker, ("ask",))
            elif isinstance(effect, StrikeOff):
                self.send(effect.worker, ("strike", effect.live, effect.credit))

    def deliver(self, index):
        to, (kind, *rest) = self.network.pop(index)
        if to in self.crashed:
            return
        if kind == "gradients":
            id_, credit, reports = rest
            member = self.member(to)
            member.share.take(credit, reports)
            member.frontier.arrive(id_)
            member.advance()
        elif kind == "credit":
            self.carry_out(self.control.credit_returned(*rest))
        elif kind == "ask":
            member = self.member(to)
            member.is_kept = True
            waiting = self.graph.behind(member.frontier.waiting)
            sends = {m: self.graph.behind(n) for m, n in member.frontier.awaited.items()}
            self.send(0, ("told", to, waiting, sends))
        elif kind == "told":
            self.carry_out(self.control.reachability_told(*rest))
        elif kind == "strike":
            live, credit = rest
            member = self.member(to)
            dead = set(member.frontier.awaited) - live
            self.struck |= dead
            member.frontier.strike_off(dead)
            member.share.take(credit, {})
            member.advance()
        elif kind == "end":
            self.members.pop(to, None)

    def check(self):
        nodes, messages = self.graph.live()
        assert sorted(self.ran) == sorted(nodes), "each reached node runs exactly once"
        assert self.completed == 1
        assert self.control.state is PassState.COMPLETE
        assert not self.struck & messages, "what can arrive is never struck off"
        assert set(self.members) <= {0}, "nobody keeps the pass"
        held = sum((m.share.credit for m in self.members.values()), Fraction(0))
        assert held == 0


def random_graph(rnd, workers, nodes, edges):
    places = [0] + [rnd.randrange(workers) for _ in range(nodes - 1)]
    places[-1] = max(places[-1], workers - 1)
    uses = []
    for _ in range(edges):
        a, b = sorted(rnd.sample(range(nodes), 2))
        uses.append((a, b))
    return Graph(places, uses)


SMALL = {
    "one call": Graph([0, 1, 0], [(0, 1), (1, 2)]),
    "skip connection": Graph([0, 1, 0], [(0, 1), (1, 2), (0, 2)]),
    "two results": Graph([0, 1, 1, 0], [(0, 1), (0, 2), (1, 3), (2, 3)]),
    "unused result": Graph([0, 1, 1, 0], [(0, 1), (1, 3), (2, 3), (0, 3)]),
    "unused results of two": Graph([0, 1, 2, 0, 1], [(0, 3), (1, 3), (2, 3), (3, 4), (2, 4)]),
    "nested": Graph([0, 1, 2, 1, 0], [(0, 1), (1, 2), (2, 3), (3, 4)]),
    "diamond over three": Graph([0, 1, 2, 1, 0], [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (0, 4)]),
    "stranger in the way": Graph(
        [0, 1, 2, 0, 1, 0], [(0, 3), (3, 4), (1, 2), (2, 3), (4, 5), (0, 5), (2, 5)]
    ),
    "waits that wait for each other": Graph(
        [0, 1, 0, 1, 0], [(0, 1), (0, 2), (1, 2), (2, 3), (1, 3), (3, 4), (2, 4)]
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_delivery_order_of_a_small_graph_ends_rightly(name):
    count = 0
    stack = [()]
    while stack:
        order = stack.pop()
        world = World(SMALL[name])
        for index in order:
            world.deliver(index)
        if world.network:
            stack += [(*order, i) for i in range(len(world.network))]
        else:
            world.check()
            count += 1
    assert count > 0


@pytest.mark.parametrize("first", range(0, 1500, 300))
def test_random_orders_of_large_graphs_end_rightly(first):
    resolved = 0
    for seed in range(first, first + 300):
        rnd = random.Random(seed)
        workers = rnd.randrange(2, 7)
        nodes = rnd.randrange(5, 60)
        world = World(random_graph(rnd, workers, nodes, rnd.randrange(nodes, 3 * nodes)))
        while world.network:
            world.deliver(rnd.randrange(len(world.network)))
        try:
            world.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        resolved += world.control.resolutions > 0
    assert resolved > 30, "the graphs must have results that the loss does not use"


@pytest.mark.parametrize("seed", range(200))
def test_a_pass_with_a_crashed_worker_never_completes_and_fails_once(seed):
    rnd = random.Random(seed)
    world = World(random_graph(rnd, 4, 20, 40))
    crashed, steps = rnd.randrange(1, 4), rnd.randrange(0, 8)
    for step in itertools.count():
        if step == steps:
            world.crashed.add(crashed)
            had_credit = crashed in world.members and bool(world.members[crashed].share.credit)
            in_flight = any(to == crashed and what[0] != "end" for to, what in world.network)
        if not world.network:
            break
        world.deliver(rnd.randrange(len(world.network)))
    if step > steps and (had_credit or in_flight):
        assert world.completed == 0, "credit was lost, so the pass cannot look complete"
    if not world.completed:
        assert world.control.failed()
        assert not world.control.failed(), "it fails once"
        assert world.control.credit_returned(Fraction(1), {}) == []
        assert world.control.reachability_told(1, [], {}) == []


def test_a_chain_of_calls_needs_its_gradient_messages_and_nothing_else():
    calls = 400
    places = [n % 2 for n in range(2 * calls + 1)]
    world = World(Graph(places, [(n, n + 1) for n in range(2 * calls)]))
    delivered = []
    while world.network:
        delivered.append(world.network[0][1][0])
        world.deliver(0)
    world.check()
    assert delivered.count("gradients") == 2 * calls
    assert delivered.count("credit") == 1, "the initiator's own, which is not sent"
    assert len(delivered) == 2 * calls + 1


ONE_WAY = Graph(range(6), [(n, n + 1) for n in range(5)])


@pytest.mark.parametrize("graph", [SMALL["one call"], ONE_WAY], ids=["one call", "one way"])
def test_a_pass_in_which_nobody_but_the_initiator_is_open_needs_no_reports(graph):
    world = World(graph)
    while world.network:
        *_, reports = world.network[0][1]
        assert reports == {}
        world.deliver(0)
    assert world.completed == 1


def test_a_worker_that_was_open_reports_that_it_has_closed():
    share = PassShare(7)
    assert share.give_up(Standing.CLOSED) == (0, {})
    share.take(1, {})
    assert share.give_up(Standing.OPEN) == (1, {7: (1, Standing.OPEN)})
    share.take(1, {8: (1, Standing.OPEN)})
    assert share.give_up(Standing.CLOSED) == (
        1,
        {8: (1, Standing.OPEN), 7: (2, Standing.CLOSED)},
    )


def test_one_resolution_strikes_off_also_where_nothing_waits():
    control = PassControl()
    reports = {1: (1, Standing.WAITING), 2: (1, Standing.OPEN), 3: (1, Standing.OPEN)}
    assert control.credit_returned(1, reports) == [AskReachability(worker) for worker in (1, 2, 3)]
    live, dead, other = message(2, 1), message(2, 2), message(3, 1)
    control.reachability_told(1, [live], {message(1, 1): []})
    control.reachability_told(2, [], {live: [other], dead: []})
    assert control.reachability_told(3, [], {other: []}) == [
        StrikeOff(1, frozenset(), Fraction(1, 2)),
        StrikeOff(2, frozenset({live}), Fraction(1, 2)),
    ]


def test_late_events_of_an_ended_pass_change_nothing():
    control = PassControl()
    effects = control.credit_returned(Fraction(1), {0: (1, Standing.CLOSED), 1: (1, Standing.OPEN)})
    assert effects == [EndPass(1), Complete()]
    assert control.credit_returned(Fraction(1), {}) == []
    assert control.reachability_told(1, [], {}) == []
    assert not control.failed()


def test_only_the_latest_report_of_a_worker_counts():
    control = PassControl()
    assert control.credit_returned(Fraction(1, 2), {1: (2, Standing.CLOSED)}) == []
    assert control.credit_returned(Fraction(1, 2), {1: (1, Standing.WAITING)}) == [Complete()]
