"""A request whose lane has broken comes a second time, and runs once."""

from __future__ import annotations

import itertools

import pytest

from telegrad.rpc.connections.begun_requests import BegunRequests
from telegrad.wire.frames import Flags, Frame, Kind


def frame(number, *, is_copy=False):
    return Frame(Kind.CALL, Flags.RESENT if is_copy else 0, number, -1, -1, b"")


def comes(begun, lane, number, *, is_copy=False):
    """Whether a request runs, as it is served."""
    request = frame(number, is_copy=is_copy)
    begun.last[lane] = number
    if not (request.flags & Flags.RESENT or number in begun.resent):
        return True
    runs = begun.may_begin(lane, request)
    assert not request.flags & Flags.RESENT  # it is served as any other
    return runs


def test_a_copy_of_what_has_begun_does_not_run():
    begun = BegunRequests()
    assert comes(begun, "a", 1)
    assert not comes(begun, "b", 1, is_copy=True)


def test_nor_when_the_lane_that_it_began_on_has_ended():
    begun = BegunRequests()
    assert comes(begun, "a", 1)
    begun.ended("a")
    assert not comes(begun, "b", 1, is_copy=True)


def test_a_copy_of_what_has_not_begun_runs_once():
    begun = BegunRequests()
    assert comes(begun, "a", 1)
    begun.ended("a")
    assert comes(begun, "b", 2, is_copy=True)
    assert not comes(begun, "c", 2, is_copy=True)
    begun.ended("b")
    assert not comes(begun, "d", 2, is_copy=True)


def test_the_first_copy_does_not_run_when_the_second_has():
    begun = BegunRequests()
    assert comes(begun, "b", 1, is_copy=True)
    assert not comes(begun, "a", 1)


def test_requests_after_it_run():
    begun = BegunRequests()
    assert comes(begun, "a", 1, is_copy=True)
    assert comes(begun, "a", 2)
    assert comes(begun, "b", 3)


ORDERS = [
    order
    for order in itertools.permutations(["note", "look", "copy"])
    if order.index("note") < order.index("look")
]


@pytest.mark.parametrize("order", ORDERS)
def test_whichever_step_comes_between_one_of_both_runs(order):
    """A lane notes its request, then looks for copies: one may come before, between or after."""
    begun = BegunRequests()
    ran = []
    sees_copy = False
    for step in order:
        if step == "note":
            begun.last["a"] = 1
        elif step == "look":
            sees_copy = 1 in begun.resent
            if not sees_copy or begun.may_begin("a", frame(1)):
                ran.append("a")
        elif comes(begun, "b", 1, is_copy=True):
            ran.append("b")
    assert len(ran) == 1, order
