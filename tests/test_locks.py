"""Critical sections that a destructor may interrupt."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
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
        with pytest.raises(TelegradError, match="a table cannot be used by a destructor"):
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


PAGE = pathlib.Path(__file__).parents[1] / "docs" / "explanation" / "architecture.md"


def test_locks_are_nested_as_the_architecture_page_says():
    program = pathlib.Path(__file__).with_name("lock_program.py")
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {tuple(line.split()) for line in done.stdout.splitlines()}
    text = PAGE.read_text(encoding="utf-8")
    allowed = set(re.findall(r"^- `(\S+)` → `(\S+)`", text, re.MULTILINE))
    assert len(allowed) >= 4
    assert ("rpc/api", "rpc/group/members") in found  # it has seen something
    wrong = {pair for pair in found if pair not in allowed and pair[0] != "rpc/api"}
    assert not wrong
