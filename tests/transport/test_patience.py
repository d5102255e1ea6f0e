"""When a connection looks before it sleeps, and when it leaves that."""

from __future__ import annotations

import pytest

from telegrad.transport import patience
from telegrad.transport.patience import Patience


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch):
    monkeypatch.setattr(patience, "_processors", lambda: 2)


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


def test_nobody_looks_without_a_window_or_a_second_processor(monkeypatch):
    nothing = Nothing()
    assert not Patience(0.0).look(nothing)
    monkeypatch.setattr(patience, "_processors", lambda: 1)
    assert not Patience(1.0).look(nothing)
    assert nothing.looks == 0
