"""Pipelines over real worker processes; the unsplit model in this process is the oracle."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from stages import (
    WORKERS,
    Block,
    both,
    close,
    far_stage,
    four,
    gradients,
    rows,
    seeded,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import telegrad
from telegrad.testing.cluster import cluster


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(4) as running:
        yield running


# -- results and gradients


@pytest.mark.parametrize(
    ("count", "micro_batches"), [(9, 3), (7, 3), (2, 3), (1, 4), (5, 1), (0, 3)]
)
def test_outputs_and_gradients_are_those_of_the_unsplit_model(count, micro_batches):
    far, near = four(micro_batches)
    found = []
    for model in (far, near):
        x = rows(count).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        found.append([y, x.grad, *gradients(model), *model.buffers()])
    close(*found)


def test_random_pipelines_train_like_one_process():
    generator = random.Random(5)
    for _ in range(8):
        widths = [generator.randint(2, 6) for _ in range(generator.randint(2, 6))]
        stages = [
            (generator.choice([None, *WORKERS]), generator.choice([Block, nn.Linear]), a, b)
            for a, b in itertools.pairwise(widths)
        ]
        far, near = both(*stages, micro_batches=generator.randint(1, 5))
        far.double(), near.double()
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (far, near)]
        for step in range(3):
            x, losses = rows(generator.randint(1, 11), widths[0], step).double(), []
            for model, optimizer in zip((far, near), optimizers, strict=True):
                loss = model(x).square().mean()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append([loss, norm])
            close(*losses, 1e-9)
        close(list(far.state_dict().values()), list(near.state_dict().values()), 1e-9)


def test_gradients_are_asked_for_in_all_ways():
    far, near = four()
    found = []
    for model in (far, near):
        x = rows(7).requires_grad_()
        loss = model(x).square().sum()
        some = [x, *list(model.parameters())[:3]]
        asked = torch.autograd.grad(loss, some, retain_graph=True)
        loss.backward(inputs=some[:1], retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([asked, x.grad, gradients(model)])
    close(*found)


def test_a_second_pass_through_freed_graphs_is_refused():
    far, _ = four()
    loss = far(rows(5)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_frozen_stages_end_the_backward_pass():
    far, near = four()
    for model in (far, near):
        for parameter in [*model[0].parameters(), *model[1].linear.parameters()]:
            parameter.requires_grad_(False)
        model(rows(6)).sum().backward()
    close(gradients(far), gradients(near))


def test_only_the_first_stage_may_have_parameters_that_train():
    far, near = four()
    for model in (far, near):
        for parameter in list(model.parameters())[4:]:
            parameter.requires_grad_(False)
        model(rows(6)).sum().backward()
    close(gradients(far), gradients(near))


class Modes(nn.Module):
    def forward(self, x):
        is_on = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), self.training
        return x + torch.tensor([float(each) for each in is_on]), x @ torch.ones(3, 3)


class Second(nn.Module):
    def forward(self, pair):
        return {"modes": pair[0], "deep": (pair[1], "text")}


def test_modes_and_structures_travel():
    model = telegrad.Pipeline(
        [telegrad.module("worker1", Modes), telegrad.module("worker2", Second)], micro_batches=2
    )
    x = torch.zeros(5, 3)
    found = model(x)
    assert found["modes"].tolist() == [[1, 0, 1]] * 5
    assert found["deep"][0].shape == (5, 3)
    assert found["deep"][1] == "text"
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    assert found["modes"].tolist() == [[0, 1, 0]] * 5
    assert found["deep"][0].dtype is torch.bfloat16
    assert not found["modes"].requires_grad


def test_autocast_holds_for_every_micro_batch():
    far, near = four()
    for model in (far, near):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(rows(9))
        assert y.dtype is torch.bfloat16
        y.square().sum().backward()
    close(gradients(far), gradients(near), 0.05)


class Recomputes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(lambda y: torch.tanh(self.linear(y)), x, use_reentrant=False) * 2


def test_stages_may_recompute_their_activations():
    far, near = both(("worker1", Recomputes), ("worker2", Recomputes))
    for model in (far, near):
        model(rows(7)).square().sum().backward()
    close(gradients(far), gradients(near))


def test_no_history_under_no_grad():
    far, near = four()
    with torch.no_grad():
        y = far(rows(5))
    assert not y.requires_grad
    close(y, near(rows(5)))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, *, scale, more):
        return x * self.weight * scale + more["y"], torch.arange(x.shape[0])


class Pick(nn.Module):
    def forward(self, pair):
        return pair[0], pair[1] + 1


def test_the_first_stage_takes_any_arguments():
    model = telegrad.Pipeline(
        [telegrad.module("worker1", Mixed), telegrad.module("worker2", Pick)], micro_batches=2
    )
    y = torch.ones(4, 3, requires_grad=True)
    out, numbers = model(torch.ones(4, 3), scale=2.0, more={"y": y})
    assert numbers.tolist() == [1, 2, 1, 2]
    assert not numbers.requires_grad
    out.sum().backward()
    assert y.grad.tolist() == [[1.0] * 3] * 4
    assert model[0].weight.grad.tolist() == [8.0] * 3


def test_a_tensor_on_a_worker_is_an_argument():
    far, near = four()
    x = far[0].linear.weight.detach()
    close(far(x), near(x.cpu()))


def test_hooks_of_parameters_see_the_total_once():
    far, near = four()
    for model in (far, near):
        model[1].linear.weight.register_hook(lambda g: g.sign())
        model(rows(6)).sum().backward()
    close(gradients(far), gradients(near))


# -- as a module


def test_names_and_states_are_those_of_the_sequential():
    far, near = four()
    assert list(far.state_dict()) == list(near.state_dict())
    assert [n for n, _ in far.named_parameters()] == [n for n, _ in near.named_parameters()]
    assert [n for n, _ in far.named_modules()] == [n for n, _ in near.named_modules()]
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.mul_(2.0)
    far.load_state_dict(near.state_dict())
    close(far(rows(5)), near(rows(5)))
    near.load_state_dict({k: v.cpu() for k, v in far.state_dict().items()})
    assert "micro_batches=3" in repr(far)


def test_a_copy_is_another_pipeline():
    far, near = four()
    far(rows(3))
    other = copy.deepcopy(far)
    with torch.no_grad():
        for parameter in far.parameters():
            parameter.zero_()
    close(other(rows(5)), near(rows(5)))


def test_a_module_may_be_two_stages():
    shared = far_stage("worker1", 1, nn.Linear, 4, 4)
    alone = seeded(1, nn.Linear, 4, 4)
    middle = far_stage("worker2", 2, nn.Linear, 4, 4)
    far = telegrad.Pipeline([shared, nn.Tanh(), shared, middle, shared], micro_batches=4)
    near = nn.Sequential(alone, nn.Tanh(), alone, seeded(2, nn.Linear, 4, 4), alone)
    for model in (far, near):
        model(rows(6)).square().sum().backward()
    assert list(far.state_dict()) == list(near.state_dict())
    close(gradients(far), gradients(near))


def test_sequentials_in_a_sequential_are_stages():
    far, near = four()
    inner = nn.Sequential(*list(far.children())[:3])
    model = telegrad.Pipeline(nn.Sequential(inner, far[3]), micro_batches=2)
    close(model(rows(5)), near(rows(5)))


def test_stages_may_be_on_this_worker_and_all_on_one():
    far, near = both(
        ("worker0", Block, 4, 4),
        ("worker0", Block, 4, 4),
        ("worker1", Block, 4, 4),
        micro_batches=4,
    )
    for model in (far, near):
        model(rows(6)).square().sum().backward()
    close(gradients(far), gradients(near))


def test_a_pipeline_of_local_modules_is_a_sequential():
    far, near = both((None, Block, 4, 5), (None, nn.Linear, 5, 2))
    for model in (far, near):
        model(rows(7)).square().sum().backward()
    close(gradients(far), gradients(near))
