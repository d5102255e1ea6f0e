"""Moving off the processor from which a busy worker serves."""

from __future__ import annotations

import os
import threading

import pytest

from telegrad.transport.same_host import processors

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="threads cannot be moved on this system"
)


@pytest.fixture(autouse=True)
def _rested(monkeypatch):
    monkeypatch.setattr(processors, "_last_move", 0.0)


@pytest.fixture
def two():
    """Two processors that this thread may run on, and no others."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("there is one processor only")
    chosen = set(sorted(allowed)[:2])
    os.sched_setaffinity(0, chosen)
    yield sorted(chosen)
    os.sched_setaffinity(0, allowed)


@pytest.fixture
def told(monkeypatch):
    """What is asked of the system, which does nothing."""
    asked = []
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda who: {0, 1, 2})
    monkeypatch.setattr(processors.os, "sched_setaffinity", lambda who, to: asked.append(to))
    return asked


def test_here_is_where_a_thread_is_tied_to(two):
    for processor in two:
        os.sched_setaffinity(0, {processor})
        assert processors.here() == processor


def test_who_leaves_a_processor_runs_on_another_and_may_run_on_all(two, monkeypatch):
    tie, found = os.sched_setaffinity, []

    def tie_and_look(who, to):
        tie(who, to)
        found.append(processors.here())

    monkeypatch.setattr(processors.os, "sched_setaffinity", tie_and_look)
    for here, there in (two, two[::-1]):
        found.clear()
        monkeypatch.setattr(processors, "_last_move", 0.0)
        assert processors.leave(here)
        assert found[0] == there  # then the system may move it again
        assert os.sched_getaffinity(0) == set(two)


def test_the_way_leads_over_the_other_processors(told):
    assert processors.leave(1)
    assert told == [{0, 2}, {0, 1, 2}]


def test_only_this_thread_moves(two):
    begun, over = threading.Event(), threading.Event()
    found = []

    def other():
        os.sched_setaffinity(0, {two[0]})
        begun.set()
        assert over.wait(20)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(20)
    assert processors.leave(two[0])
    over.set()
    thread.join()
    assert found == [{two[0]}]


def test_who_may_run_on_one_processor_only_stays(two):
    os.sched_setaffinity(0, {two[0]})
    assert not processors.leave(two[0])
    assert os.sched_getaffinity(0) == {two[0]}


def test_there_is_a_pause_between_two_moves(told, monkeypatch):
    times = iter([100.0, 100.009, 100.011])
    monkeypatch.setattr(processors.time, "monotonic", lambda: next(times))
    assert [processors.leave(0) for _ in range(3)] == [True, False, True]
    assert len(told) == 4


@pytest.mark.parametrize("failing", [0, 1])
def test_processors_that_the_system_takes_away_are_no_error(failing, monkeypatch):
    asked = []

    def refuse(who, to):
        asked.append(to)
        if len(asked) == failing + 1:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda who: {0, 1})
    monkeypatch.setattr(processors.os, "sched_setaffinity", refuse)
    assert not processors.leave(0)
    assert asked == [{1}, {0, 1}]


def test_ctrl_c_in_between_leaves_nobody_tied(monkeypatch):
    asked = []

    def interrupted(who, to):
        asked.append(to)
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda who: {0, 1})
    monkeypatch.setattr(processors.os, "sched_setaffinity", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processors.leave(1)
    assert asked == [{0}, {0, 1}]


def test_a_system_that_cannot_move_threads_does_not(monkeypatch):
    monkeypatch.delattr(processors.os, "sched_setaffinity")
    assert not processors.leave(0)
