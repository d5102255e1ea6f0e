"""What methods change in a remote module, and what they return of it, is as in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations
from torch.utils._pytree import tree_leaves

import telegrad
from telegrad.errors import TelegradError
from telegrad.tensors import RemoteTensor
from telegrad.testing.cluster import cluster


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(2) as running:
        yield running


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.layers = nn.ModuleList([nn.Linear(3, 3)])
        self.head = nn.Linear(3, 2)
        self.register_buffer("cache", None)
        self.heads = []
        self.is_lazy = False

    def forward(self, x):
        x = self.norm(self.body(x))
        for layer in self.layers:
            x = layer(x).tanh()
        if self.is_lazy:
            self.lazy = nn.Linear(3, 3)
            self.is_lazy = False
        return self.head(self.lazy(x) if hasattr(self, "lazy") else x)

    def widen(self):
        torch.manual_seed(2)
        self.head = nn.Linear(3, 5)

    def put_head_away(self):
        torch.manual_seed(3)
        self.heads.append(self.head)
        self.head = nn.Linear(3, 2)

    def put_head_back(self):
        self.head = self.heads.pop()

    def grow(self):
        torch.manual_seed(4)
        self.layers.append(nn.Linear(3, 3))

    def shrink(self):
        del self.layers[-1]

    def freeze(self):
        self.body.requires_grad_(False)
        self.norm.eval()
        return self

    def thaw(self):
        return self.train().requires_grad_()

    def fill(self, x):
        self.cache = x

    def tie(self):
        self.layers[0].weight = self.body.weight

    def renew(self):
        self.body.weight = nn.Parameter(torch.full((3, 3), 0.3))

    def add(self):
        self.gain = nn.Parameter(torch.ones(2))

    def drop(self):
        del self.gain

    def normalize(self):
        weight_norm(self.body)

    def denormalize(self):
        remove_parametrizations(self.body, "weight")

    def fail(self):
        self.body.weight.requires_grad_(False)
        raise ValueError("in the middle of it")

    def parts(self):
        return {"head": self.head, "layers": [*self.layers], "weight": (self.head.weight, 3)}

    @property
    def first(self):
        return self.layers[0]

    @property
    def is_frozen(self):
        return not self.body.weight.requires_grad

    @is_frozen.setter
    def is_frozen(self, value):
        self.body.requires_grad_(not value)


def make(far):
    def seeded():
        torch.manual_seed(1)
        return Net()

    return telegrad.module("worker1", seeded) if far else seeded()


def step(net, optimizer, dtype=torch.float32):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(5)).to(dtype)
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def state(net):
    return (
        [(name, value) for name, value in net.state_dict().items()],
        [(n, p.requires_grad, tuple(p.shape), p.grad) for n, p in net.named_parameters()],
        [name for name, _ in net.named_buffers()],
        [(name, part.training) for name, part in net.named_modules()],
    )


def check_same(program, within=1e-6):
    """`program` yields modules: each time they are looked at."""
    nets = [program(make(far)) for far in (True, False)]
    for far, near in zip(*nets, strict=True):
        far_leaves, near_leaves = tree_leaves(state(far)), tree_leaves(state(near))
        assert len(far_leaves) == len(near_leaves)
        for a, b in zip(far_leaves, near_leaves, strict=True):
            if isinstance(b, torch.Tensor):
                assert isinstance(a, RemoteTensor)
                torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=0, atol=within)
            else:
                assert a == b


def test_a_replaced_layer_is_trained_by_an_optimizer_made_after():
    def program(net):
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        step(net, optimizer)
        net.widen()
        yield net
        step(net, optimizer)  # which does not know the new one
        yield net
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        for _ in range(3):
            step(net, optimizer)
        yield net

    check_same(program)


def test_layers_come_and_go():
    def program(net):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        step(net, optimizer)
        net.grow()
        yield net
        optimizer.add_param_group({"params": net.layers[-1].parameters()})
        for _ in range(3):
            step(net, optimizer)
        yield net
        net.shrink()
        yield net
        step(net, optimizer)
        yield copy.deepcopy(net)

    check_same(program)


def test_a_layer_that_is_put_back_is_the_one_that_the_optimizer_knows():
    def program(net):
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        step(net, optimizer)
        net.put_head_away()
        step(net, optimizer)
        yield net
        net.put_head_back()
        for _ in range(3):
            step(net, optimizer)
        yield net

    check_same(program)


def test_frozen_layers_and_modes_are_seen_here():
    def program(net):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        assert net.freeze() is net
        yield net
        step(net, optimizer)
        yield net
        net.train()
        step(net, optimizer)
        yield net
        net.thaw()
        step(net, optimizer)
        yield net
        net.is_frozen = True
        assert net.is_frozen
        yield net

    check_same(program)


def test_parameters_are_added_replaced_tied_and_removed():
    def program(net):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net.tie()
        assert net.layers[0].weight is net.body.weight
        step(net, optimizer)
        yield net
        net.renew()
        assert net.layers[0].weight is not net.body.weight
        step(net, optimizer)
        yield net
        net.add()
        net.gain.requires_grad_(False)
        net.tie()
        yield net
        net.drop()
        net.normalize()
        step(net, torch.optim.SGD(net.parameters(), 0.1))
        yield net
        net.denormalize()
        yield net

    check_same(program)


def test_a_buffer_that_was_none_is_filled_and_emptied():
    def program(net):
        for value in (torch.ones(2), torch.ones(3), None, torch.zeros(1)):
            net.fill(value)
            yield net

    check_same(program)


def test_a_module_that_converts_itself_keeps_its_parameters():
    def program(net):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        weight = net.body.weight
        assert net.double() is net
        step(net, optimizer, torch.float64)
        assert net.body.weight is weight
        yield net

    check_same(program)


def test_what_a_method_did_before_it_failed_is_seen_here():
    def program(net):
        with pytest.raises(ValueError, match="middle"):
            net.fail()
        yield net
        step(net, torch.optim.SGD(net.parameters(), 0.1))
        yield net

    check_same(program)


def test_a_submitted_method_changes_the_module_too():
    net = make(far=True)
    net.grow.submit().result()
    assert len(net.layers) == 2
    with pytest.raises(TypeError, match="without submit"):
        net.freeze.submit().result()


def test_parts_and_parameters_that_a_method_returns_are_those_of_here():
    for net in (make(far=True), make(far=False)):
        parts = net.parts()
        assert parts["head"] is net.head
        assert parts["layers"][0] is net.layers[0] is net.first
        assert parts["weight"][0] is net.head.weight
        assert parts["weight"][1] == 3


def test_a_part_that_was_removed_says_so():
    net = make(far=True)
    head = net.head
    net.widen()
    with pytest.raises(TelegradError, match="take the part from the module again"):
        head(torch.ones(1, 3))
    assert net.head(torch.ones(1, 3)).shape == (1, 5)


def test_a_part_follows_though_the_whole_module_is_gone():
    layers = make(far=True).layers
    layers[0].double()
    layers.append_one = 1  # an attribute there
    assert layers[0].weight.dtype == torch.float64
    assert layers.extra_repr() == ""


@pytest.mark.parametrize("micro_batches", [0, 2])
def test_a_layer_that_forward_makes_itself_is_refused_and_known_from_then_on(micro_batches):
    net = make(far=True)
    net.is_lazy = True
    model = telegrad.Pipeline([net], micro_batches=micro_batches) if micro_batches else net
    x = torch.ones(4, 3)
    with pytest.raises(TelegradError, match="call this one again"):
        model(x)
    model(x).sum().backward()
    assert net.lazy.weight.grad.shape == (3, 3)
