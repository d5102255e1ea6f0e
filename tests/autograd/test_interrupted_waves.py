"""Ctrl-C anywhere in a wave: `.grad`, hooks and what the next wave needs are as they were."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

from telegrad.autograd import grad_loans
from telegrad.autograd.local_pass import LocalPass
from telegrad.autograd.nodes import current_wave
from telegrad.autograd.waves import Wave


def lines_to_interrupt():
    """Where Ctrl-C may come, by code object: up to where a wave begins to clean up."""
    source, first = inspect.getsourcelines(Wave.run)
    (clean_up,) = [number for number, line in enumerate(source) if line.strip() == "finally:"]
    return {
        Wave.run.__code__: range(first, first + clean_up),
        grad_loans.GradLoan.borrow.__code__: range(10**6),
    }


LINES = lines_to_interrupt()


class Interrupted:
    """Raises KeyboardInterrupt at the n-th line of a wave's own code."""

    def __init__(self, line):
        self.lines_left = line

    def __enter__(self):
        sys.settrace(self._enter)

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter(self, frame, event, argument):
        return self._step if frame.f_code in LINES else None

    def _step(self, frame, event, argument):
        if event == "line" and frame.f_lineno in LINES[frame.f_code]:
            self.lines_left -= 1
            if self.lines_left == 0:
                raise KeyboardInterrupt
        return self._step


class Watched:
    """A product whose factors both have hooks; one needs its gradient in `.grad`."""

    def __init__(self):
        self.seen = []
        self.needy = torch.tensor([2.0], requires_grad=True)
        self.needy.register_post_accumulate_grad_hook(lambda leaf: self.seen.append(leaf.grad))
        self.watched = torch.tensor([3.0], requires_grad=True)
        self.watched.register_hook(lambda gradient: self.seen.append(gradient))
        for leaf in self.leaves:
            leaf.grad = torch.tensor([100.0])
        self.product = (self.needy * self.watched).sum()
        self.nodes = [node for node, _ in self.product.grad_fn.next_functions[0][0].next_functions]

    @property
    def leaves(self):
        return self.needy, self.watched

    def backward(self):
        local = LocalPass({}, retain_graph=True, create_graph=False)
        local.enter_roots([self.product])
        _, found = local.run()
        return {leaf: gradient for leaf, gradient, _ in found}

    def hooks(self):
        """How many are registered on the leaves' nodes."""
        count = 0
        for node in self.nodes:
            for register in (node.register_prehook, node.register_hook):
                handle = register(lambda *_: None)
                count += len(handle.hooks_dict_ref()) - 1
                handle.remove()
        return count


def lines_of_a_wave():
    interrupted = Interrupted(10**9)
    program = Watched()
    with interrupted:
        program.backward()
    return 10**9 - interrupted.lines_left


@pytest.fixture(scope="module")
def line_count():
    count = lines_of_a_wave()
    assert count > 20  # both functions were seen
    return count


def test_a_wave_that_is_interrupted_at_any_line_leaves_nothing_behind(line_count):
    interruptions = 0
    for line in range(1, line_count + 1):
        program = Watched()
        with Interrupted(line):
            try:
                program.backward()
            except KeyboardInterrupt:
                interruptions += 1
        assert [leaf.grad.item() for leaf in program.leaves] == [100, 100], line
        assert program.hooks() == 0, line
        assert not grad_loans._lent, line
        assert current_wave() is None, line
        found = program.backward()
        assert [found[leaf].item() for leaf in program.leaves] == [3, 2], line
    assert interruptions == line_count
