"""Ctrl-C around a context: however its block ends, the thread has left it."""

from __future__ import annotations

import contextlib
import gc
import sys

import pytest

from interrupting import CtrlC
from telegrad import autograd
from telegrad.autograd import context
from telegrad.autograd.contexts.context import thread_context
from telegrad.autograd.contexts.registry import ContextRegistry
from telegrad.rpc.seams import NO_CONTEXT
from telegrad.testing.cluster import cluster

STEPS = dict.fromkeys(
    function.__code__
    for function in (
        context.__enter__,
        context.leave,
        autograd._Stay.end,
        autograd._Stay._end,
        autograd._leave_block,
        ContextRegistry.new,
        ContextRegistry.release,
    )
)


@pytest.fixture(scope="module")
def group():
    with cluster(2) as running:
        yield running


def enter_and_leave():
    with context():
        pass


def enter_and_leave_by_stack():
    with contextlib.ExitStack() as stack:
        stack.enter_context(context())


@pytest.mark.parametrize("run", [enter_and_leave, enter_and_leave_by_stack])
def test_at_any_step_of_entering_and_leaving(group, run, monkeypatch):
    # One that comes when a destructor leaves the context, which has been left, is dropped.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    step = interrupted = 0
    is_over = False
    while not is_over:
        step += 1
        with CtrlC(STEPS, step) as ctrl_c:
            try:
                run()
            except KeyboardInterrupt:
                interrupted += 1
                if run is enter_and_leave:  # also while the exception, and its frames, are there
                    assert thread_context() == NO_CONTEXT, step
        is_over = ctrl_c.steps_left > 0
        with context():
            pass
    assert interrupted >= 10
    assert autograd._get_debug_info()["num_autograd_contexts"] == 0


def test_a_context_is_freed_without_the_collector(group):
    gc.collect()  # what others have left
    gc.disable()
    try:
        with context():
            pass
        assert not [left for left in gc.get_objects() if type(left) is context]
    finally:
        gc.enable()


def test_an_error_in_the_block_goes_on(group):
    with pytest.raises(ValueError, match="mine"), context():
        raise ValueError("mine")
    assert thread_context() == NO_CONTEXT
