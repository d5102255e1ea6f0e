"""Pictures of the graphs behind plain calls and remote modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import telegrad
from telegrad.observe import draw
from telegrad.testing.cluster import cluster


@pytest.fixture(scope="module")
def group():
    with cluster(3) as running:
        yield running


def leaf():
    return torch.ones(3, requires_grad=True)


def nested(x):
    return telegrad.call("worker2", torch.exp, x * 2) + x


def lines(picture):
    return [" ".join(line.split()) for line in str(picture).splitlines()]


def test_a_loss_shows_what_backward_goes_through(group):
    loss = telegrad.call("worker1", torch.mul, leaf(), 2).sum()
    assert str(draw(loss, title="a call")).splitlines() == [
        "a call",
        "",
        "worker0                   worker1",
        "───────                   ───────",
        "1 leaf [3]",
        "2 send ← 1",
        "└────── [3] · 12 B ──────▶",
        "                          1 receive",
        "                          2 Mul [3] ← 1",
        "                          3 send ← 2",
        "◀────── [3] · 12 B ──────┘",
        "3 receive",
        "4 Sum scalar ← 3 (root)",
    ]


def test_looking_changes_nothing(group):
    x = leaf()
    loss = telegrad.call("worker1", nested, x).sum()
    assert draw(loss).graph == draw(loss).graph
    loss.backward()
    assert torch.allclose(x.grad, 2 * torch.exp(2 * torch.ones(3)) + 1)


def test_parameters_stand_on_the_worker_that_has_them(group):
    model = nn.Sequential(
        telegrad.module("worker1", nn.Embedding, 10, 4),
        telegrad.module("worker2", nn.Linear, 4, 2),
    )
    graph = draw(model(torch.arange(3)).sum()).graph
    leaves = {part.name: sum(box.leaf_count for box in part.boxes) for part in graph.workers}
    assert leaves == {"worker0": 0, "worker1": 1, "worker2": 2}
    # Words have no gradient, so they are no part of the graph.
    shapes = sorted(box.sizes[0].shape for box in graph.messages.values())
    assert shapes == [(3, 2), (3, 4), (3, 4)]


def test_nested_calls_reach_workers_that_the_caller_never_spoke_to(group):
    shown = str(draw(telegrad.call("worker1", nested, leaf()).sum()))
    assert "Exp [3]" in shown
    assert shown.count("[3] · 12 B") == 4


def test_a_future_goes_straight_from_worker_to_worker(group):
    x = leaf()
    first = telegrad.submit("worker1", torch.mul, x, 2)
    graph = draw(telegrad.submit("worker2", torch.mul, first, 3).result().sum()).graph
    sent = sorted((at, box.peer) for at, box in graph.boxes() if box.names == (("send", 1),))
    assert sent == [(0, 1), (1, 2), (2, 0)]


def test_calls_to_oneself_are_arrows_within_a_column(group):
    picture = draw(telegrad.call("worker0", torch.mul, leaf(), 2).sum())
    assert "Mul [3]" in str(picture)
    assert [part.name for part in picture.graph.workers] == ["worker0"]
    assert len(picture.graph.messages) == 2


def test_what_a_pass_has_freed_is_said(group):
    loss = telegrad.call("worker1", torch.mul, leaf(), 2).sum()
    loss.backward(retain_graph=True)
    assert "Mul" in str(draw(loss))
    loss.backward()
    assert "worker1 has freed its graph in a backward pass" in lines(draw(loss))


def test_what_has_no_graph_cannot_be_drawn(group):
    with pytest.raises(ValueError, match="has no history: draw what a computation"):
        draw(leaf())
    with pytest.raises(TypeError, match=r"roots\[1\] must be a tensor, got float"):
        draw([leaf().sum(), 1.0])
