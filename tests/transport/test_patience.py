"""When a connection looks before it sleeps, and when it leaves that."""

from __future__ import annotations

import itertools

import pytest

from telegrad.transport import patience
from telegrad.transport.patience import Patience


@pytest.fixture(autouse=True)
def _two_idle_processors(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(patience, "_processors", lambda: 2)
    monkeypatch.setattr(patience, "_now", lambda: next(ticks) * 1e-6)
    monkeypatch.setattr(patience, "_give_way", lambda: None)
    monkeypatch.setattr(patience, "_retreat", patience._Retreat())


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
        self.turn = turn
        monkeypatch.setattr(patience, "_now", lambda: self.now)
        monkeypatch.setattr(patience, "_give_way", self._give_way)

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
    assert busy.now <= (patience._LONGEST + 2) * 0.5e-3


def test_one_thread_does_not_look_for_long_if_another_would_like_to(monkeypatch):
    busy = Busy(monkeypatch, turn=1e-3)

    def is_there():
        Patience(0.5e-3).look(lambda: True)  # as another thread would
        return False

    assert not Patience(0.5e-3).look(is_there)
    assert busy.now == 1e-3


def test_a_process_that_has_lost_a_slice_does_not_look_for_a_while(monkeypatch):
    busy = Busy(monkeypatch, turn=4e-3)
    assert not Patience(0.5e-3).look(lambda: False)
    assert busy.now == 4e-3
    another, nothing = Patience(0.5e-3), Nothing()
    assert not another.look(nothing)
    assert nothing.looks == 0
    busy.now += patience._FIRST_RETREAT
    assert another.look(lambda: True)


def time_that_others_had(busy, seconds):
    """So many seconds of a program that works for 0.1 ms and then waits for a message."""
    patient, lost, end = Patience(0.5e-3), 0.0, busy.now + seconds
    while busy.now < end:
        before = busy.now
        patient.look(iter([False, True]).__next__)
        lost += busy.now - before
        busy.now += 0.1e-3
    return lost


def test_little_time_is_lost_to_programs_that_compute(monkeypatch):
    busy = Busy(monkeypatch, turn=4e-3)
    time_that_others_had(busy, 5.0)
    assert time_that_others_had(busy, 60.0) < 0.6


def test_looking_begins_anew_when_they_have_gone(monkeypatch):
    busy = Busy(monkeypatch, turn=4e-3)
    time_that_others_had(busy, 60.0)
    busy.now += patience._LONGEST_RETREAT
    assert Patience(0.5e-3).look(lambda: True)
    busy.now += patience._AGAIN * patience._LONGEST_RETREAT
    assert not Patience(0.5e-3).look(lambda: False)
    busy.now += patience._FIRST_RETREAT
    assert Patience(0.5e-3).look(lambda: True)


def test_nobody_looks_without_a_window_or_a_second_processor(monkeypatch):
    nothing = Nothing()
    assert not Patience(0.0).look(nothing)
    monkeypatch.setattr(patience, "_processors", lambda: 1)
    assert not Patience(1.0).look(nothing)
    assert nothing.looks == 0
