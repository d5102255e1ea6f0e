"""Ctrl-C anywhere in a wave: `.grad`, hooks and what the next wave needs are as they were."""

from __future__ import annotations

import inspect

import torch

from interrupting import CtrlC
from telegrad.autograd.contexts.message_nodes import current_wave
from telegrad.autograd.local import grad_field
from telegrad.autograd.local.local_pass import LocalPass
from telegrad.autograd.local.waves import Wave


def lines_to_interrupt():
    """Where Ctrl-C may come, by code object: up to where a wave begins to clean up."""
    source, first = inspect.getsourcelines(Wave.run)
    (clean_up,) = [number for number, line in enumerate(source) if line.strip() == "finally:"]
    return {
        Wave.run.__code__: range(first, first + clean_up),
        grad_field.GradLoan.borrow.__code__: None,
    }


LINES = lines_to_interrupt()


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


def test_a_wave_that_is_interrupted_at_any_step_leaves_nothing_behind():
    step = interrupted = 0
    while step == interrupted:
        step += 1
        program = Watched()
        with CtrlC(LINES, step):
            try:
                program.backward()
            except KeyboardInterrupt:
                interrupted += 1
        assert [leaf.grad.item() for leaf in program.leaves] == [100, 100], step
        assert program.hooks() == 0, step
        assert not grad_field._lent, step
        assert current_wave() is None, step
        found = program.backward()
        assert [found[leaf].item() for leaf in program.leaves] == [3, 2], step
    assert interrupted >= 15  # both functions were seen
