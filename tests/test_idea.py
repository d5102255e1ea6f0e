"""The short file that shows the idea does what telegrad does, and what one process does."""

from __future__ import annotations

import importlib.util
import pathlib
import random
import sys

import pytest
import torch

import telegrad

PATH = pathlib.Path(__file__).parents[1] / "docs" / "explanation" / "idea.py"

weight = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
"""Each process has its own."""


def bend(x, y):
    return torch.tanh(x * weight + y)


def scale(x):
    return x * weight


def weight_gradient():
    found, weight.grad = weight.grad, None
    return torch.zeros(3) if found is None else found


@pytest.fixture(scope="module")
def idea():
    spec = importlib.util.spec_from_file_location("idea", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["idea"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["idea"]


def program(seed, calls, x):
    """A loss that is made by a few calls of whoever makes calls."""
    rng = random.Random(seed)
    values = [x, x.sin()]
    for _ in range(5):
        call = rng.choice(calls)
        if rng.random() < 0.5:
            values.append(call(bend, rng.choice(values), rng.choice(values)))
        else:
            values.append(call(scale, rng.choice(values)))
    return torch.stack([value.square().mean() for value in rng.sample(values, 4)]).sum()


def gradients(seed, calls):
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    program(seed, calls, x).backward()
    there = [call(weight_gradient) for call in calls]
    return [x.grad, *there]


def total(found):
    """Two processes have a weight each, where one process has one."""
    return torch.stack(found[1:]).sum(0)


def test_its_gradients_are_those_of_telegrad_and_of_one_process(idea, monkeypatch):
    monkeypatch.syspath_prepend(str(PATH.parent))
    left, right = idea.Worker(), idea.Worker()
    try:
        shown = [gradients(seed, [left.call, right.call]) for seed in range(20)]
    finally:
        left.close()
        right.close()
    with telegrad.workers("left", "right"):

        def at(worker):
            return lambda fn, *args: telegrad.call(worker, fn, *args)

        real = [gradients(seed, [at("left"), at("right")]) for seed in range(20)]

    def here(fn, *args):
        return fn(*args)

    local = [gradients(seed, [here, here]) for seed in range(20)]
    for by_idea, by_telegrad, at_home in zip(shown, real, local, strict=True):
        torch.testing.assert_close(by_idea, by_telegrad)
        torch.testing.assert_close(by_idea[0], at_home[0])
        torch.testing.assert_close(total(by_idea), total(at_home))
    assert any(total(each).abs().sum() > 0 for each in local)


def test_it_is_short():
    assert len(PATH.read_text().splitlines()) <= 130
