"""Answers that come in the segment that their request went in."""

from __future__ import annotations

import random
import sys
import threading
import time

import pytest
from memory_pair import LARGE, borrowing, segment_descriptor, sharing

from telegrad.errors import ProtocolError
from telegrad.transport.base import TransportTimeout
from telegrad.transport.same_host import shm
from telegrad.transport.same_host.shm import SHARE_FROM
from telegrad.wire.frames import Kind


@pytest.fixture
def pair():
    with sharing() as made:
        yield made


def request(pair, content):
    """A request that is being served: its buffer and its loan, held."""
    pair.ends[0].send(Kind.CALL, buffers=[memoryview(content)])
    frame = pair.ends[1].receive()
    (loan,) = frame.loans
    loan.hold()
    return frame.buffers, loan


def answer(pair, content):
    pair.ends[1].send(Kind.REPLY, buffers=[memoryview(content)])


def answered(pair, content):
    answer(pair, content)
    return pair.ends[0].receive().buffers


def states(memory):
    return [segment.mapping[0] for segment in memory._own.values()]


def test_an_answer_takes_the_segment_of_its_request(pair):
    for number in range(20):
        buffers, loan = request(pair, b"q" * LARGE)
        buffers.clear()
        content = bytes([number]) * (LARGE - number)
        (buffer,) = answered(pair, content)
        loan.end()
        assert bytes(buffer) == content
        assert states(pair.lender) == [shm._KEPT]
        del buffer
        assert states(pair.lender) == [shm._FREE]
    assert not pair.borrower._own
    assert not pair.borrower._spares


def test_what_came_back_is_not_touched_while_it_is_in_use(pair):
    buffers, loan = request(pair, b"q" * LARGE)
    buffers.clear()
    kept = answered(pair, b"k" * LARGE)
    loan.end()
    for _ in range(5):
        buffers, loan = request(pair, b"x" * LARGE)
        buffers.clear()
        answered(pair, b"y" * LARGE)
        loan.end()
    assert bytes(kept[0]) == b"k" * LARGE
    assert len(pair.lender._own) == 2
    pair.lender.trim(time.monotonic() + 100)
    assert bytes(kept[0]) == b"k" * LARGE


