"""Who is sent away from a worker's door."""

from __future__ import annotations

import collections

import pytest

from telegrad.rpc.connections.acceptor import Acceptor, _Pending
from telegrad.rpc.group.worker_info import WorkerInfo


class Knocking:
    """A connection that has not said anything yet."""

    def __init__(self):
        self.is_sent_away = False

    def interrupt(self):
        self.is_sent_away = True


class Crowd(collections.deque):
    """Of which the first one proves itself just when somebody has looked at it."""

    def __getitem__(self, index):
        first = super().__getitem__(index)
        self.remove(first)
        return first

    def __iter__(self):
        strangers = list(super().__iter__())
        self.remove(strangers[0])
        return iter(strangers)


@pytest.fixture
def door():
    info = WorkerInfo("worker0", 0)
    return Acceptor(info, bytes(16), b"key", lambda _: None, lambda *_: None, lambda *_: None)


def test_those_go_that_have_been_silent_for_too_long(door):
    old, young = Knocking(), Knocking()
    door._pending += [_Pending(old, 0.0), _Pending(young, 4.0)]
    door.tick(5.5)
    assert (old.is_sent_away, young.is_sent_away) == (True, False)
    door.tick(9.5)
    assert young.is_sent_away


def test_nobody_goes_in_the_place_of_one_that_has_just_proved_itself(door):
    friend, young = Knocking(), Knocking()
    door._pending = Crowd([_Pending(friend, 0.0), _Pending(young, 4.0)])
    door.tick(5.5)
    assert not friend.is_sent_away
    assert not young.is_sent_away
