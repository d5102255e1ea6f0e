"""When a connection spins before it sleeps, and when it stops doing so."""

from __future__ import annotations

import itertools

import pytest

from telegrad.transport.same_host import spinning
from telegrad.transport.same_host.spinning import Spinner

WINDOW = 0.5e-3


class Clock:
    def __init__(self):
        self.now = 0.0
        self.turn = 1e-6  # how long others run at each look

    def give_way(self):
        self.now += self.turn


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(spinning, "_processors", lambda: 2)
    monkeypatch.setattr(spinning, "_now", lambda: made.now)
    monkeypatch.setattr(spinning, "_yield", made.give_way)
    return made


class Nothing:
    """Something that never comes."""

    looks = 0

    def __call__(self):
        self.looks += 1
        return 0


def spins(spinner):
    nothing = Nothing()
    assert not spinner.spin(nothing)
    return nothing.looks > 0


def test_what_comes_within_the_window_is_found():
    answers = iter([0, 0, 7])
    assert Spinner(WINDOW).spin(lambda: next(answers))


def test_what_comes_after_the_window_is_not_found(clock):
    assert not Spinner(WINDOW).spin(lambda: clock.now > 1.2 * WINDOW)
    assert clock.now < 1.1 * WINDOW


def test_a_connection_that_spins_in_vain_skips_more_and_more_waits():
    spinner = Spinner(WINDOW)
    spun = [number for number in range(2000) if spins(spinner)]
    skipped = [after - before - 1 for before, after in itertools.pairwise(spun)]
    assert skipped[:5] == [1, 3, 7, 15, 31]
    assert max(skipped) == 512


def test_success_restores_trust():
    spinner = Spinner(WINDOW)
    for _ in range(200):
        spins(spinner)
    while not spinner.spin(lambda: 1):
        pass
    for _ in range(10):
        assert spinner.spin(lambda: 1)
    spins(spinner)
    assert not spinner.spin(lambda: 1)  # skips one wait
    assert spinner.spin(lambda: 1)


def test_a_busy_processor_is_left_to_other_programs(clock):
    clock.turn = 8 * WINDOW
    spinner = Spinner(WINDOW)
    assert sum(spins(spinner) for _ in range(9)) == 1
    assert clock.now == 8 * WINDOW


def test_one_thread_of_a_process_spins_at_a_time():
    inner = Nothing()

    def outer():
        assert not Spinner(1.0).spin(inner)
        return 1

    assert Spinner(1.0).spin(outer)
    assert inner.looks == 0


def test_there_is_no_spinning_without_a_window_or_a_second_processor(monkeypatch):
    assert not spins(Spinner(0.0))
    monkeypatch.setattr(spinning, "_processors", lambda: 1)
    assert not spins(Spinner(1.0))
