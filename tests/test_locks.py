"""Critical sections that a destructor may interrupt."""

from __future__ import annotations

import threading

import pytest

from telegrad.errors import TelegradError
from telegrad.locks import Turns

PATIENCE = 10.0


def test_a_step_taken_inside_of_another_follows_it():
    turns, done = Turns("a table"), []

    def outer():
        turns.take(lambda: done.append("inner"))
        done.append("outer")

    turns.take(outer)
    assert done == ["outer", "inner"]


def test_nobody_waits_for_a_step_on_another_thread_and_it_is_not_forgotten():
    turns, done = Turns("a table"), []
    is_inside, go_on = threading.Event(), threading.Event()

    def long():
        is_inside.set()
        assert go_on.wait(PATIENCE)
        done.append("long")

    thread = threading.Thread(target=turns.take, args=(long,))
    thread.start()
    assert is_inside.wait(PATIENCE)
    turns.take(lambda: done.append("left"))
    assert done == []
    go_on.set()
    thread.join()
    assert done == ["long", "left"]


def test_what_follows_a_step_runs_outside_of_it():
    turns, seen = Turns("a table"), []
    turns.take(lambda: lambda: seen.append(turns.exclusively(lambda: "free")))
    assert seen == ["free"]


def test_a_look_sees_all_that_was_taken_before():
    turns, done = Turns("a table"), []

    def outer():
        turns.take(lambda: done.append("inner"))
        done.append("outer")

    turns.take(outer)
    assert turns.exclusively(lambda: list(done)) == ["outer", "inner"]


def test_a_look_inside_of_a_step_is_refused():
    turns = Turns("a table")

    def step():
        with pytest.raises(TelegradError, match="a table cannot be asked by a destructor"):
            turns.exclusively(lambda: None)

    turns.take(step)
    turns.exclusively(lambda: None)


def test_a_step_that_fails_keeps_nobody_out():
    turns, done = Turns("a table"), []
    with pytest.raises(ZeroDivisionError):
        turns.take(lambda: 1 / 0)
    turns.take(lambda: done.append("next"))
    assert done == ["next"]


def test_many_threads_lose_no_step():
    turns = Turns("a table")
    count = 0

    def step():
        nonlocal count
        count += 1

    threads = [
        threading.Thread(target=lambda: [turns.take(step) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert turns.exclusively(lambda: count) == 8000
