"""The threads that run asynchronous calls."""

from __future__ import annotations

import logging
import math
import threading
import time

import pytest

from telegrad.rpc.connections import thread_pool
from telegrad.rpc.connections.thread_pool import DEEPEST, CallPools, WorkPool

PATIENCE = 10.0


@pytest.fixture
def pool():
    made = WorkPool("test", 2, lambda: None)
    yield made
    made.close(PATIENCE)


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def no_thread(*_):
    raise RuntimeError("can't start new thread")  # as the system's refusal is told


def test_tasks_run_and_the_pool_is_idle_again(pool):
    ran = []
    for number in range(100):
        pool.submit(lambda number=number: ran.append(number))
    until(lambda: pool.is_idle)
    assert sorted(ran) == list(range(100))
    assert len(pool._threads) <= 2


def test_one_thread_is_enough_for_tasks_one_after_another(pool):
    for _ in range(20):
        pool.submit(lambda: None)
        until(lambda: pool.is_idle)
    assert len(pool._threads) == 1


def test_threads_are_bound_before_their_first_task():
    bound = threading.local()
    pool = WorkPool("test", 2, lambda: setattr(bound, "yes", True))
    seen = []
    done = threading.Event()
    pool.submit(lambda: (seen.append(bound.yes), done.set()))
    assert done.wait(PATIENCE)
    assert seen == [True]
    pool.close(PATIENCE)


def test_blocked_threads_are_joined_by_more_at_the_next_ticks(pool):
    """Forty tasks that all wait for each other, and two threads."""
    together = threading.Barrier(40)
    ended = threading.Semaphore(0)

    def task():
        together.wait(PATIENCE)
        ended.release()

    for _ in range(40):
        pool.submit(task)
    for _ in range(40):
        end = time.monotonic() + PATIENCE
        while not ended.acquire(timeout=0.005):
            pool.tick()
            assert time.monotonic() < end


def still_ticks(pool, count=thread_pool._STILL_TICKS):
    for _ in range(count):
        pool.tick()


def test_a_pool_grows_to_its_limit_and_beyond_it_one_by_one(caplog, monkeypatch):
    monkeypatch.setattr(thread_pool, "_BUSY", math.inf)  # the test itself computes
    pool = WorkPool("test", 2, lambda: None, most=6)
    release, last = threading.Event(), threading.Event()
    for _ in range(8):
        pool.submit(lambda: release.wait(PATIENCE))
    pool.submit(last.set)
    until(lambda: pool._started == 2)
    pool.tick()
    while pool._started < 6:
        begun = pool._started
        still_ticks(pool)
        until(lambda begun=begun: pool._started > begun)
        pool.tick()
    pool.tick()
    still_ticks(pool)
    assert len(pool._threads) == 6
    assert not caplog.records
    still_ticks(pool, thread_pool._STUCK_TICKS)
    until(lambda: pool._started == 7)
    assert "6 calls are blocked and 3 wait" in caplog.text
    release.set()
    assert last.wait(PATIENCE)
    pool.close(PATIENCE)


def test_a_pool_whose_process_computes_is_not_taken_to_be_blocked(pool):
    release = threading.Event()
    for _ in range(4):
        pool.submit(lambda: release.wait(PATIENCE))
    until(lambda: pool._started == 2)
    pool.tick()
    still_ticks(pool)  # as fast as can be
    assert len(pool._threads) == 2
    release.set()


def test_calls_of_one_depth_do_not_keep_those_of_another():
    pools = CallPools("test", 1, lambda: None, most=1)
    pools.start()
    done = threading.Event()
    waited = []

    def nested(depth):
        if depth > DEEPEST + 3:
            done.set()
        else:
            pools.submit(min(depth, DEEPEST), lambda: nested(depth + 1))
            waited.append(done.wait(PATIENCE))

    pools.submit(0, lambda: nested(1))
    end = time.monotonic() + PATIENCE
    while not done.wait(0.005):
        pools.tick()
        assert time.monotonic() < end
    until(lambda: len(waited) == DEEPEST + 3)
    assert all(waited)
    pools.close(PATIENCE)


def test_a_busy_pool_does_not_grow_while_it_moves(pool):
    released = threading.Semaphore(0)
    for _ in range(20):
        pool.submit(lambda: released.acquire(timeout=PATIENCE))
    until(lambda: pool._started == 2)  # or else it does not move yet
    pool.tick()
    for _ in range(10):
        begun = pool._started
        released.release()
        until(lambda begun=begun: pool._started > begun)
        pool.tick()
    assert len(pool._threads) == 2
    for _ in range(20):
        released.release()


