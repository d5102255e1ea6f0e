"""Which functions the reader of a connection runs itself."""

from __future__ import annotations

import math

from telegrad.rpc.calls.quick_functions import QuickFunctions

QUICK, SLOW, BLOCKED = 20e-6, 1e-3, 0.1


def test_a_function_is_trusted_after_some_quick_runs():
    functions = QuickFunctions()
    assert not functions.is_quick(b"f")
    for _ in range(3):
        functions.ran(b"f", QUICK)
    assert functions.is_quick(b"f")
    assert not functions.is_quick(b"g")


def test_a_slow_run_now_and_then_is_forgiven_and_many_are_not():
    functions = QuickFunctions()
    for _ in range(8):
        functions.ran(b"f", QUICK)
    functions.ran(b"f", SLOW)
    assert functions.is_quick(b"f")
    for _ in range(3):
        functions.ran(b"f", SLOW)
    assert not functions.is_quick(b"f")


def test_a_function_that_is_trusted_no_more_may_need_long_to_be_trusted_again():
    functions = QuickFunctions(relapse=20)
    for _ in range(8):
        functions.ran(b"f", QUICK)
    for _ in range(3):
        functions.ran(b"f", SLOW)
    assert not functions.is_quick(b"f")
    for _ in range(20):
        functions.ran(b"f", QUICK)
    assert not functions.is_quick(b"f")
    functions.ran(b"f", QUICK)
    assert functions.is_quick(b"f")


def test_a_function_that_has_blocked_is_out_for_long():
    functions = QuickFunctions()
    for _ in range(8):
        functions.ran(b"f", QUICK)
    functions.ran(b"f", BLOCKED)
    for _ in range(100):
        functions.ran(b"f", QUICK)
    assert not functions.is_quick(b"f")


def test_first_runs_that_take_long_are_forgiven():
    functions = QuickFunctions()
    for _ in range(2):  # as those of a script function, which is compiled twice
        functions.ran(b"f", BLOCKED)
    for _ in range(2):
        functions.ran(b"f", QUICK)
    assert not functions.is_quick(b"f")
    functions.ran(b"f", QUICK)
    assert functions.is_quick(b"f")


def test_a_function_that_keeps_blocking_is_never_trusted():
    functions = QuickFunctions()
    for _ in range(10):
        functions.ran(b"f", QUICK)
        functions.ran(b"f", BLOCKED)
        assert not functions.is_quick(b"f")
    for _ in range(3):
        functions.ran(b"f", QUICK)
    functions.ran(b"f", BLOCKED)  # on the thread that read it
    functions.ran(b"f", BLOCKED)
    for _ in range(100):
        functions.ran(b"f", QUICK)
    assert not functions.is_quick(b"f")


def test_a_function_that_is_sure_to_block_is_out_from_its_first_run():
    functions = QuickFunctions()
    functions.ran(b"f", math.inf)
    for _ in range(100):
        functions.ran(b"f", QUICK)
    assert not functions.is_quick(b"f")


def test_a_function_that_travels_whole_is_never_trusted():
    functions = QuickFunctions()
    for _ in range(10):
        functions.ran(b"", QUICK)
    assert not functions.is_quick(b"")
