"""The lifetime of a context over workers, as a machine: any order, losses, duplicates, crashes."""

from __future__ import annotations

import random

import pytest

from telegrad.autograd.contexts.lifetime import (
    REMEMBERED,
    Acknowledge,
    ContextLifetimes,
    Free,
    TellHeld,
    TellReleased,
)
from telegrad.ids import COUNTER_BITS

ID = 7  # made by worker 0


class Net:
    def __init__(self, size, rnd, *, loss=0.0, duplicates=0.0):
        self.machines = [ContextLifetimes(w) for w in range(size)]
        self.rnd, self.loss, self.duplicates = rnd, loss, duplicates
        self.flying, self.dead = [], set()
        self.machines[0].began(ID)

    def act(self, worker, effects):
        for effect in effects:
            if not isinstance(effect, Free):
                what = (worker, effect.worker, type(effect))
                if self.rnd.random() >= self.loss:
                    self.flying.append(what)
                if self.rnd.random() < self.duplicates:
                    self.flying.append(what)

    def speak(self, source, to):
        """A message of the context; it may be delivered at any later time."""
        self.act(source, self.machines[source].met(ID, to))
        self.flying.append((source, to, None))

    def deliver(self):
        source, to, kind = self.flying.pop(self.rnd.randrange(len(self.flying)))
        if to in self.dead:
            if kind is TellReleased:  # a post to a lost worker fails
                self.machines[source].acknowledged(ID, to)
            return
        machine = self.machines[to]
        if kind is None:
            self.act(to, machine.met(ID, source))
        elif kind is TellReleased:
            self.act(to, machine.released(ID, told_by=source))
        elif kind is TellHeld:
            self.act(to, machine.held(ID, source))
        else:
            machine.acknowledged(ID, source)

    def settle(self):
        for _ in range(100):
            while self.flying:
                self.deliver()
            alive = [w for w in range(len(self.machines)) if w not in self.dead]
            if not any(self.machines[w].has_unacknowledged for w in alive):
                return
            for worker in alive:
                self.act(worker, self.machines[worker].retry())
        raise AssertionError("the release never settles")

    def crash(self, worker):
        self.dead.add(worker)
        for w, machine in enumerate(self.machines):
            if w not in self.dead:
                self.act(w, machine.lost(worker))


@pytest.mark.parametrize("seed", range(300))
def test_a_release_reaches_everyone_whatever_is_lost_or_doubled_or_late(seed):
    rnd = random.Random(seed)
    net = Net(rnd.randrange(2, 7), rnd, loss=rnd.choice((0, 0.3)), duplicates=0.2)
    for _ in range(rnd.randrange(0, 12)):
        holders = [w for w, m in enumerate(net.machines) if m.is_alive(ID)]
        net.speak(rnd.choice(holders), rnd.randrange(len(net.machines)))
        if rnd.random() < 0.6 and net.flying:
            net.deliver()
    net.act(0, net.machines[0].released(ID))
    net.settle()
    assert not any(machine.is_alive(ID) for machine in net.machines)


@pytest.mark.parametrize("seed", range(100))
def test_the_creators_crash_frees_what_it_made(seed):
    rnd = random.Random(seed)
    net = Net(4, rnd)
    for _ in range(8):
        holders = [w for w, m in enumerate(net.machines) if m.is_alive(ID)]
        net.speak(rnd.choice(holders), rnd.randrange(4))
        net.deliver()
    net.crash(0)
    net.settle()
    assert not any(machine.is_alive(ID) for machine in net.machines[1:])


@pytest.mark.parametrize("seed", range(300))
def test_a_release_reaches_everyone_past_workers_that_crash(seed):
    """Also where the only way led through them, and if they spoke before they did."""
    rnd = random.Random(seed)
    net = Net(6, rnd, loss=rnd.choice((0, 0.3)), duplicates=0.2)
    releases_at, crashes_at = rnd.randrange(4, 12), rnd.sample(range(2, 12), 2)
    for step in range(12):
        if step == releases_at:
            net.act(0, net.machines[0].released(ID))
        if step in crashes_at:
            net.crash(rnd.choice([w for w in range(1, 6) if w not in net.dead]))
        holders = [w for w, m in enumerate(net.machines) if m.is_alive(ID) and w not in net.dead]
        if holders:
            net.speak(rnd.choice(holders), rnd.randrange(6))
        if rnd.random() < 0.6 and net.flying:
            net.deliver()
    net.act(0, net.machines[0].released(ID))
    net.settle()
    assert [w for w, m in enumerate(net.machines) if m.is_alive(ID) and w not in net.dead] == []


def test_a_holder_that_lost_its_way_to_the_maker_is_its_contact_again():
    maker, holder = ContextLifetimes(0), ContextLifetimes(2)
    maker.began(ID)
    holder.met(ID, 1)
    assert holder.lost(1) == [TellHeld(0, ID)]
    assert holder.retry() == [TellHeld(0, ID)]
    assert maker.held(ID, 2) == [TellHeld(2, ID)]
    assert holder.held(ID, 0) == []
    assert holder.retry() == []
    assert not holder.has_unacknowledged
    assert maker.released(ID) == [Free(ID), TellReleased(2, ID)]


def test_a_maker_that_has_forgotten_a_context_has_released_it():
    assert ContextLifetimes(0).held(ID, 2) == [TellReleased(2, ID)]


def test_a_release_is_carried_out_once_and_acknowledged_each_time():
    machine = ContextLifetimes(1)
    machine.met(ID, 0)
    machine.met(ID, 2)
    assert machine.released(ID, told_by=0) == [Free(ID), TellReleased(2, ID), Acknowledge(0, ID)]
    assert machine.released(ID, told_by=0) == [Acknowledge(0, ID)]


def test_a_contact_after_the_release_is_told_of_it():
    machine = ContextLifetimes(1)
    machine.released(ID, told_by=0)
    assert machine.met(ID, 3) == [TellReleased(3, ID)]
    assert not machine.is_alive(ID)


def test_a_retry_comes_only_after_a_whole_interval():
    machine = ContextLifetimes(0)
    machine.began(ID)
    machine.met(ID, 1)
    machine.released(ID)
    assert machine.retry() == []
    assert machine.retry() == [TellReleased(1, ID)]
    machine.acknowledged(ID, 1)
    assert machine.retry() == []


def test_a_lost_worker_needs_no_release_and_contexts_of_others_live_on():
    machine = ContextLifetimes(0)
    mine, theirs = 1, (2 << COUNTER_BITS) + 1
    machine.began(mine)
    machine.met(mine, 2)
    machine.met(theirs, 2)
    assert machine.lost(2) == [Free(theirs)]
    assert machine.is_alive(mine)


def test_what_is_remembered_is_bounded():
    machine = ContextLifetimes(0)
    for id_ in range(REMEMBERED + 10):
        machine.began(id_)
        machine.released(id_)
    assert not machine.is_released(0)
    assert machine.is_released(REMEMBERED + 9)


def test_a_maker_that_is_a_contact_needs_no_word_of_a_loss():
    machine = ContextLifetimes(1)
    machine.met(ID, 0)
    machine.met(ID, 2)
    assert machine.lost(2) == []
    assert not machine.has_unacknowledged