def test_a_failing_task_ends_itself_only(pool, caplog):
    done = threading.Event()
    pool.submit(lambda: 1 / 0)
    pool.submit(done.set)
    assert done.wait(PATIENCE)
    until(lambda: pool.is_idle)
    assert "a task failed outside its call" in caplog.text


def test_threads_but_one_go_away_when_there_is_nothing_to_do(monkeypatch):
    monkeypatch.setattr(thread_pool, "_IDLE_SECONDS", 0.02)
    pool = WorkPool("test", 2, lambda: None)
    together = threading.Barrier(2)
    for _ in range(2):
        pool.submit(lambda: together.wait(PATIENCE))
    until(lambda: len(pool._threads) == 2)
    until(lambda: len(pool._threads) == 1)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(PATIENCE)
    pool.close(PATIENCE)


def test_tasks_wait_while_the_system_gives_no_thread(pool, monkeypatch, caplog):
    done = threading.Event()
    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", no_thread)
        pool.submit(done.set)
        pool.tick()
        pool.tick()
        assert not pool._threads
    assert [record.getMessage() for record in caplog.records] == [
        "test: calls wait for a thread to run on: can't start new thread"
    ]
    pool.tick()
    assert done.wait(PATIENCE)
    until(lambda: pool.is_idle)


def test_the_thread_that_stays_runs_tasks_when_the_system_gives_no_other(pool, monkeypatch):
    pool.start()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    ran = []
    for number in range(20):
        pool.submit(lambda number=number: ran.append(number))
    until(lambda: pool.is_idle)
    assert ran == list(range(20))


def test_arguments_die_with_their_task(pool):
    class Argument:
        pass

    import weakref

    argument = Argument()
    gone = weakref.ref(argument)
    pool.submit(lambda argument=argument: None)
    del argument
    until(lambda: gone() is None)


def test_closing_names_a_task_that_does_not_end(caplog):
    pool = WorkPool("test", 2, lambda: None)
    release = threading.Event()
    pool.submit(lambda: release.wait(PATIENCE))
    until(lambda: pool._started == 1)
    with caplog.at_level(logging.WARNING):
        pool.close(0.01)
    assert "still running on test-call-0" in caplog.text
    release.set()


def test_a_closed_pool_starts_nothing(pool):
    pool.close(PATIENCE)
    pool.tick()
    assert not pool._threads


def test_a_task_that_comes_too_late_is_done_all_the_same():
    threads = []
    pool = WorkPool("test", 2, lambda: threads.append(threading.current_thread()))
    pool.start()
    pool.close(PATIENCE)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(PATIENCE)
    assert threads[-1].name == "test-late-call"  # bound like any other
    threads[-1].join()


def test_also_if_there_is_no_thread_for_it(pool, monkeypatch, caplog):
    pool.close(PATIENCE)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    done = []
    pool.submit(lambda: done.append(threading.current_thread()))
    assert done == [threading.current_thread()]
    with caplog.at_level(logging.ERROR):
        pool.submit(lambda: 1 / 0)
    assert "a task failed outside its call" in caplog.text


def test_a_pool_that_has_fallen_silent_does_nothing_any_more(pool):
    pool.start()
    ran = []
    pool.submit(lambda: ran.append("before"))
    until(lambda: pool.is_idle)
    pool.fall_silent(PATIENCE)
    before = threading.active_count()
    pool.submit(lambda: ran.append("after"))
    assert threading.active_count() == before
    assert ran == ["before"]


def test_draining_gives_every_task_a_thread(pool):
    """The first ones wait for the last, and no clock ticks."""
    release = threading.Event()
    for _ in range(5):
        pool.submit(lambda: release.wait(2 * PATIENCE))
    pool.submit(release.set)
    pool.drain(PATIENCE)
    assert pool._backlog == 0
    assert release.wait(PATIENCE)


def test_draining_ends_by_its_timeout(pool, monkeypatch):
    release = threading.Event()
    pool.submit(lambda: release.wait(PATIENCE))
    until(lambda: pool._started == 1)
    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", no_thread)
        pool.submit(lambda: None)
        pool.drain(0.05)
        assert pool._backlog == 1
    release.set()