@pytest.mark.parametrize("why", ["in use", "not held", "too small", "too large"])
def test_an_answer_has_a_segment_of_its_own_if_the_other_is(pair, why):
    buffers, loan = request(pair, b"q" * LARGE)
    content = b"a" * LARGE
    if why != "in use":
        buffers.clear()
    if why == "not held":
        loan.end()
    elif why == "too small":
        content = b"a" * (2 * LARGE)
    elif why == "too large":
        content = b"a" * (LARGE // 8)
    (buffer,) = answered(pair, content)
    assert bytes(buffer) == content
    assert len(pair.borrower._own) == 1
    if buffers:
        assert bytes(buffers[0]) == b"q" * LARGE
        buffers.clear()
    loan.end()
    assert states(pair.lender) == [shm._FREE]
    assert not pair.borrower._spares


def test_a_segment_that_carries_no_answer_is_given_back(pair):
    buffers, loan = request(pair, b"q" * LARGE)
    buffers.clear()
    assert states(pair.lender) == [shm._LENT]
    loan.end()
    assert states(pair.lender) == [shm._FREE]
    buffers, loan = request(pair, b"q" * LARGE)
    loan.end()
    assert states(pair.lender) == [shm._LENT]
    buffers.clear()
    assert states(pair.lender) == [shm._FREE]
    assert not pair.borrower._spares


def test_several_answers_share_what_there_is(pair):
    pair.ends[0].send(Kind.CALL, buffers=[memoryview(b"q" * LARGE)] * 3)
    frame = pair.ends[1].receive()
    for loan in frame.loans:
        loan.hold()
    frame.buffers.clear()
    contents = [bytes([number]) * LARGE for number in range(5)]
    pair.ends[1].send(Kind.REPLY, buffers=[memoryview(content) for content in contents])
    came = pair.ends[0].receive().buffers
    assert [bytes(buffer) for buffer in came] == contents
    assert states(pair.lender) == [shm._KEPT] * 3
    assert states(pair.borrower) == [shm._LENT] * 2
    came.clear()
    assert states(pair.lender) == [shm._FREE] * 3
    assert states(pair.borrower) == [shm._FREE] * 2


def lose_an_answer(pair):
    """It has left, and then the connection has ended before anybody has read it."""
    buffers, loan = request(pair, b"q" * LARGE)
    buffers.clear()
    answer(pair, b"a" * LARGE)
    loan.end()
    assert states(pair.lender) == [shm._HANDED]
    pair.ends[1].close()
    assert states(pair.lender) == [shm._LOST]


def test_a_lost_answer_does_not_keep_its_segment(pair):
    lose_an_answer(pair)
    now = time.monotonic()
    pair.lender.trim(now)
    assert states(pair.lender) == [shm._LOST]  # it may just be on its way
    pair.lender.trim(now + 10)
    assert not pair.lender._own
    pair.borrower.trim(now + 10)
    assert not pair.borrower._theirs


def test_an_answer_is_received_though_its_sender_has_left(pair):
    lose_an_answer(pair)
    now = time.monotonic()
    pair.lender.trim(now)
    (buffer,) = pair.ends[0].receive().buffers
    pair.lender.trim(now + 10)
    pair.lender.trim(now + 20)
    assert bytes(buffer) == b"a" * LARGE
    del buffer
    assert states(pair.lender) == [shm._FREE]


def test_a_segment_that_is_lost_twice_has_its_time_twice(pair):
    now = time.monotonic()
    for when in (now, now + 100):
        buffers, loan = request(pair, b"q" * LARGE)
        buffers.clear()
        answer(pair, b"a" * LARGE)
        loan.end()
        pair.borrower.mislay(list(pair.borrower._theirs))
        pair.lender.trim(when)
        (buffer,) = pair.ends[0].receive().buffers
        assert bytes(buffer) == b"a" * LARGE
        del buffer


def test_an_answer_that_did_not_leave_loses_its_segment(pair):
    buffers, loan = request(pair, b"q" * LARGE)
    sender = pair.ends[1]
    sender.set_timeout(0.02)
    with pytest.raises(TransportTimeout):
        while True:  # nobody reads: the socket fills
            sender.send(Kind.CALL, body=[bytes(60_000)])
    buffers.clear()
    with pytest.raises(TransportTimeout):
        answer(pair, b"a" * LARGE)
    loan.end()
    assert states(pair.lender) == [shm._LOST]


def test_an_abandoned_segment_carries_no_answer(pair):
    """Its owner does not know whether the request has left, and has let go of it."""
    buffers, loan = request(pair, b"q" * LARGE)
    buffers.clear()
    pair.lender.abandon(list(pair.lender._own))
    (buffer,) = answered(pair, b"a" * LARGE)
    loan.end()
    assert bytes(buffer) == b"a" * LARGE
    assert not pair.lender._own
    assert states(pair.borrower) == [shm._LENT]
    pair.borrower.trim(time.monotonic())
    assert not pair.borrower._theirs


def test_a_segment_that_is_abandoned_while_it_is_filled_carries_no_answer(pair, monkeypatch):
    buffers, loan = request(pair, b"q" * LARGE)
    buffers.clear()
    copy = shm._copy

    def copy_and_abandon(*parts):
        copy(*parts)
        pair.lender.abandon(list(pair.lender._own))

    monkeypatch.setattr(shm, "_copy", copy_and_abandon)
    (buffer,) = answered(pair, b"a" * LARGE)
    loan.end()
    assert bytes(buffer) == b"a" * LARGE
    assert states(pair.borrower) == [shm._LENT]
    pair.borrower.trim(time.monotonic())
    assert not pair.borrower._theirs


@pytest.mark.parametrize("interrupted_at", [0, 1])
def test_an_interrupted_answer_leaves_nothing_lent(pair, monkeypatch, interrupted_at):
    """Ctrl-C while the first, or the second, of two buffers is filled."""
    buffers, loan = request(pair, b"q" * LARGE)
    buffers.clear()
    copy = shm._copy
    copies = []

    def copy_until_interrupted(*parts):
        copies.append(parts)
        if len(copies) > interrupted_at:
            raise KeyboardInterrupt
        copy(*parts)

    monkeypatch.setattr(shm, "_copy", copy_until_interrupted)
    contents = [memoryview(b"a" * LARGE), memoryview(b"b" * LARGE)]
    with pytest.raises(KeyboardInterrupt):
        pair.ends[1].send(Kind.REPLY, buffers=contents)
    monkeypatch.setattr(shm, "_copy", copy)
    loan.end()
    assert states(pair.lender) == [shm._LOST if interrupted_at else shm._FREE]
    assert not pair.borrower._own
    assert not pair.borrower._spares
    buffers, loan = request(pair, b"q" * LARGE)
    buffers.clear()
    (buffer,) = answered(pair, b"a" * LARGE)
    assert bytes(buffer) == b"a" * LARGE


def test_an_interrupted_request_leaves_nothing_lent(pair, monkeypatch):
    def interrupted(*parts):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shm, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.ends[0].send(Kind.CALL, buffers=[memoryview(b"q" * LARGE)])
    assert not pair.lender._own
    (buffer,) = pair.send(b"q" * LARGE)
    assert bytes(buffer) == b"q" * LARGE


def test_a_connection_remembers_only_what_is_on_its_way(pair):
    for _ in range(20):
        buffers, loan = request(pair, b"q" * LARGE)
        buffers.clear()
        answered(pair, b"a" * LARGE)
        loan.end()
    assert len(pair.ends[1]._shared._handed_back) == 1
    pair.ends[1].close()
    assert states(pair.lender) == [shm._FREE]  # it has been received


def test_only_what_was_lent_is_taken_back(pair):
    pair.send(bytes(LARGE))
    (number,) = pair.lender._own
    with pytest.raises(ProtocolError, match="was not lent"):
        pair.lender.take_back(number)  # given back, but not handed back
    with pytest.raises(ProtocolError, match="was not lent"):
        pair.lender.take_back(number + 1)
    pair.lender._own[number].mapping[0] = shm._HANDED
    assert len(pair.lender.take_back(number)) >= LARGE


def test_a_loan_ends_once_whoever_is_first():
    """Its buffer may die on another thread in the moment when it is no longer held."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with borrowing() as memory:
            memory.learn(1, segment_descriptor())
            for _ in range(3000):
                end_a_loan_twice(memory)
    finally:
        sys.setswitchinterval(before)


def end_a_loan_twice(memory):
    mapping = memory._theirs[1]
    mapping[0] = shm._LENT
    buffer, loan = memory.borrow(1)
    loan.hold()
    held = [buffer]
    del buffer
    dropping = threading.Thread(target=held.clear)
    dropping.start()
    loan.end()
    dropping.join()
    assert mapping[0] == shm._FREE
    assert not loan.claim()
    assert not memory._spares


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_kept_stays_as_it_was(pair, seed):
    """Requests and answers of all sizes, some of which are kept for a while, on both sides."""
    chance = random.Random(seed)
    kept = []

    def keep_some(buffers, contents):
        for buffer, content in zip(buffers, contents, strict=True):
            assert bytes(buffer) == content
            if chance.random() < 0.3:
                kept.append((buffer, content))

    def some_contents():
        sizes = chance.choices(
            [SHARE_FROM, 2 * SHARE_FROM, LARGE, 100, 20_000, 0], k=chance.randrange(7)
        )
        return [bytes([chance.randrange(256)]) * size for size in sizes]

    for _ in range(60):
        asker, server = chance.choice([(0, 1), (1, 0)])
        contents = some_contents()
        pair.ends[asker].send(Kind.CALL, buffers=list(map(memoryview, contents)))
        frame = pair.ends[server].receive()
        for loan in frame.loans:
            loan.hold()
        keep_some(frame.buffers, contents)
        frame.buffers.clear()
        contents = some_contents()
        pair.ends[server].send(Kind.REPLY, buffers=list(map(memoryview, contents)))
        for loan in frame.loans:
            loan.end()
        keep_some(pair.ends[asker].receive().buffers, contents)
        for buffer, content in kept:
            assert bytes(buffer) == content
        chance.shuffle(kept)
        del kept[chance.randrange(8) :]
        del frame
    buffer = None
    kept.clear()
    for memory in pair.memories:
        assert set(states(memory)) <= {shm._FREE}
        assert not memory._spares
