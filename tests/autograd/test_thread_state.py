"""Values of a thread, in Python's own state or in torch's."""

from __future__ import annotations

import functools
import threading

import pytest

from telegrad.autograd import thread_state
from telegrad.autograd.thread_state import carry, drop, peek, stash

PATIENCE = 10.0
KEY = "telegrad.test"


@pytest.fixture(autouse=True)
def as_new(monkeypatch):
    """Nothing has been carried in this process yet, and there is no device."""
    for name in ("_is_anything_carried", "_is_plain"):
        monkeypatch.setattr(thread_state, name, False)
    monkeypatch.setattr(thread_state, "_has_device_threads", lambda: False)
    monkeypatch.setattr(thread_state, "_local", threading.local())


def elsewhere(function):
    """What a function returns on a thread of its own."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(PATIENCE)
    return results[0]


def test_a_value_is_of_its_thread():
    assert peek(KEY, "none") == "none"
    stash(KEY, "mine")
    assert peek(KEY, "none") == "mine"
    assert elsewhere(lambda: peek(KEY, "none")) == "none"
    assert thread_state._is_plain


def test_what_is_carried_is_in_torchs_state_until_it_is_dropped():
    stash(KEY, "mine")
    assert carry(KEY)
    try:
        assert not carry(KEY)  # it is there already
        assert peek(KEY, "none") == "mine"
        stash(KEY, "changed")
        assert peek(KEY, "none") == "changed"
    finally:
        drop(KEY)
    assert peek(KEY, "none") == "mine"  # what the function has set was its own


def test_once_something_was_carried_it_is_never_plain_again():
    stash(KEY, "mine")
    assert carry(KEY)
    drop(KEY)
    stash(KEY, "again")
    assert not thread_state._is_plain
    assert peek(KEY, "none") == "again"


def test_a_thread_that_settles_late_does_not_undo_a_carry(monkeypatch):
    """It has found that nothing was carried, and is held up before it says so."""
    stash(KEY, "mine")
    settling, carried = threading.Event(), threading.Event()

    def is_held_up():
        if threading.current_thread() is late:
            settling.set()
            carried.wait(0.2)  # as long as the lock is held, that cannot be
        return False

    late = threading.Thread(target=thread_state._settle)
    monkeypatch.setattr(thread_state, "_has_device_threads", is_held_up)
    late.start()
    assert settling.wait(PATIENCE)
    assert carry(KEY)
    carried.set()
    drop(KEY)
    late.join(PATIENCE)
    assert not thread_state._is_plain


def test_with_a_device_all_is_in_torchs_state(monkeypatch):
    monkeypatch.setattr(thread_state, "_has_device_threads", lambda: True)
    monkeypatch.setattr(thread_state, "wait_at_exit", functools.cache(lambda: None))
    monkeypatch.setattr(thread_state, "_used_by", set())

    def use():
        assert peek(KEY, "none") == "none"
        stash(KEY, "mine")
        assert not carry(KEY)
        seen = peek(KEY, "none")
        drop(KEY)
        return seen, set(thread_state._used_by) == {threading.get_native_id()}

    assert elsewhere(use) == ("mine", True)
