"""Destructors that use other workers, wherever they run. Real processes."""

from __future__ import annotations

import gc

import pytest

from telegrad import rpc
from telegrad.errors import SerializationError
from telegrad.rpc.group import current
from telegrad.testing.cluster import cluster

closed = []


def close(number, rref):
    closed.append(number)


def count_closed():
    return len(closed)


def value(number):
    return number


class Handle:
    """Tells its worker when it goes, which a garbage collection finds out."""

    def __init__(self, number):
        self.number, self.rref, self.me = number, rpc.RRef(number), self

    def __del__(self):
        calls.append(rpc.rpc_async("worker1", close, args=(self.number, self.rref)))


calls = []


def test_a_destructor_may_call_wherever_the_collector_runs_it():
    before = gc.get_threshold()
    with cluster(2):
        gc.set_threshold(7)  # also inside of the bookkeeping of references
        try:
            for number in range(500):
                Handle(number)
        finally:
            gc.set_threshold(*before)
        gc.collect()
        assert len(calls) == 500
        while calls:
            calls.pop().wait()
        assert rpc.rpc_sync("worker1", count_closed) == 500


class Interruption:
    """What the program does while a message is packed, as a destructor would."""

    def __init__(self, action):
        self.action = action

    def __reduce__(self):
        self.action()
        return value, (0,)


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_in_the_middle_of_packing_another_leaves_its_references_alone(fails):
    """A generator cannot be packed: what was packed before it is taken back."""
    with cluster(2):
        outer, inner = rpc.RRef("outer"), rpc.RRef("inner")

        def call():
            argument = (n for n in ()) if fails else 0
            try:
                rpc.rpc_sync("worker1", close, args=(argument, [inner, argument]))
            except SerializationError:
                assert fails

        packed = current.current().references.codec.encode([outer, Interruption(call)], 1)
        assert [rref for rref, _ in packed.references.made] == [outer.rref_id]
        packed.references.abandon()
