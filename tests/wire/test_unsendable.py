"""What is wanted out of a pickle that cannot be loaded."""

from __future__ import annotations

import collections
import dataclasses
import pickle

import cloudpickle
import pytest

from telegrad.wire.unsendable import arguments_in


def wanted(*args):
    raise AssertionError("it is not to be run")


def bomb():
    raise AssertionError("it is not to be run")


class Wanted:
    def __init__(self, *args):
        self.args = args

    def __reduce__(self):
        return wanted, self.args


class Bomb:
    def __reduce__(self):
        return bomb, (), {"state": Wanted("in a state")}, iter([Wanted("in a list")])


@dataclasses.dataclass
class Thing:
    value: object


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Odd:
    def __getstate__(self):
        return [1, 2, 3]

    def __setstate__(self, state):
        raise AssertionError("it is not to be run")


Pair = collections.namedtuple("Pair", "first second")

KEPT = Wanted(1)
VALUES = {
    "alone": (Wanted(1), [1]),
    "in containers": ([{"a": (Wanted(1),)}, {Pair(1, 2): Wanted(2)}], [1, 2]),
    "in objects": ([Thing(Wanted(1)), Slotted(Wanted(2)), Pair(Wanted(3), 4)], [1, 2, 3]),
    "in another dictionary": (collections.OrderedDict(a=Wanted(1)), [1]),
    "twice": ([Wanted(1)] * 2, [1]),
    "after and inside of what cannot be loaded": (
        [Bomb(), Wanted(1)],
        ["in a state", "in a list", 1],
    ),
    "behind what is filled": ([collections.OrderedDict(a=2), Wanted(1)], [1]),
    "behind a state": ([Odd(), Wanted(1)], [1]),
    "in a function": (lambda: KEPT, [1]),
}


@pytest.mark.parametrize(("value", "right"), VALUES.values(), ids=VALUES.keys())
def test_all_arguments_are_found(value, right):
    found = arguments_in(cloudpickle.dumps(value, 5), wanted)
    assert sorted(map(str, found)) == sorted(str((each,)) for each in right)


def test_what_is_found_may_hold_others():
    outer, inner = sorted(arguments_in(pickle.dumps(Wanted(Wanted(1), 2), 5), wanted), key=len)[
        ::-1
    ]
    assert inner == (1,)
    assert outer[1] == 2


def test_damage_is_no_error():
    stream = pickle.dumps([Wanted(1), "the rest"], 5)
    for end in range(len(stream)):
        assert arguments_in(stream[:end], wanted) in ([], [(1,)])


def test_buffers_are_not_needed():
    stream = pickle.dumps([pickle.PickleBuffer(b"x"), Wanted(1)], 5, buffer_callback=lambda _: None)
    assert arguments_in(memoryview(stream), wanted) == [(1,)]
