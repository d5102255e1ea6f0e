"""The RRef protocol on a network that loses, repeats, delays and reorders, with crashes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from telegrad.errors import ProtocolError
from telegrad.ids import ForkId, RRefId
from telegrad.rpc.references.events import (
    UNKNOWN_WORKER,
    ConfirmUser,
    CreationArrived,
    CreationConfirmed,
    CreationFailed,
    CreationStarted,
    DropValue,
    Effect,
    Event,
    FailUser,
    FlushStarted,
    ForgetUser,
    HandleDied,
    HoldValue,
    Message,
    MessageArrived,
    PassingAbandoned,
    Reason,
    ReferencePassed,
    ReferenceReceived,
    Send,
    Timing,
    ValueMade,
    ValueWanted,
    WorkerDied,
)
from telegrad.rpc.references.owner import OwnedState
from telegrad.rpc.references.protocol import RRefProtocol
from telegrad.rpc.references.user import UserState
from telegrad.wire.frames import Kind

TIMING = Timing(retry_first=1.0, retry_last=4.0, max_message_age=20.0)
OWNER, A, B, C = 0, 1, 2, 3
RREF = RRefId(A, 0)
FORK = ForkId(A, 1)
CHILD = ForkId(A, 2)


# --- Simulation ----------------------------------------------------------------------------------


@dataclass
class Handle:
    """One live reference of the simulated program."""

    worker: int
    owner: int
    rref: RRefId
    fork: ForkId | None  # None: the owner's own


@dataclass(order=True)
class Delivery:
    time: float
    number: int
    deliver: Callable[[], None] = field(compare=False)
    to: int = field(compare=False)
    passing: Handle | None = field(compare=False, default=None)


class Simulation:
    """N workers which create, pass and drop references at random, and an oracle that watches."""

    def __init__(self, seed: int, *, loss: float, crashes: int, workers: int = 4) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.crashes_left = crashes
        self.now = 0.0
        self.machines = {n: RRefProtocol(n, TIMING) for n in range(workers)}
        self.ids = {n: itertools.count() for n in range(workers)}
        self.order = itertools.count()
        self.alive = set(range(workers))
        self.under_way: list[Delivery] = []
        self.handles: list[Handle] = []
        self.values: dict[int, set[RRefId]] = {n: set() for n in range(workers)}
        self.uncreated: set[RRefId] = set()  # their REMOTE message is under way
        self.orphaned: set[ForkId] = set()  # their parent died before they were confirmed
        self.hopeless: set[RRefId] = set()  # their REMOTE message was lost for good
        self.parents: dict[ForkId, tuple[int, ForkId | None]] = {}
        self.confirmed: set[ForkId] = set()
        self.failed: set[ForkId] = set()
        self.named: dict[ForkId, RRefId] = {}

    # The network

    def apply(self, worker: int, event: Event) -> None:
        if worker in self.alive:
            self.perform(worker, self.machines[worker].handle(event, self.now))

    def perform(self, worker: int, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to=to, message=message):
                    if to not in self.alive:
                        self.apply(worker, WorkerDied(worker=to))
                        continue
                    event = MessageArrived(source=worker, message=message)
                    for _ in range(self.random.choices([0, 1, 2], [self.loss, 1, self.loss])[0]):
                        self.send(to, lambda to=to, event=event: self.apply(to, event))
                case HoldValue(rref=rref):
                    assert rref not in self.values[worker], "held twice"
                    self.values[worker].add(rref)
                case DropValue(rref=rref):
                    self.values[worker].remove(rref)
                case ConfirmUser(fork=fork):
                    self.confirmed.add(fork)
                case FailUser(fork=fork, reason=reason):
                    if reason is Reason.GONE:
                        assert fork in self.orphaned or self.named[fork] in self.hopeless
                    self.failed.add(fork)
                case ForgetUser():
                    pass

    def send(self, to: int, deliver: Callable[[], None], passing: Handle | None = None) -> None:
        delay = self.random.expovariate(1.0) if self.random.random() < 0.7 else 15.0
        time = self.now + min(delay, TIMING.max_message_age - 1)
        self.under_way.append(Delivery(time, next(self.order), deliver, to, passing))

    def step_network(self) -> bool:
        """Delivers the next message or lets time pass; False if all is quiet for ever."""
        deadlines = {
            n: d for n in self.alive if (d := self.machines[n].next_deadline()) is not None
        }
        first = min(self.under_way, default=None)
        if first is not None and first.time <= min(deadlines.values(), default=first.time):
            self.under_way.remove(first)
            self.now = max(self.now, first.time)
            if first.to in self.alive:
                first.deliver()
            return True
        if not deadlines:
            return False
        worker = min(deadlines, key=lambda n: deadlines[n])
        self.now = max(self.now, deadlines[worker])
        self.perform(worker, self.machines[worker].tick(self.now))
        return True

    # The program

    def new_id(self, worker: int) -> tuple[int, int]:
        return worker, next(self.ids[worker])

    def make_value(self, worker: int) -> None:
        rref = RRefId(*self.new_id(worker))
        self.apply(worker, ValueMade(rref=rref))
        self.handles.append(Handle(worker, worker, rref, None))

    def create_remotely(self, worker: int, owner: int) -> None:
        rref, fork = RRefId(*self.new_id(worker)), ForkId(*self.new_id(worker))
        self.apply(worker, CreationStarted(rref=rref, fork=fork, owner=owner))
        self.handles.append(Handle(worker, owner, rref, fork))
        fate = self.random.random()

        def arrive() -> None:
            self.uncreated.discard(rref)
            self.apply(owner, CreationArrived(rref=rref, fork=fork, creator=worker))
            if worker in self.alive:
                self.send(worker, lambda: self.apply(worker, CreationConfirmed(fork=fork)))
            else:  # as the agent does when its answer cannot be sent
                self.apply(owner, WorkerDied(worker=worker))

        def fail() -> None:
            self.apply(worker, CreationFailed(fork=fork))

        if fate < 0.1 and self.loss:
            self.hopeless.add(rref)
            self.send(worker, fail)
            return
        self.uncreated.add(rref)
        self.send(owner, arrive)
        if fate < 0.3:
            self.send(worker, fail)

    def pass_on(self, handle: Handle, to: int) -> None:
        machine = self.machines[handle.worker]
        if handle.fork is not None and not machine.can_pass(handle.fork):
            return
        if handle.fork is None and machine.owned_state(handle.rref) is None:
            return
        child = ForkId(*self.new_id(handle.worker))
        blind = self.random.random() < 0.1
        event = ReferencePassed(
            rref=handle.rref,
            fork=child,
            parent=handle.fork,
            to=UNKNOWN_WORKER if blind and not self.crashes_left else to,
        )
        self.apply(handle.worker, event)
        if self.random.random() < 0.1:
            self.apply(handle.worker, PassingAbandoned(rref=handle.rref, fork=child))
            return
        self.parents[child] = (handle.worker, handle.fork)
        self.named[child] = handle.rref
        if handle.fork in self.orphaned and handle.fork not in self.confirmed:
            self.orphaned.add(child)
        at_owner = to == handle.owner
        new = Handle(to, handle.owner, handle.rref, None if at_owner else child)
        parent = UNKNOWN_WORKER if handle.fork is None and blind else handle.worker
        received = ReferenceReceived(
            rref=handle.rref, fork=child, owner=handle.owner, parent=parent
        )

        def arrive() -> None:
            self.apply(to, received)
            if not at_owner or self.machines[to].owned_state(handle.rref) is not None:
                self.handles.append(new)
            else:
                assert self.is_excused(handle, child), "a reference came home to a dropped value"

        if to in self.alive:
            self.send(to, arrive, Handle(to, handle.owner, handle.rref, child))
        else:
            self.apply(handle.worker, PassingAbandoned(rref=handle.rref, fork=child))

    def drop(self, handle: Handle) -> None:
        self.handles.remove(handle)
        self.apply(handle.worker, HandleDied(rref=handle.rref, fork=handle.fork))

    def crash(self, worker: int) -> None:
        self.alive.discard(worker)
        self.handles = [h for h in self.handles if h.worker != worker]
        for fork, (parent, _) in self.parents.items():
            if parent == worker and fork not in self.confirmed:
                self.orphaned.add(fork)
        for _ in self.parents:  # and their unconfirmed descendants
            for fork, (_, above) in self.parents.items():
                if above in self.orphaned and fork not in self.confirmed:
                    self.orphaned.add(fork)
        self.hopeless |= {rref for rref in self.uncreated if rref.created_on == worker}
        for other in self.alive:
            event = WorkerDied(worker=worker)
            self.send(other, lambda other=other, event=event: self.apply(other, event))

    def act(self) -> None:
        worker = self.random.choice(sorted(self.alive))
        other = self.random.randrange(len(self.machines))
        mine = [h for h in self.handles if h.worker == worker]
        action = self.random.random()
        if action < 0.1:
            self.make_value(worker)
        elif action < 0.25 and other != worker and other in self.alive:
            self.create_remotely(worker, other)
        elif action < 0.6 and mine:
            self.pass_on(self.random.choice(mine), other)
        elif action < 0.8 and mine:
            self.drop(self.random.choice(mine))
        elif action < 0.83 and mine:
            handle = self.random.choice(mine)
            self.apply(handle.owner, ValueWanted(rref=handle.rref))
        elif action < 0.86 and self.crashes_left and len(self.alive) > 2:
            self.crashes_left -= 1
            self.crash(worker)

    # The oracle

    def is_excused(self, handle: Handle, fork: ForkId | None) -> bool:
        return (
            handle.owner not in self.alive
            or handle.rref in self.hopeless
            or fork in self.orphaned
            or fork in self.failed
        )

    def check_values_are_held(self) -> None:
        passing = [d.passing for d in self.under_way if d.passing and d.to in self.alive]
        for handle in [*self.handles, *passing]:
            held = handle.rref in self.values[handle.owner]
            if not (held or handle.rref in self.uncreated or self.is_excused(handle, handle.fork)):
                raise AssertionError(f"the value of {handle} was dropped at {self.now}")

    def run(self, actions: int) -> None:
        for _ in range(actions):
            for _ in range(self.random.randrange(4)):
                self.step_network()
            self.act()
            self.check_values_are_held()

    def end(self) -> None:
        """Drops every handle, also those that still arrive, and waits for the last echo."""
        for _ in range(20_000):
            for handle in list(self.handles):
                self.drop(handle)
            self.check_values_are_held()
            if not self.step_network():
                return
        raise AssertionError("the network never became quiet")


def simulate(seed: int, *, loss: float, crashes: int) -> Simulation:
    simulation = Simulation(seed, loss=loss, crashes=crashes)
    simulation.run(actions=40)
    simulation.end()
    return simulation


def check_nothing_is_left(simulation: Simulation) -> None:
    for worker in simulation.alive:
        assert not simulation.values[worker]
        assert simulation.machines[worker].is_empty()
        assert simulation.machines[worker].next_deadline() is None


@pytest.mark.parametrize(
    ("loss", "crashes"),
    [(0.0, 0), (0.3, 0), (0.6, 0), (0.0, 2), (0.4, 2)],
)
def test_values_outlive_their_references_and_nothing_outlives_them(loss: float, crashes: int):
    for seed in range(400):
        check_nothing_is_left(simulate(seed, loss=loss, crashes=crashes))


def test_a_flush_settles_every_worker_although_handles_live():
    for seed in range(300):
        simulation = Simulation(seed, loss=0.3, crashes=0)
        simulation.run(actions=40)
        for worker in simulation.alive:
            simulation.apply(worker, FlushStarted())
        while simulation.step_network():
            pass
        for machine in simulation.machines.values():
            assert machine.is_settled()


# --- Every state meets every event ----------------------------------------------------------------


def message(kind: Kind, source: int, fork: ForkId, gone: bool = False) -> MessageArrived:
    return MessageArrived(
        source=source, message=Message(kind=kind, rref=RREF, fork=fork, gone=gone)
    )


def owner_after(*events: Event) -> RRefProtocol:
    machine = RRefProtocol(OWNER, TIMING)
    for event in events:
        machine.handle(event, 0.0)
    return machine


def user_after(*events: Event) -> RRefProtocol:
    machine = RRefProtocol(A, TIMING)
    for event in events:
        machine.handle(event, 0.0)
    return machine


ARRIVED = CreationArrived(rref=RREF, fork=FORK, creator=A)
WANTED = ValueWanted(rref=RREF)
DELETE = message(Kind.RREF_DELETE, A, FORK)
OWNER_STATES: dict[str, tuple[tuple[Event, ...], OwnedState | None]] = {
    "unknown": ((), None),
    "placeholder": ((WANTED,), OwnedState.PLACEHOLDER),
    "created": ((ARRIVED,), OwnedState.CREATED),
    "dropped": ((ARRIVED, DELETE), None),
    "deleted before creation": ((DELETE,), None),
    "given up": ((WANTED, WorkerDied(worker=A)), None),
}
P, K, X = OwnedState.PLACEHOLDER, OwnedState.CREATED, None
# for each event: the state after it, for each state above, in their order
OWNER_TABLE: list[tuple[Event, list[OwnedState | None]]] = [
    (ARRIVED, [K, K, K, X, X, X]),
    (WANTED, [P, P, K, X, P, X]),
    (message(Kind.RREF_FORK, B, CHILD), [P, P, K, X, P, X]),
    (message(Kind.RREF_FORK, A, FORK), [P, P, K, X, X, X]),
    (DELETE, [X, P, X, X, X, X]),
    (message(Kind.RREF_DELETE, B, CHILD), [X, P, K, X, X, X]),
    (ReferencePassed(rref=RREF, fork=ForkId(OWNER, 9), parent=None, to=B), [X, P, K, X, X, X]),
    (PassingAbandoned(rref=RREF, fork=ForkId(OWNER, 9)), [X, P, K, X, X, X]),
    (ReferenceReceived(rref=RREF, fork=CHILD, owner=OWNER, parent=A), [P, P, K, X, P, X]),
    (HandleDied(rref=RREF, fork=None), [X, P, K, X, X, X]),
    (WorkerDied(worker=A), [X, X, X, X, X, X]),
    (WorkerDied(worker=B), [X, P, K, X, X, X]),
    (message(Kind.RREF_FORK_ACCEPTED, A, FORK), [X, P, K, X, X, X]),
    (message(Kind.RREF_CHILD_ACCEPTED, B, CHILD), [X, P, K, X, X, X]),
    (message(Kind.RREF_CHILD_ACKNOWLEDGED, A, CHILD), [X, P, K, X, X, X]),
    (message(Kind.RREF_DELETED, A, FORK), [X, P, K, X, X, X]),
    (message(Kind.PING, A, FORK), [X, P, K, X, X, X]),
    (FlushStarted(), [X, P, K, X, X, X]),
    (CreationConfirmed(fork=FORK), [X, P, K, X, X, X]),
    (CreationFailed(fork=FORK), [X, P, K, X, X, X]),
]


@pytest.mark.parametrize("column", range(len(OWNER_STATES)), ids=list(OWNER_STATES))
@pytest.mark.parametrize("row", OWNER_TABLE, ids=lambda row: str(row[0])[:60])
def test_an_owner_in_every_state_meets_every_event(row, column):
    event, expected = row
    history, before = list(OWNER_STATES.values())[column]
    machine = owner_after(*history)
    assert machine.owned_state(RREF) is before
    machine.handle(event, 1.0)
    assert machine.owned_state(RREF) is expected[column]
    machine.handle(event, 2.0)  # once more: a repetition is no mistake


STARTED = CreationStarted(rref=RREF, fork=FORK, owner=OWNER)
FORKED = ReferenceReceived(rref=RREF, fork=FORK, owner=OWNER, parent=B)
CONFIRMED = CreationConfirmed(fork=FORK)
FAILED = CreationFailed(fork=FORK)
DIED = HandleDied(rref=RREF, fork=FORK)
LOST = WorkerDied(worker=OWNER)
S = UserState
USER_STATES: dict[str, tuple[tuple[Event, ...], UserState | None]] = {
    "unknown": ((), None),
    "creating": ((STARTED,), S.CREATING),
    "forking": ((FORKED,), S.FORKING),
    "confirmed": ((STARTED, CONFIRMED), S.CONFIRMED),
    "failed": ((STARTED, FAILED), S.FAILED),
    "deleting": ((STARTED, CONFIRMED, DIED), S.DELETING),
    "lost": ((STARTED, LOST), S.LOST),
}
USER_TABLE: list[tuple[Event, list[UserState | None]]] = [
    (STARTED, [S.CREATING, S.CREATING, S.FORKING, S.CONFIRMED, S.FAILED, S.DELETING, S.LOST]),
    (CONFIRMED, [X, S.CONFIRMED, S.FORKING, S.CONFIRMED, S.FAILED, S.DELETING, S.LOST]),
    (FAILED, [X, S.FAILED, S.FORKING, S.CONFIRMED, S.FAILED, S.DELETING, S.LOST]),
    (FORKED, [S.FORKING, S.CREATING, S.FORKING, S.CONFIRMED, S.FAILED, S.DELETING, S.LOST]),
    (
        ReferenceReceived(rref=RREF, fork=FORK, owner=OWNER, parent=OWNER),
        [S.CONFIRMED, S.CREATING, S.FORKING, S.CONFIRMED, S.FAILED, S.DELETING, S.LOST],
    ),
    (DIED, [X, S.CREATING, S.FORKING, S.DELETING, S.DELETING, S.DELETING, X]),
    (LOST, [X, S.LOST, S.LOST, S.LOST, S.LOST, X, S.LOST]),
    (FlushStarted(), [X, S.CREATING, S.FORKING, S.DELETING, S.DELETING, S.DELETING, X]),
    (
        message(Kind.RREF_FORK_ACCEPTED, OWNER, FORK),
        [X, S.CREATING, S.CONFIRMED, S.CONFIRMED, S.FAILED, S.DELETING, S.LOST],
    ),
    (
        message(Kind.RREF_FORK_ACCEPTED, OWNER, FORK, gone=True),
        [X, S.CREATING, S.LOST, S.CONFIRMED, S.FAILED, S.DELETING, S.LOST],
    ),
    (
        message(Kind.RREF_DELETED, OWNER, FORK),
        [X, S.CREATING, S.FORKING, S.CONFIRMED, S.FAILED, X, S.LOST],
    ),
    *(
        (event, [X, S.CREATING, S.FORKING, S.CONFIRMED, S.FAILED, S.DELETING, S.LOST])
        for event in (
            ReferencePassed(rref=RREF, fork=CHILD, parent=FORK, to=B),
            PassingAbandoned(rref=RREF, fork=CHILD),
            message(Kind.RREF_CHILD_ACCEPTED, B, CHILD),
            message(Kind.RREF_CHILD_ACKNOWLEDGED, B, FORK),
            message(Kind.RREF_FORK, B, ForkId(B, 5)),
            message(Kind.RREF_DELETE, B, ForkId(B, 5)),
            message(Kind.PING, B, FORK),
            HandleDied(rref=RREF, fork=None),
            WorkerDied(worker=B),
        )
    ),
]


@pytest.mark.parametrize("column", range(len(USER_STATES)), ids=list(USER_STATES))
@pytest.mark.parametrize("row", USER_TABLE, ids=lambda row: str(row[0])[:60])
def test_a_user_in_every_state_meets_every_event(row, column):
    event, expected = row
    history, before = list(USER_STATES.values())[column]
    machine = user_after(*history)
    assert machine.user_state(FORK) is before
    machine.handle(event, 1.0)
    assert machine.user_state(FORK) is expected[column]
    machine.handle(event, 2.0)


# --- Single statements ---------------------------------------------------------------------------


def kinds(effects: list[Effect]) -> list[Kind]:
    return [effect.message.kind for effect in effects if isinstance(effect, Send)]


def test_an_unconfirmed_child_keeps_its_parent_although_the_parents_handle_died():
    machine = user_after(STARTED, CONFIRMED)
    machine.handle(ReferencePassed(rref=RREF, fork=CHILD, parent=FORK, to=B), 0.0)
    assert kinds(machine.handle(DIED, 0.0)) == []
    effects = machine.handle(message(Kind.RREF_CHILD_ACCEPTED, B, CHILD), 1.0)
    assert kinds(effects) == [Kind.RREF_DELETE, Kind.RREF_CHILD_ACKNOWLEDGED]


def test_a_parent_stops_waiting_for_a_child_whose_worker_died():
    machine = user_after(STARTED, CONFIRMED)
    machine.handle(ReferencePassed(rref=RREF, fork=CHILD, parent=FORK, to=B), 0.0)
    machine.handle(DIED, 0.0)
    assert kinds(machine.handle(WorkerDied(worker=B), 0.0)) == [Kind.RREF_DELETE]


def test_a_child_that_loses_its_owner_releases_a_parent_that_has_not():
    """The owner stood still, and its loss is noticed by one worker after it has come back to the
    other: the parent would wait for ever."""
    child = user_after(FORKED)
    effects = child.handle(LOST, 1.0)
    (told,) = [effect for effect in effects if isinstance(effect, Send)]
    assert (told.to, told.message.kind) == (B, Kind.RREF_CHILD_ACCEPTED)
    child.handle(DIED, 1.0)
    assert not child.is_empty()  # it is told again until it has heard
    child.handle(message(Kind.RREF_CHILD_ACKNOWLEDGED, B, FORK), 2.0)
    assert child.is_empty()


def test_unanswered_messages_are_sent_again_at_growing_intervals_until_answered():
    machine = user_after(STARTED, CONFIRMED, DIED)
    times = []
    for _ in range(5):
        deadline = machine.next_deadline()
        assert deadline is not None
        assert machine.tick(deadline - 0.01) == []
        assert kinds(machine.tick(deadline)) == [Kind.RREF_DELETE]
        times.append(deadline)
    assert times == [1.0, 3.0, 7.0, 11.0, 15.0]
    machine.handle(message(Kind.RREF_DELETED, OWNER, FORK), 16.0)
    assert machine.next_deadline() is None
    assert machine.is_empty()


def test_a_message_that_is_wanted_twice_is_sent_again_once():
    machine = owner_after(ARRIVED)
    home = ReferenceReceived(rref=RREF, fork=CHILD, owner=OWNER, parent=A)
    machine.handle(home, 0.0)
    machine.handle(home, 0.5)  # the same bytes are unpacked again
    assert machine.next_deadline() == 1.5
    assert kinds(machine.tick(1.5)) == [Kind.RREF_CHILD_ACCEPTED]
    assert machine.next_deadline() == 3.5


@pytest.mark.parametrize("after", [DIED, FORKED], ids=["its end", "a repetition"])
def test_a_flush_ends_a_reference_whose_owner_answers_later(after):
    machine = user_after(FORKED, FlushStarted(), after)
    accepted = message(Kind.RREF_FORK_ACCEPTED, OWNER, FORK)
    assert Kind.RREF_DELETE in kinds(machine.handle(accepted, 1.0))


def test_what_is_created_while_references_are_flushed_is_good_for_nothing():
    machine = user_after(FlushStarted())
    assert machine.handle(STARTED, 0.0) == [FailUser(fork=FORK, reason=Reason.DELETED)]
    assert not machine.can_pass(FORK)
    assert kinds(machine.handle(CONFIRMED, 1.0)) == [Kind.RREF_DELETE]


def test_a_late_fork_does_not_bring_a_deleted_one_back_and_tombstones_expire():
    machine = owner_after(ARRIVED, message(Kind.RREF_FORK, B, CHILD))
    machine.handle(message(Kind.RREF_DELETE, B, CHILD), 0.0)
    [answer] = machine.handle(message(Kind.RREF_FORK, B, CHILD), 1.0)
    assert isinstance(answer, Send)
    assert answer.message.gone
    assert [fork for _, fork, _ in machine.forks()] == [FORK]
    effects = machine.handle(DELETE, 2.0)
    assert DropValue(rref=RREF) in effects
    while (deadline := machine.next_deadline()) is not None:
        machine.tick(deadline)
    assert machine.is_empty()


def test_a_fork_from_a_dead_parent_that_finds_the_value_dropped_is_told_so():
    owner = owner_after(ARRIVED)
    assert DropValue(rref=RREF) in owner.handle(WorkerDied(worker=A), 0.0)
    [answer] = owner.handle(message(Kind.RREF_FORK, B, CHILD), 1.0)
    assert isinstance(answer, Send)
    child = RRefProtocol(B, TIMING)
    child.handle(ReferenceReceived(rref=RREF, fork=CHILD, owner=OWNER, parent=A), 0.0)
    effects = child.handle(MessageArrived(source=OWNER, message=answer.message), 2.0)
    assert FailUser(fork=CHILD, reason=Reason.GONE) in effects


def test_a_fork_of_a_lost_worker_that_arrives_late_is_struck_when_it_cannot_be_answered():
    owner = owner_after(ARRIVED, WorkerDied(worker=B))
    assert kinds(owner.handle(message(Kind.RREF_FORK, B, CHILD), 1.0)) == [Kind.RREF_FORK_ACCEPTED]
    owner.handle(WorkerDied(worker=B), 1.0)  # what a failed Send answers with
    assert [fork for _, fork, _ in owner.forks()] == [FORK]


def test_a_placeholder_ends_when_its_creation_can_no_longer_come():
    machine = owner_after(WANTED)
    assert machine.next_deadline() == TIMING.max_message_age
    assert machine.tick(TIMING.max_message_age) == [DropValue(rref=RREF, reason=Reason.GONE)]
    machine = owner_after(WANTED)
    effects = machine.handle(WorkerDied(worker=A), 0.0)
    assert effects == [DropValue(rref=RREF, reason=Reason.CREATOR_LOST)]


def test_a_fork_of_a_lost_worker_does_not_keep_a_value_that_is_created_later():
    owner = owner_after(message(Kind.RREF_FORK, B, CHILD), WorkerDied(worker=B), ARRIVED)
    assert DropValue(rref=RREF) in owner.handle(DELETE, 1.0)


def test_a_look_at_the_clock_is_due_when_the_first_of_all_expires():
    machine = owner_after(WANTED)
    machine.handle(message(Kind.RREF_DELETE, B, CHILD), 5.0)
    assert machine.next_deadline() == TIMING.max_message_age
    machine = RRefProtocol(OWNER, TIMING)
    for time, fork in ((0.0, FORK), (5.0, CHILD), (10.0, FORK)):  # one is repeated
        machine.handle(message(Kind.RREF_DELETE, A, fork), time)
    assert machine.next_deadline() == TIMING.max_message_age + 5.0


def test_an_id_made_here_that_is_unknown_is_over_and_opens_no_placeholder():
    machine = RRefProtocol(OWNER, TIMING)
    assert machine.handle(ValueWanted(rref=RRefId(OWNER, 3)), 0.0) == []
    assert machine.is_empty()


def test_a_value_on_its_way_back_to_its_owner_is_kept():
    machine = RRefProtocol(OWNER, TIMING)
    rref, fork = RRefId(OWNER, 0), ForkId(OWNER, 1)
    machine.handle(ValueMade(rref=rref), 0.0)
    machine.handle(ReferencePassed(rref=rref, fork=fork, parent=None, to=OWNER), 0.0)
    assert machine.handle(HandleDied(rref=rref, fork=None), 0.0) == []
    machine.handle(ReferenceReceived(rref=rref, fork=fork, owner=OWNER, parent=OWNER), 0.0)
    assert machine.handle(HandleDied(rref=rref, fork=None), 0.0) == [DropValue(rref=rref)]
    assert machine.is_empty()


def test_counts_are_those_of_upstreams_debug_information():
    owner = RRefProtocol(OWNER, TIMING)
    local = RRefId(OWNER, 0)
    owner.handle(ValueMade(rref=local), 0.0)
    assert owner.counts()["owner_rrefs"] == 0  # not counted until it is shared
    owner.handle(ReferencePassed(rref=local, fork=ForkId(OWNER, 1), parent=None, to=A), 0.0)
    owner.handle(ARRIVED, 0.0)
    owner.handle(message(Kind.RREF_FORK, B, CHILD), 0.0)
    assert (owner.counts()["owner_rrefs"], owner.counts()["forks"]) == (2, 3)
    assert owner_after(WANTED).counts()["owner_rrefs"] == 1  # somebody waits for it
    assert user_after(STARTED).counts()["pending_users"] == 1
    assert user_after(FORKED).counts()["pending_users"] == 1
    assert user_after(FORKED).counts()["pending_futures"] == 1
    assert user_after(STARTED, FAILED).counts()["pending_users"] == 0


def test_a_malformed_body_is_a_protocol_error():
    body = Message(kind=Kind.RREF_FORK, rref=RREF, fork=FORK).body()
    assert Message.from_body(Kind.RREF_FORK, body).fork == FORK
    for bad in (None, (1, 2), (1, 2, 3, 4, "x"), [1, 2, 3, 4, 5]):
        with pytest.raises(ProtocolError, match="RREF_FORK"):
            Message.from_body(Kind.RREF_FORK, bad)


def test_what_is_no_event_is_refused():
    with pytest.raises(TypeError, match="not an event"):
        RRefProtocol(OWNER).handle("hello", 0.0)  # type: ignore[arg-type]
