"""When a connection looks before it sleeps, and when it leaves that."""

from __future__ import annotations

import itertools

import pytest

from telegrad.transport.same_host import spinning
from telegrad.transport.same_host.spinning import Patience


@pytest.fixture(autouse=True)
def _two_idle_processors(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(spinning, "_processors", lambda: 2)
    monkeypatch.setattr(spinning, "_now", lambda: next(ticks) * 1e-6)
    monkeypatch.setattr(spinning, "_give_way", lambda: None)
    monkeypatch.setattr(spinning, "_retreat", spinning._Retreat())


class Nothing:
    """Something that never comes."""

    looks = 0

    def __call__(self):
        self.looks += 1
        return 0


def test_what_comes_within_the_window_is_found():
    answers = iter([0, 0, 7])
    assert Patience(10.0).look(lambda: next(answers))


def test_a_connection_that_looks_in_vain_rests_for_longer_and_longer():
    patient, nothing = Patience(1e-9), Nothing()
    looked = []
    for _ in range(200):
        before = nothing.looks
        assert not patient.look(nothing)
        looked.append(nothing.looks > before)
    assert all(looked[:4])
    assert sum(looked) < 12


def test_success_restores_trust():
    patient, nothing = Patience(1e-9), Nothing()
    for _ in range(3):
        patient.look(nothing)
    for _ in range(8):
        assert patient.look(lambda: 1)
    for _ in range(7):
        patient.look(nothing)
    assert patient.look(lambda: 1)


def test_one_thread_of_a_process_looks_at_a_time():
    inner = Nothing()

    def outer():
        assert not Patience(1.0).look(inner)
        return 1

    assert Patience(1.0).look(outer)
    assert inner.looks == 0


class Busy:
    """A processor that others use for most of the time, at every look."""

    def __init__(self, monkeypatch, turn):
        self.now = 0.0
        self.used = 0.0
        self.turn = turn
        monkeypatch.setattr(spinning, "_now", lambda: self.now)
        monkeypatch.setattr(spinning, "_used", lambda: self.used)
        monkeypatch.setattr(spinning, "_give_way", self._give_way)

    def _give_way(self):
        self.now += self.turn


def test_time_that_others_had_does_not_count(monkeypatch):
    busy = Busy(monkeypatch, turn=0.9e-3)
    assert Patience(0.5e-3).look(lambda: busy.now > 3e-3)


def test_time_without_others_counts(monkeypatch):
    busy = Busy(monkeypatch, turn=10e-6)
    assert not Patience(0.5e-3).look(lambda: busy.now > 0.6e-3)


def test_looking_ends_however_busy_others_are(monkeypatch):
    busy = Busy(monkeypatch, turn=1e-3)
    assert not Patience(0.5e-3).look(lambda: False)
    assert busy.now <= (spinning._LONGEST + 2) * 0.5e-3


def test_one_thread_does_not_look_for_long_if_another_would_like_to(monkeypatch):
    busy = Busy(monkeypatch, turn=1e-3)

    def is_there():
        Patience(0.5e-3).look(lambda: True)  # as another thread would
        return False

    assert not Patience(0.5e-3).look(is_there)
    assert busy.now == 1e-3


def use(busy, seconds, *, work=0.1e-3):
    """A program that works for a moment and then looks for a message, which has come by the next
    look. Returns what share of its time others had."""
    patient, lost, begun = Patience(0.5e-3), 0.0, busy.now
    while busy.now < begun + seconds:
        before = busy.now
        patient.look(iter([False, True]).__next__)
        lost += busy.now - before
        busy.now += work
        busy.used += work
    return lost / (busy.now - begun)


def is_looking():
    nothing = Nothing()
    Patience(1e-9).look(nothing)
    return nothing.looks > 0


def test_little_time_is_lost_to_programs_that_compute(monkeypatch):
    busy = Busy(monkeypatch, turn=4e-3)
    use(busy, 1.0)
    assert use(busy, 60.0) < 0.04


def test_who_loses_a_slice_now_and_then_keeps_looking(monkeypatch):
    busy = Busy(monkeypatch, turn=4e-3)
    assert use(busy, 10.0, work=40e-3) > 0.08


def test_short_turns_of_others_are_no_loss(monkeypatch):
    busy = Busy(monkeypatch, turn=1.4e-3)
    assert use(busy, 10.0) > 0.9


def test_the_interpreter_that_another_thread_had_is_not_lost_to_programs(monkeypatch):
    busy = Busy(monkeypatch, turn=4e-3)
    for _ in range(100):
        answers = iter([False, True])

        def is_there(answers=answers):
            Patience(0.5e-3).look(lambda: True)  # as another thread would
            return next(answers)

        Patience(0.5e-3).look(is_there)
    assert busy.now > 0.3
    assert is_looking()


def test_nor_that_which_a_thread_had_that_does_not_look(monkeypatch):
    busy = Busy(monkeypatch, turn=4e-3)
    monkeypatch.setattr(spinning, "_used", lambda: busy.now)
    assert use(busy, 10.0) > 0.9


def test_a_process_that_was_stopped_looks_again_at_once(monkeypatch):
    busy = Busy(monkeypatch, turn=0.25)
    for _ in range(3):
        use(busy, 0.3)
        assert is_looking()


def test_a_retreat_is_that_of_the_whole_process(monkeypatch):
    busy = Busy(monkeypatch, turn=4e-3)
    use(busy, 0.03)
    assert not is_looking()
    busy.now += spinning._FIRST_RETREAT
    assert is_looking()


def test_retreats_are_short_again_when_the_programs_have_been_away(monkeypatch):
    busy = Busy(monkeypatch, turn=4e-3)
    use(busy, 60.0)
    busy.now += spinning._LONGEST_RETREAT
    assert is_looking()
    busy.now += spinning._AGAIN * spinning._LONGEST_RETREAT
    use(busy, 0.03)
    assert not is_looking()
    busy.now += spinning._FIRST_RETREAT
    assert is_looking()


def test_nobody_looks_without_a_window_or_a_second_processor(monkeypatch):
    nothing = Nothing()
    assert not Patience(0.0).look(nothing)
    monkeypatch.setattr(spinning, "_processors", lambda: 1)
    assert not Patience(1.0).look(nothing)
    assert nothing.looks == 0
