"""Ctrl-C while a context is entered or left: nobody is in it afterwards, and nobody keeps it."""

from __future__ import annotations

import random
import signal
import sys

import pytest
import torch
from process_programs import wait_until_clean

import telegrad.autograd as dist_autograd
from interrupting import CtrlC
from telegrad import rpc
from telegrad.autograd.contexts.lifetime import ContextLifetimes
from telegrad.autograd.contexts.registry import ContextRegistry
from telegrad.testing.cluster import cluster

FUNCTIONS = (
    dist_autograd.context.__enter__,
    dist_autograd.context.__exit__,
    ContextRegistry.new,
    ContextRegistry.release,
    ContextRegistry._carry_out,
    ContextLifetimes.released,
)
LINES = {function.__code__: None for function in FUNCTIONS}


def test_a_context_that_is_interrupted_at_any_step_is_left_and_freed_everywhere():
    step = interrupted = 0
    with cluster(2):
        while step == interrupted:
            step += 1
            try:
                with CtrlC(LINES, step), dist_autograd.context():
                    rpc.rpc_sync("worker1", torch.neg, (torch.ones(2, requires_grad=True),))
            except KeyboardInterrupt:
                interrupted += 1
            assert dist_autograd._get_debug_info()["num_autograd_contexts"] == 0
            with dist_autograd.context():
                pass
        wait_until_clean(["worker0", "worker1"])
    assert interrupted > 10


@pytest.fixture
def dropped():
    """Exceptions that Python has dropped, because a destructor has raised them."""
    errors = []
    before, sys.unraisablehook = sys.unraisablehook, lambda u: errors.append(u.exc_value)
    yield errors
    sys.unraisablehook = before


def enter_and_leave(dropped):
    # Apart: Python 3.12 jumps back outside of the `try` that a loop is in.
    while not dropped:
        with dist_autograd.context():
            pass


def test_no_ctrl_c_is_dropped_by_blocks(dropped):
    def press(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    chance = random.Random(3)
    arrived = 0
    try:
        with cluster(1):
            while arrived < 300 and not dropped:
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 1e-3))
                        enter_and_leave(dropped)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    arrived += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not dropped
