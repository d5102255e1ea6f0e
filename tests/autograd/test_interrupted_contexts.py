"""Ctrl-C while a context is entered or left: nobody is in it afterwards, and nobody keeps it."""

from __future__ import annotations

import torch
from process_programs import wait_until_clean

import telegrad.autograd as dist_autograd
from interrupting import CtrlC
from telegrad import rpc
from telegrad.autograd.context_lifetime import ContextLifetimes
from telegrad.autograd.registry import ContextRegistry
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
