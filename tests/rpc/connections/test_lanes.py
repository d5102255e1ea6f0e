"""Lanes whose reply no thread waits for any more, by fake ones."""

from __future__ import annotations

import types

import pytest

from telegrad.rpc.connections import lanes as module
from telegrad.rpc.connections.lanes import Lanes
from telegrad.transport.base import ConnectionClosed


class Lane:
    def __init__(self):
        self.frames = []
        self.is_closed = self.is_broken = False

    def set_timeout(self, seconds):
        assert seconds > 0

    def poll(self):
        if self.is_broken:
            raise ConnectionClosed("broken")
        return bool(self.frames)

    def receive(self):
        if not self.frames:
            raise ConnectionClosed("ended in the middle")
        return types.SimpleNamespace(call_id=self.frames.pop(0))

    def close(self):
        self.is_closed = True


class Peer:
    def __init__(self):
        self.open, self.handed = set(), []
        self.is_open, self.remove = self.open.__contains__, self.open.discard
        self.lanes = Lanes(self, None, self.handed.append)

    def lane(self, number=1):
        lane = Lane()
        self.open.add(lane)
        self.lanes.give_up(lane, number)
        return lane


@pytest.fixture
def peer():
    return Peer()


def test_a_reply_is_handed_over_when_it_comes_and_its_lane_is_used_again(peer):
    lane = peer.lane(number=7)
    peer.lanes.look(0.0)
    assert not peer.handed
    lane.frames = [5, 7]  # the first is of an earlier call
    peer.lanes.look(0.0)
    (receive,) = peer.handed
    assert not peer.lanes._idle
    assert receive().call_id == 7
    assert peer.lanes._idle == [lane]
    assert peer.lanes.given_up_count == 0


def test_a_lane_that_ends_is_given_up(peer):
    broken, half, ended = peer.lane(), peer.lane(), peer.lane()
    broken.is_broken = True
    half.frames = [2]
    peer.open.discard(ended)
    peer.lanes.look(0.0)
    (receive,) = peer.handed
    assert receive() is None
    assert not peer.open
    assert broken.is_closed
    assert half.is_closed
    assert ended.is_closed
    assert peer.lanes.given_up_count == 0


def test_a_lane_that_has_ended_before_is_not_kept(peer):
    lane = Lane()
    peer.lanes.give_up(lane, 1)
    assert lane.is_closed
    assert peer.lanes.given_up_count == 0


def test_there_are_not_ever_more_of_them(peer, monkeypatch):
    monkeypatch.setattr(module, "_MOST_GIVEN_UP", 3)
    lanes = [peer.lane() for _ in range(5)]
    assert [lane.is_closed for lane in lanes] == [True] * 2 + [False] * 3
    assert peer.lanes.end() == set(lanes[2:])
    assert peer.lanes.given_up_count == 0
