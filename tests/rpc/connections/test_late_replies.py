"""Lanes on which a reply is awaited by nobody, by fake ones."""

from __future__ import annotations

import types

import pytest

from telegrad.rpc.connections import late_replies
from telegrad.rpc.connections.late_replies import LateReplies
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
        self.open, self.discarded, self.idle, self.handed = set(), [], [], []
        self.late = LateReplies(
            self.open.__contains__, self.discarded.append, self.idle.append, self.handed.append
        )

    def lane(self, number=1):
        lane = Lane()
        self.open.add(lane)
        self.late.keep(lane, number)
        return lane


@pytest.fixture
def peer():
    return Peer()


def test_a_reply_is_handed_over_when_it_comes_and_its_lane_is_used_again(peer):
    lane = peer.lane(number=7)
    peer.late.look()
    assert not peer.handed
    lane.frames = [5, 7]  # the first is of an earlier call
    peer.late.look()
    (receive,) = peer.handed
    assert not peer.idle
    assert receive().call_id == 7
    assert peer.idle == [lane]
    assert len(peer.late) == 0


def test_a_lane_that_ends_is_given_up(peer):
    broken, half, ended = peer.lane(), peer.lane(), peer.lane()
    broken.is_broken = True
    half.frames = [2]
    peer.open.discard(ended)
    peer.late.look()
    (receive,) = peer.handed
    assert receive() is None
    assert peer.discarded == [broken, half]
    assert ended.is_closed
    assert len(peer.late) == 0


def test_a_lane_that_has_ended_before_is_not_kept(peer):
    lane = Lane()
    peer.late.keep(lane, 1)
    assert lane.is_closed
    assert len(peer.late) == 0


def test_there_are_not_ever_more_of_them(peer, monkeypatch):
    monkeypatch.setattr(late_replies, "_MOST", 3)
    lanes = [peer.lane() for _ in range(5)]
    assert peer.discarded == lanes[:2]
    assert peer.late.give_up() == set(lanes[2:])
    assert len(peer.late) == 0
