"""The functions that a context keeps for what it sent, as those who look inside see them."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from telegrad.autograd.contexts.message_nodes import SendFunction, recv_history
from telegrad.errors import BackwardError


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def name_of(edge):
    return edge[0].name()


def test_they_lead_to_the_histories_of_what_was_sent():
    leaf = torch.ones(2, requires_grad=True)
    python_made = Double.apply(leaf)
    parts = torch.ones(4, requires_grad=True).split(2)
    sent = SendFunction([leaf, leaf * 2, python_made, parts[1]], to=3)
    assert sent.name() == "torch::distributed::autograd::SendRpcBackward"
    names = [name_of(edge) for edge in sent.next_functions]
    assert names[:2] == ["torch::autograd::AccumulateGrad", "MulBackward0"]
    assert sent.next_functions[0][0].variable is leaf
    assert sent.next_functions[2][0] is python_made.grad_fn
    assert sent.next_functions[3][1] == 1  # the second output of the split
    assert sent.to == 3


@pytest.mark.parametrize("is_enabled", [True, False])
def test_leaves_are_found_in_any_grad_mode(is_enabled):
    leaf = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(is_enabled):
        sent = SendFunction([leaf], to=1)
    assert sent.next_functions[0][0].variable is leaf


def test_sparse_tensors_and_subclasses_have_edges_too():
    class Named(torch.Tensor):
        pass

    sparse = torch.eye(2).to_sparse().requires_grad_()
    named = torch.ones(2).as_subclass(Named).requires_grad_()
    sent = SendFunction([sparse, named], to=1)
    assert sent.next_functions[0][0].variable is sparse
    assert sent.next_functions[1][0].variable is named


def test_views_have_edges_too():
    base, scale = torch.ones(4), torch.ones(4, requires_grad=True)
    leaf = torch.ones(4)[:2].requires_grad_()
    of_changed, of_leaf = base[:2], torch.ones(4, requires_grad=True)[:2]
    base.mul_(scale)  # gives its views a history
    leaf_of_leaf = torch.ones(4)
    inner = leaf_of_leaf[:2].requires_grad_()
    leaf_of_leaf.requires_grad_()
    sent = SendFunction([leaf, of_changed, of_leaf, inner], to=1)
    assert sent.next_functions[0][0].variable is leaf
    assert [name_of(edge) for edge in sent.next_functions[1:3]] == [
        "AsStridedBackward0",
        "SliceBackward0",
    ]
    assert sent.next_functions[3][0].variable is inner


class Replace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, array):
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_python_nodes_are_kept_and_the_memory_of_their_outputs_is_not():
    leaf = torch.ones(2, requires_grad=True)
    arrays = [np.ones(1000, np.float32), np.ones(1000, np.float32)]
    node, (received,) = recv_history(1, 0, [torch.from_numpy(arrays[0])])
    replaced = Replace.apply(leaf, arrays[1])
    sent = SendFunction([replaced, received], to=1)
    memory = [weakref.ref(array) for array in arrays]
    del arrays
    gc.collect()
    assert all(array() is not None for array in memory)  # the tensors have it
    del node, received, replaced
    gc.collect()
    assert [array() for array in memory] == [None, None]
    replace, recv = (node for node, _ in sent.next_functions)
    assert replace.next_functions[0][0].variable is leaf
    assert recv.received.message_id == 1


class Overtaken(SendFunction):
    """One of which another thread finds the edges right after this one has seen that there are
    none yet."""

    found = None
    reads = 0

    @property
    def _edges(self):
        before = self.found
        self.reads += 1
        if self.reads == 1:
            SendFunction.next_functions.fget(self)  # the other thread, from beginning to end
        return before

    @_edges.setter
    def _edges(self, edges):
        self.found = edges


def test_two_threads_may_ask_for_the_edges_at_once():
    leaves = [torch.ones(1, requires_grad=True) for _ in range(2)]
    sent = Overtaken(leaves, to=1)
    for _ in range(2):
        assert [
            node.variable is leaf
            for (node, _), leaf in zip(sent.next_functions, leaves, strict=True)
        ] == [True, True]


def test_one_refuses_inputs():
    sent = SendFunction([torch.ones(2, requires_grad=True)], to=1)
    with pytest.raises(BackwardError, match="takes no inputs"):
        sent(torch.ones(2))


def test_one_refuses_undefined_gradients():
    sent = SendFunction([torch.ones(2, requires_grad=True) for _ in range(2)], to=1)
    with pytest.raises(BackwardError, match="undefined gradient"):
        sent()
    sent.set_grads([None, torch.ones(2)])
    with pytest.raises(BackwardError, match="undefined gradient"):
        sent()
    sent.set_grads([torch.ones(2), torch.zeros(2)])
    assert [grad.sum().item() for grad in sent()] == [2.0, 0.0]


ALL_THREADS = """
import threading, time
import torch
from telegrad.autograd.contexts.message_nodes import SendFunction

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

leaf = torch.ones(4, requires_grad=True)
sent = SendFunction([leaf], to=1)
assert sent.next_functions[0][0].variable is leaf
end = time.monotonic() + 3

def use(function):
    while time.monotonic() < end:
        function(leaf)

uses = [lambda x: x * 2, lambda x: x * 2, Double.apply]
threads = [threading.Thread(target=use, args=(function,), daemon=True) for function in uses]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


LOOKED_UP = """
import sys, threading, time
import torch
from telegrad.autograd.contexts.message_nodes import SendFunction

class Named(torch.Tensor):
    pass

leaf = {leaf}.requires_grad_()
is_over = False

def compute():
    while not is_over:
        leaf.neg()

threads = [threading.Thread(target=compute) for _ in range(2)]
for thread in threads:
    thread.start()
sys.setswitchinterval(1e-5)
end = time.monotonic() + 2
while time.monotonic() < end:
    assert SendFunction([leaf], to=1).next_functions[0][0].variable is leaf
is_over = True
for thread in threads:
    thread.join()
"""


def runs_to_its_end(program):
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, timeout=60, check=False).returncode == 0


def test_a_leaf_that_was_sent_can_be_used_by_all_threads():
    """With nothing but the object of its AccumulateGrad node kept, these threads stand still within
    a second: see `nodes`."""
    assert runs_to_its_end(ALL_THREADS)


@pytest.mark.parametrize(
    "leaf",
    [
        "torch.eye(2)",
        "torch.eye(2)[0]",
        "torch.eye(2).to_sparse()",
        "torch.eye(2).as_subclass(Named)",
    ],
    ids=["plain", "view", "sparse", "subclass"],
)
def test_a_leaf_can_be_sent_while_others_compute_with_it(leaf):
    """Looked up by the `apply` of a Python function, or asked for its `grad_fn` if it is a view,
    they stand still within a second."""
    assert runs_to_its_end(LOOKED_UP.format(leaf=leaf))
