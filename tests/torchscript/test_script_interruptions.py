"""Ctrl-C in the Python part of a script function stays a KeyboardInterrupt, wherever it comes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import script_functions as script
import torch

from telegrad.testing.cluster import cluster

X = torch.ones(2)
OPERATORS = ("operators.py", "remote_failures.py")


class InterruptAt:
    """Raises as Ctrl-C does, at the n-th step into a function of our operators."""

    def __init__(self, step):
        self.step = step

    def __call__(self, frame, event, arg):
        if event == "call" and Path(frame.f_code.co_filename).name in OPERATORS:
            self.step -= 1
            if self.step == 0:
                raise KeyboardInterrupt

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)


@pytest.mark.parametrize("call", [script.add_sync, script.add_async, script.add_remote])
def test_at_any_step_into_an_operator(call):
    with cluster(2):
        call("worker1", X, X)
        steps = 0
        while True:
            with InterruptAt(steps + 1) as interrupt:
                try:
                    call("worker1", X, X)
                except KeyboardInterrupt:
                    pass
                else:
                    break
            assert interrupt.step == 0
            steps += 1
        assert steps > 1
        assert torch.equal(call("worker1", X, X), X + X)


def test_in_a_function_that_the_compiler_ignores():
    with pytest.raises(KeyboardInterrupt) as caught:
        script.interrupted_here(X)
    assert "interrupted_here" in str(caught.value.__cause__)


def test_what_another_worker_was_interrupted_by_is_an_error():
    with cluster(2), pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        script.interrupted_there("worker1", X)
