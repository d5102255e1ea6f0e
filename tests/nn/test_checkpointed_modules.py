"""`torch.utils.checkpoint` around remote modules and inside of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import telegrad
from telegrad.errors import TelegradError
from telegrad.testing.cluster import cluster


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(2) as running:
        yield running


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def block(drop=0.0):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(drop))


def checkpointed_block(drop=0.0):
    return Checkpointed(block(drop))


def inputs():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(2)).requires_grad_()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_gradients_through_a_checkpoint_around_a_module(reentrant, autocast):
    outcomes = []
    for make in (lambda: telegrad.module("worker1", block), block):
        module, x = make(), inputs()
        torch.manual_seed(3)
        head = nn.Linear(4, 4)

        def run(x, head=head, module=module):
            return torch.tanh(head(module(x)))

        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = checkpoint(run, x, use_reentrant=reentrant).square().sum()
        loss.backward()
        outcomes.append([x.grad, *(p.grad.cpu() for p in (*module.parameters(), head.weight))])
    for there, here in zip(*outcomes, strict=True):
        torch.testing.assert_close(there, here)


def test_gradients_through_a_checkpoint_inside_of_a_module():
    module, x = telegrad.module("worker1", checkpointed_block, 0.5), inputs()
    result = module(x)
    result.sum().backward()
    there = [x.grad, *(p.grad.cpu() for p in module.parameters())]
    near, x = block(), inputs()
    (near(x) * (result != 0) * 2).sum().backward()  # the numbers that were drawn there
    for far, here in zip(there, [x.grad, *(p.grad for p in near.parameters())], strict=True):
        torch.testing.assert_close(far, here)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_second_run_that_would_draw_other_numbers_is_refused(reentrant):
    module = telegrad.module("worker1", block, 0.5)
    head = nn.Linear(4, 4)

    def through_module(x):
        return torch.tanh(head(module(x)))

    def through_call(x):
        return torch.tanh(head(telegrad.call("worker1", F.dropout, x)))

    for run in (through_module, through_call):
        loss = checkpoint(run, inputs(), use_reentrant=reentrant).sum()
        with pytest.raises(TelegradError, match=r"drew other random numbers.*inside that"):
            loss.backward()
    module.eval()
    checkpoint(through_module, inputs(), use_reentrant=reentrant).sum().backward()
