"""`RemoteModule` between real processes."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn, optim

from telegrad import autograd, rpc
from telegrad.errors import NotInitialized
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.testing.cluster import cluster


class Scale(nn.Module):
    def __init__(self, factor, *, bias=0.0):
        super().__init__()
        self.factor = nn.Parameter(torch.full((2,), float(factor)))
        self.bias = bias

    def forward(self, x, times: int = 1):
        return x * self.factor * times + self.bias


def scripted():
    return torch.jit.script(nn.Linear(2, 2))


def run(module, x):
    return module(x), module.forward_async(x).wait()


def is_training(rref):
    return rref.local_value().training


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(3) as running:
        yield running


@pytest.fixture
def module():
    return RemoteModule("worker1/cpu", Scale, (3,), {"bias": 1.0})


def test_forward_runs_there(module):
    x = torch.ones(2)
    assert module(x).tolist() == [4, 4]
    assert module.forward(x, times=2).tolist() == [7, 7]
    assert module.forward_async(x).wait().tolist() == [4, 4]
    result = module.forward_rref(x)
    assert result.owner_name() == "worker1"
    assert result.to_here().tolist() == [4, 4]


def test_a_worker_is_named_by_its_rank_too():
    assert RemoteModule("rank:2/cpu", Scale, (2,))(torch.ones(2)).tolist() == [2, 2]
    assert RemoteModule("worker2", Scale, (2,))(torch.ones(2)).tolist() == [2, 2]


def test_a_scripted_module_runs_there():
    module = RemoteModule("worker1", scripted)
    assert module(torch.ones(1, 2)).shape == (1, 2)
    assert len(module.remote_parameters()) == 2


def test_it_is_trained_there(module):
    optimizer = DistributedOptimizer(optim.SGD, module.remote_parameters(), lr=1.0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [module(torch.ones(2)).sum()])
        optimizer.step(context_id)
    assert module(torch.ones(2)).tolist() == [3, 3]


def test_train_and_eval_reach_it(module):
    rref = module.get_module_rref()
    for mode in (False, True, False):
        assert module.train(mode) is module
        assert rpc.rpc_sync("worker1", is_training, (rref,)) is mode
        assert module.training is mode
    module.train()
    module.eval()
    assert rpc.rpc_sync("worker1", is_training, (rref,)) is False


def test_sent_to_a_third_worker_it_stays_where_it_is(module):
    module.note = "stays here"
    first, second = rpc.rpc_sync("worker2", run, (module, torch.ones(2)))
    assert first.tolist() == second.tolist() == [4, 4]
    back = rpc.rpc_sync("worker2", lambda m: m, (module,))
    assert (back.on, back.device) == ("worker1", "cpu")
    assert not hasattr(back, "note")


def test_it_can_be_made_from_a_reference(module):
    again = RemoteModule.init_from_module_rref("worker1", module.get_module_rref())
    assert again(torch.ones(2)).tolist() == [4, 4]


def test_what_acts_on_the_empty_shell_is_refused(module):
    for name in ("state_dict", "to", "cuda", "register_forward_hook", "children", "zero_grad"):
        with pytest.raises(
            ValueError, match=rf"{name}\(\) does not work on a RemoteModule.*worker1"
        ):
            getattr(module, name)()
    with pytest.raises(ValueError, match=r"get_module_rref\(\)\.rpc_sync\(\)\.state_dict\("):
        module.state_dict()
    for walk in (module.parameters, nn.Sequential(module).parameters):
        with pytest.raises(
            ValueError, match=r"module is on worker 'worker1': use remote_parameters"
        ):
            list(walk())
    assert repr(module) == "RemoteModule(worker1/cpu)"


def test_a_plain_pickler_is_refused(module):
    with pytest.raises(RuntimeError, match="can only be pickled when using RPC"):
        pickle.dumps(module)


def test_what_is_no_module_is_refused():
    for module_cls, text in [
        (nn.Linear(3, 3), "got an instance of Linear"),
        (dict, "got the class dict, which is not a module's"),
        (3, "got an instance of int"),
    ]:
        with pytest.raises(TypeError, match=rf"module_cls must be a class of modules.*{text}"):
            RemoteModule("worker1", module_cls)
    with pytest.raises(TypeError, match=r"RemoteModule\(\): args must be a tuple, got 2; write"):
        RemoteModule("worker1", Scale, 2)
    with pytest.raises(
        ValueError, match=r"module_cls must return an nn\.Module, and returned a dict"
    ):
        RemoteModule("worker1", lambda: {"not": "one"})(1)
    with pytest.raises(ValueError, match=r"cannot be moved to 'cuda:0' on worker 'worker1'"):
        RemoteModule("worker1/cuda:0", Scale, (2,))(torch.ones(2))


def test_a_place_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Could not parse remote_device"):
        RemoteModule("worker1/cpu/cpu", Scale, (1,))
    with pytest.raises(RuntimeError, match="worker9"):
        RemoteModule("worker9", Scale, (1,))


def test_without_a_worker_it_is_refused(monkeypatch):
    monkeypatch.setattr(rpc, "is_initialized", lambda: False)
    with pytest.raises(NotInitialized):
        RemoteModule("worker1", Scale, (1,))
