"""Ctrl-C at any step of a backward pass: the next pass of the same context works."""

from __future__ import annotations

import threading

import pytest
import torch

import telegrad.autograd as dist_autograd
from interrupting import CtrlC
from telegrad import rpc
from telegrad.autograd.passes.engine import AutogradEngine
from telegrad.testing.cluster import cluster

PATIENCE = 20.0
STEPS = {
    function.__code__: None
    for function in (
        AutogradEngine._run_to_the_end,
        AutogradEngine._bring,
        AutogradEngine._run,
        AutogradEngine._take_batch,
        AutogradEngine._release_batch,
        AutogradEngine._run_batch,
        AutogradEngine._converse,
        AutogradEngine._carry_out_for,
    )
}
WEIGHT = torch.tensor([2.0, 3.0], requires_grad=True)


def scale(x):
    return x * WEIGHT


def finishes(work):
    """Whether it does, on a thread of its own: what stands still must not stop the tests."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return not thread.is_alive()


# Ctrl-C may come just before a descriptor is closed. Python closes it, and complains.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_next_pass_works_after_ctrl_c_at_any_step():
    x = torch.ones(2, requires_grad=True)
    step = interrupted = 0
    with cluster(3):
        while step == interrupted:
            step += 1
            with dist_autograd.context() as context_id:
                loss = sum(rpc.rpc_sync(f"worker{n}", scale, (x,)).sum() for n in (1, 2))
                with CtrlC(STEPS, step):
                    try:
                        dist_autograd.backward(context_id, [loss], retain_graph=True)
                    except KeyboardInterrupt:
                        interrupted += 1
                known = dist_autograd.get_gradients(context_id).get(x, torch.zeros(2)).clone()
                again = [context_id, [loss]]
                assert finishes(lambda again=again: dist_autograd.backward(*again)), step
                found = dist_autograd.get_gradients(context_id)[x] - known
                assert found.tolist() == [4.0, 6.0], step
    assert interrupted >= 30
