"""Waits for futures, and Ctrl-C in the middle of one."""

from __future__ import annotations

import inspect

import pytest
from torch.futures import Future

from interrupting import CtrlC
from telegrad.rpc.calls import futures


def test_ctrl_c_at_any_step_of_a_wait_ends_it():
    """Torch drops what a callback raises: one that can be interrupted would lose Ctrl-C, and with
    it the end of the wait."""
    codes = [futures.wait_for.__code__, futures.has_ended.__code__]
    codes += [const for code in codes for const in code.co_consts if inspect.iscode(const)]
    step, value = 0, None
    while value is None:
        step += 1
        done = Future()
        done.set_result(step)
        try:
            with CtrlC(dict.fromkeys(codes), step):
                value = futures.wait_for(done)
        except KeyboardInterrupt:
            continue
    assert value == step > 5


def test_a_wait_with_a_limit_ends_without_the_future():
    future = Future()
    assert not futures.has_ended(future, 0.01)
    future.set_exception(ValueError("late"))
    assert futures.has_ended(future, None)
    with pytest.raises(ValueError, match="late"):
        futures.wait_for(future)
