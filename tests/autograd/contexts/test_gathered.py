"""Ids that are kept for a moment, to be sent together."""

from __future__ import annotations

from telegrad.autograd.contexts.gathered import Gathered, ids_in
from telegrad.wire.frames import Kind


class Messenger:
    def __init__(self):
        self.planned, self.cancelled, self.posted = [], [], []

    def call_later(self, seconds, callback):
        self.planned.append(callback)
        return self

    def cancel(self):
        self.cancelled.append(True)

    def run_aside(self, work):
        work()

    def post(self, worker, kind, body):
        self.posted.append((worker, list(ids_in(body))))


def gathered(messenger):
    return Gathered(messenger, Kind.CONTEXT_RELEASE, 1.0, lambda worker, ids: None)


def test_ids_are_sent_together_when_their_time_is_up():
    messenger = Messenger()
    ids = gathered(messenger)
    for worker, id_ in ((1, 5), (2, 6), (1, 7)):
        ids.add(worker, id_)
    (time_is_up,) = messenger.planned
    time_is_up()
    assert messenger.posted == [(1, [5, 7]), (2, [6])]
    ids.add(1, 8)
    assert len(messenger.planned) == 2


def test_what_has_been_taken_is_not_sent_again():
    messenger = Messenger()
    ids = gathered(messenger)
    ids.add(1, 5)
    assert list(ids_in(ids.take(1))) == [5]
    assert ids.take(1) is None
    messenger.planned.pop()()
    assert not messenger.posted
    ids.add(1, 6)
    assert messenger.planned


def test_nothing_is_planned_after_the_end():
    messenger = Messenger()
    ids = gathered(messenger)
    ids.add(1, 5)
    ids.close()
    assert messenger.cancelled
    ids.send()
    assert not messenger.posted
