"""Liveness as a table: every state with every event, and random histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.rpc.connections.liveness import (
    Connected,
    DeclareLost,
    Ended,
    Heard,
    Liveness,
    SendPing,
    State,
    TimePassed,
)

INTERVAL, TIMEOUT = 1.0, 5.0


def in_state(state: State) -> Liveness:
    """A machine in that state, at time 0."""
    machine = Liveness(INTERVAL, TIMEOUT, 0.0)
    if state is not State.APART:
        machine.handle(Connected(), 0.0)
    if state is State.LOST:
        machine.handle(Ended("before"), 0.0)
    assert machine.state is state
    return machine


@pytest.mark.parametrize(
    ("state", "event", "after", "effects"),
    [
        (State.APART, Connected(), State.PRESENT, []),
        (State.APART, Heard(), State.APART, []),
        (State.APART, TimePassed(), State.APART, []),
        (State.APART, Ended("x"), State.LOST, [DeclareLost("x")]),
        (State.PRESENT, Connected(), State.PRESENT, []),
        (State.PRESENT, Heard(), State.PRESENT, []),
        (State.PRESENT, TimePassed(), State.PRESENT, []),
        (State.PRESENT, Ended("x"), State.LOST, [DeclareLost("x")]),
        (State.LOST, Connected(), State.PRESENT, []),
        (State.LOST, Heard(), State.LOST, []),
        (State.LOST, TimePassed(), State.LOST, []),
        (State.LOST, Ended("x"), State.LOST, []),
    ],
)
def test_every_state_with_every_event(state, event, after, effects):
    machine = in_state(state)
    assert machine.handle(event, 0.5) == effects
    assert machine.state is after
    assert bool(machine.reason) == (after is State.LOST)


def look(machine: Liveness, begin: float, end: float, step: float = 0.25):
    """Looks at the clock regularly; what came of it, with its times."""
    seen = []
    count = round((end - begin) / step)
    for number in range(1, count + 1):
        now = begin + number * step
        seen += [(now, effect) for effect in machine.handle(TimePassed(), now)]
    return seen


def test_pings_are_sent_at_their_interval():
    machine = in_state(State.PRESENT)
    assert look(machine, 0, 3.5) == [(1.0, SendPing()), (2.0, SendPing()), (3.0, SendPing())]


def test_silence_is_noticed_at_its_timeout_and_told_once():
    machine = in_state(State.PRESENT)
    losses = [s for s in look(machine, 0, 20) if isinstance(s[1], DeclareLost)]
    assert losses == [(5.25, DeclareLost("no sign of life for 5.2 seconds", by_silence=True))]


def test_a_sign_of_life_begins_the_silence_anew():
    machine = in_state(State.PRESENT)
    look(machine, 0, 4)
    machine.handle(Heard(), 4.0)
    look(machine, 4, 9)
    assert machine.state is State.PRESENT
    look(machine, 9, 9.5)
    assert machine.state is State.LOST


def test_time_in_which_nobody_looked_is_no_silence():
    """This process was stopped for a minute, and then reads what has come meanwhile."""
    machine = in_state(State.PRESENT)
    look(machine, 0, 2)
    assert machine.handle(TimePassed(), 62.0) == [SendPing()]
    assert machine.state is State.PRESENT
    machine.handle(Heard(), 62.1)
    look(machine, 62, 67)
    assert machine.state is State.PRESENT
    look(machine, 67, 68)
    assert machine.state is State.LOST


def test_silence_from_before_such_a_time_still_counts():
    machine = in_state(State.PRESENT)
    look(machine, 0, 4)
    machine.handle(TimePassed(), 6.0)
    look(machine, 6, 7)
    assert machine.state is State.PRESENT
    look(machine, 7, 7.5)
    assert machine.state is State.LOST


def test_what_was_heard_earlier_takes_nothing_from_what_was_heard_last():
    """Of two connections, the one that was heard last has ended."""
    machine = in_state(State.PRESENT)
    machine.handle(Heard(), 4.0)
    machine.handle(Heard(), 1.0)
    look(machine, 0, 9)
    assert machine.state is State.PRESENT


def test_time_in_which_nobody_looked_is_not_forgiven_twice():
    """What came meanwhile was heard before the look: from the look on, silence is silence."""
    machine = in_state(State.PRESENT)
    machine.handle(Heard(), 59.0)
    machine.handle(TimePassed(), 60.0)
    look(machine, 60, 65)
    assert machine.state is State.PRESENT
    look(machine, 65, 65.5)
    assert machine.state is State.LOST


def test_a_return_is_a_fresh_start():
    machine = in_state(State.LOST)
    machine.handle(Connected(), 100.0)
    assert look(machine, 100, 104)[0] == (100.25, SendPing())
    assert machine.state is State.PRESENT
    assert machine.handle(Ended("again"), 104.0) == [DeclareLost("again")]


STEPS = st.lists(
    st.tuples(
        st.sampled_from([Connected(), Heard(), TimePassed(), Ended("a"), Ended("b")]),
        st.floats(0, 10, allow_nan=False),
    ),
    max_size=60,
)


@given(STEPS)
def test_losses_and_returns_take_turns_in_every_history(steps):
    machine = Liveness(INTERVAL, TIMEOUT, 0.0)
    now = 0.0
    is_lost = False
    for event, seconds in steps:
        now += seconds
        before = machine.state
        effects = machine.handle(event, now)
        for effect in effects:
            if isinstance(effect, DeclareLost):
                assert not is_lost, "declared twice without a return"
                is_lost = True
                assert machine.reason == effect.reason
            else:
                assert before is machine.state is State.PRESENT
        if event == Connected():
            is_lost = False
        assert is_lost == (machine.state is State.LOST)
        assert len(effects) <= 1


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=200), st.data())
def test_who_is_heard_within_the_timeout_is_never_lost(gaps, data):
    machine = Liveness(INTERVAL, TIMEOUT, 0.0)
    machine.handle(Connected(), 0.0)
    now = heard = 0.0
    for gap in gaps:
        now += gap
        if now + 1.0 - heard > TIMEOUT or data.draw(st.booleans()):
            machine.handle(Heard(), now)
            heard = now
        machine.handle(TimePassed(), now)
        assert machine.state is State.PRESENT


@given(st.floats(0.01, 1.0))
def test_who_is_silent_is_lost_in_time_however_often_the_clock_is_looked_at(step):
    machine = in_state(State.PRESENT)
    now = 0.0
    while machine.state is State.PRESENT:
        now += step
        machine.handle(TimePassed(), now)
        assert now <= TIMEOUT + 2 * step + 1e-6
    assert now > TIMEOUT


def test_a_connection_that_breaks_after_a_silence_is_no_proof_of_a_death():
    """A cut cable: the network gives the connection up before the heartbeat does."""
    for heard, is_silent in ((0.0, True), (4.0, False)):
        machine = in_state(State.PRESENT)
        for tick in range(1, 9):
            machine.handle(TimePassed(), tick / 2)
        machine.handle(Heard(), heard)
        (loss,) = machine.handle(Ended("it broke", is_break=True), 4.2)
        assert loss.by_silence is is_silent
        assert loss.reason.startswith("it broke")


def test_a_goodbye_after_a_silence_is_a_goodbye():
    machine = in_state(State.PRESENT)
    for tick in range(1, 9):
        machine.handle(TimePassed(), tick / 2)
    assert machine.handle(Ended("it has shut down"), 4.2) == [DeclareLost("it has shut down")]
