"""Functions that `torch.compile` has compiled call other workers, inside of contexts and around
them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import telegrad.autograd as dist_autograd
from telegrad import rpc
from telegrad.testing.cluster import cluster

# torch's compiler asks every tensor for its .grad, and means to hide what torch says to that.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Tripled:
    def of(self, x):
        return 3 * x


def synchronously(x):
    y = x * 2
    z = rpc.rpc_sync("worker1", torch.mul, (y, 3))
    return (z.sin() * y).sum()


def at_once(x):
    later = rpc.rpc_async("worker1", torch.mul, (x, 5))
    kept = rpc.remote("worker1", torch.mul, (x, 3))
    return (later.wait() * kept.to_here().cos()).sum()


def by_methods(x):
    there = rpc.remote("worker1", Tripled)
    return (there.rpc_sync().of(x) * there.rpc_async().of(x.exp()).wait()).sum()


def gradient(forward, x):
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [forward(x)])
        return dist_autograd.get_gradients(context_id)[x]


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(2) as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()


@pytest.mark.parametrize("forward", [synchronously, at_once, by_methods])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_that_calls_has_the_same_gradients(forward, backend):
    compiled = torch.compile(forward, backend=backend)
    x = torch.rand(3, requires_grad=True)
    for _ in range(2):
        torch.testing.assert_close(gradient(compiled, x), gradient(forward, x))


@pytest.mark.parametrize("forward", [synchronously, at_once, by_methods])
def test_a_whole_step_can_be_compiled(forward):
    x = torch.rand(3, requires_grad=True)
    step = torch.compile(gradient, backend="eager")
    torch.testing.assert_close(step(forward, x), gradient(forward, x))


CALLS_ITSELF = """
import torch, telegrad
from telegrad import rpc

def twice(x):
    return rpc.rpc_sync("alone", torch.mul, (x + 1, 2)) - 1

rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.RpcOptions(init_method="file://{}"))
print(torch.compile(twice, backend="eager")(torch.ones(2)).tolist())
rpc.shutdown()
"""


@pytest.mark.parametrize("first", ["torch._dynamo", "telegrad"])
def test_it_does_not_matter_which_is_imported_first(first, tmp_path):
    program = f"import {first}\n" + CALLS_ITSELF.format(tmp_path / "meeting")
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.stdout == "[3.0, 3.0]\n", ran.stderr


def test_the_compiler_is_not_imported_for_it():
    program = "import sys, telegrad; print('torch._dynamo' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert ran.stdout == "False\n"
