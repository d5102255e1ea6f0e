"""Modules on other workers, used like modules of this process."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils._pytree import tree_leaves

import telegrad
from telegrad import rpc
from telegrad.autograd.plain import engine_here
from telegrad.errors import TelegradError
from telegrad.tensors import RemoteTensor
from telegrad.tensors.table import tables_here
from telegrad.testing.cluster import cluster


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(3) as running:
        yield running


class Net(nn.Module):
    """Has what modules have: parts, tied and frozen parameters, buffers, methods, attributes."""

    def __init__(self, width=6, *, scale=1.0):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.body[0].weight
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(width), persistent=False)
        self.register_parameter("nothing", None)
        self.scale = scale

    def forward(self, x, *, extra=None, parts=False):
        self.calls = self.calls + 1  # not in place
        y = self.head(self.body(x)) * self.frozen * self.mask * self.scale
        if extra is not None:
            y = y + extra["more"]
        return {"y": y, "sum": (y.sum(), "text")} if parts else y

    def twice(self, x):
        return self(x) * 2

    @property
    def width(self):
        return self.head.in_features

    def modes(self):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return torch.is_grad_enabled(), dtype, self.training, self.body[0].training


def seeded(seed, cls, *args, **kwargs):
    torch.manual_seed(seed)
    return cls(*args, **kwargs)


def make(far, cls=Net, *args, worker="worker1", seed=1, **kwargs):
    if far:
        return telegrad.module(worker, seeded, seed, cls, *args, **kwargs)
    return seeded(seed, cls, *args, **kwargs)


def inputs(seed=0, width=6):
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed))


def same(program, within=0.0):
    far, near = tree_leaves(program(True)), tree_leaves(program(False))
    assert len(far) == len(near)
    for a, b in zip(far, near, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=0, atol=within)
        else:
            assert a == b


def size_of(key):
    return tables_here().size(key)


def things_left(module):
    """How much the worker of a module keeps for this process, once all three have heard of all
    graphs that have died."""
    end = time.monotonic() + 10.0
    while graphs_left() != [0, 0, 0] and time.monotonic() < end:
        pass
    stream = module._connection.stream
    stream.ask(_nothing)
    return rpc.rpc_sync(stream.worker, size_of, (stream.key,))


def graphs_left():
    return [rpc.rpc_sync(worker, count_graphs) for worker in range(3)]


def count_graphs():
    gc.collect()
    engine_here().flush()
    return sum(engine_here().counts().values())


def _nothing(table):
    pass


# -- calls


def test_arguments_and_results_are_structures_of_tensors():
    def program(far):
        net, x = make(far), inputs().requires_grad_()
        more = torch.ones(6, requires_grad=True)
        out = net(x, extra={"more": more}, parts=True)
        (out["y"].square().sum() + out["sum"][0]).backward()
        return out, x.grad, more.grad, [p.grad for p in net.parameters() if p.grad is not None]

    same(program, 1e-6)


def test_methods_and_attributes_are_those_of_the_class():
    def program(far):
        net = make(far, scale=3.0)
        net.twice(inputs()).sum().backward()
        found = net.scale, net.width, net.body[0].in_features, net.nothing
        net.scale = 0.5
        return found, net.scale, net(inputs()), [p.grad for p in net.body.parameters()]

    same(program, 1e-5)


def test_an_attribute_that_is_not_there_is_an_attribute_error():
    net = make(True)
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'typo'"):
        net.typo
    assert not hasattr(net, "generate")
    assert not hasattr(net, "_private")


def test_a_part_can_be_called():
    def program(far):
        net = make(far)
        net.body(inputs()).sum().backward()
        return net.body[0](inputs()), net.body[0].bias.grad, len(net.body), list(net._modules)

    same(program, 1e-6)


class Lists(nn.Module):
    """Has containers, and a part under two names."""

    def __init__(self):
        super().__init__()
        self.many = nn.ParameterList([torch.ones(2), torch.zeros(2)])
        self.named = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        self.again = self.named["a"]

    def forward(self, x):
        for name in self.named:
            x = self.named[name](x)
        return self.again(x) * self.many[0] + self.many[1]


def test_containers_and_shared_parts_are_those_of_the_class():
    def program(far):
        net, x = make(far, Lists), torch.ones(3, 2)
        net(x).sum().backward()
        shared = net.again is net.named["a"]
        names = list(net.named), len(net.many), list(net.state_dict()), shared
        net.named["b"].eval()
        net.many[1].data.add_(1)
        return names, [p.grad for p in net.parameters()], net.again.weight.grad, net(x)

    same(program, 1e-6)


def test_parts_are_instances_of_their_classes():
    net = make(True)
    assert isinstance(net, Net)
    assert isinstance(net.body, nn.Sequential)
    assert [type(each).__name__ for each in net.modules()] == ["PlacedModule"] + ["PlacedPart"] * 5
    assert [isinstance(each, nn.Linear) for each in net.body] == [True, False, False]
    with pytest.raises(TypeError, match="is not a container of modules"):
        net[0]

    def program(far):
        def init(part):
            if isinstance(part, nn.Linear):
                nn.init.constant_(part.weight, 0.1 * part.in_features)

        return make(far).apply(init).state_dict()

    same(program)


class Normed(nn.Module):
    """torch makes the classes of its parts where they are made: they have no name elsewhere."""

    def __init__(self):
        super().__init__()
        self.one = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.two = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x):
        return self.two(self.one(x))


def test_parts_whose_class_is_not_known_here_are_instances_of_its_bases():
    def program(far):
        net = make(far, Normed)
        assert [isinstance(part, nn.Linear) for part in (net.one, net.two)] == [True, True]
        optimizer = torch.optim.Adam(net.parameters())
        for seed in range(3):
            net(inputs(seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        net.load_state_dict(copy.deepcopy(net.state_dict()))
        return net.state_dict(), list(net.state_dict())

    same(program)


class Counted(nn.Linear):
    """Has state that is not a tensor."""

    count = 0

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


def counted_privately(base):
    class Private(base):
        pass

    if base is nn.Linear:
        Private.get_extra_state = Counted.get_extra_state
        Private.set_extra_state = Counted.set_extra_state
        Private.count = 0
    return Private(2, 2)


@pytest.mark.parametrize("base", [nn.Linear, Counted])
def test_extra_state_is_that_of_the_real_class(base):
    net, other = make(True, counted_privately, base), make(True, counted_privately, base)
    net.count = 5
    other.load_state_dict(net.state_dict())
    assert other.count == 5


def test_a_remote_tensor_is_an_argument_without_moving():
    def program(far):
        net, other = make(far), make(far, nn.Linear, 6, 6, seed=4)
        w = other.weight * 2
        net.body(w).sum().backward()
        return other.weight.grad, net.body[0].bias.grad

    same(program, 1e-5)
    net, other = make(True), make(True, nn.Linear, 6, 6, worker="worker2")
    with pytest.raises(RuntimeError, match="is on worker 'worker2', and is needed on worker"):
        net(other.weight)


def test_modes_of_the_caller_travel():
    net = make(True)
    assert net.modes() == (True, None, True, True)
    net.body.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert net.modes() == (False, torch.float16, True, False)
    net.eval()
    with torch.inference_mode():
        assert net.modes() == (False, None, False, False)
        assert not net(inputs()).requires_grad
    net.train()
    assert net.modes() == (True, None, True, True)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(inputs()).dtype == torch.float32  # batch norm's
        assert net.body[0](inputs()).dtype == torch.bfloat16


class Relay(nn.Module):
    """Calls back, and another module of the same worker."""

    def forward(self, x):
        inner = telegrad.module("worker1", nn.Linear, 2, 2, bias=False)
        nn.init.ones_(inner.weight)
        return inner(x) + rpc.rpc_sync("worker0", torch.ones, (2,))


def test_a_module_may_call_back_and_call_modules_of_its_worker():
    relay = telegrad.module("worker1", Relay)
    assert relay(torch.ones(1, 2)).tolist() == [[3, 3]]


class Gate(nn.Module):
    """One call of it waits for another."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.opened = threading.Event()

    def forward(self):
        assert self.opened.wait(30)
        return self.weight * 2

    def open(self):
        self.opened.set()


def test_calls_of_a_module_run_side_by_side():
    gate = telegrad.module("worker1", Gate)
    found = []
    thread = threading.Thread(target=lambda: found.append(gate().item()))
    thread.start()
    gate.weight.data.mul_(1.0)
    gate.open()
    thread.join()
    assert found == [2.0]


def test_a_module_may_be_on_this_worker_itself():
    net = telegrad.module("worker0", nn.Linear, 2, 3)
    net(torch.ones(1, 2)).sum().backward()
    assert isinstance(net.weight.grad, RemoteTensor)
    assert net.weight.grad.tolist() == [[1, 1]] * 3
    assert telegrad.module(1, nn.Linear, 2, 3).worker == "worker1"


# -- gradients


def test_gradients_are_those_of_one_process():
    def program(far):
        net, seen = make(far), []
        ps = [p for p in net.parameters() if p.requires_grad]
        out = torch.autograd.grad(net(inputs()).square().sum(), ps)
        net(inputs()).square().sum().backward(inputs=ps[1:2])
        hook = ps[1].register_hook(lambda g: g * 3)
        ps[0].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        net(inputs(2)).square().sum().backward()
        hook.remove()
        loss = net(inputs(3)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return out, seen, [p.grad for p in ps]

    same(program, 1e-5)


def test_gradients_accumulate_and_are_cleared():
    def program(far):
        net = make(far)
        net(inputs(0)).square().sum().backward()
        net(inputs(1)).square().sum().backward()
        p = net.body[0].weight
        held = p.grad
        net.zero_grad()
        assert p.grad is None
        net(inputs(2)).square().sum().backward()
        first = p.grad.clone()
        net.zero_grad(set_to_none=False)
        kept = p.grad
        net(inputs(3)).square().sum().backward()
        assert p.grad is kept
        p.grad = torch.ones_like(p)
        net(inputs(4)).square().sum().backward()
        return held, first, kept, p.grad

    same(program, 1e-5)


def test_parameters_are_frozen_and_thawed():
    def program(far):
        net = make(far)
        net.requires_grad_(False)
        before = net(inputs()).requires_grad
        net.head.weight.requires_grad_()
        net(inputs()).square().sum().backward()
        return before, [p.grad is None for p in net.parameters()], net.head.weight.grad

    same(program, 1e-5)


def test_a_penalty_on_parameters_may_be_part_of_the_loss():
    def program(far):
        net = make(far)
        penalty = sum(p.square().sum().cpu() for p in net.parameters())
        (net(inputs()).square().sum() + 0.1 * penalty).backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    same(program, 1e-4)


def test_values_of_gradients_are_clipped():
    def program(far):
        net = make(far)
        net(inputs()).square().sum().backward()
        nn.utils.clip_grad_value_(net.parameters(), 1e-3)
        return [p.grad for p in net.parameters() if p.grad is not None]

    same(program)


def test_other_parameters_may_be_used_for_one_call():
    def program(far):
        net = make(far, nn.Linear, 6, 6)
        w = (net.weight * 2).detach().requires_grad_()
        torch.func.functional_call(net, {"weight": w * 1.0}, (inputs(),)).sum().backward()
        return w.grad, net(inputs())

    same(program, 1e-5)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SparseAdam,
        torch.optim.Adagrad,
        torch.optim.SGD,
        partial(torch.optim.SGD, momentum=0.9),
    ],
)
def test_sparse_gradients_are_those_of_one_process(cls, optimizer):
    def program(far):
        net = make(far, cls, 9, 3, sparse=True)
        optimize = optimizer(list(net.parameters()), lr=0.1)
        seen = []
        for step in range(4):
            for place in range(2):  # accumulated
                net(torch.tensor([[step, place, 2, 2]])).square().sum().backward()
            assert net.weight.grad.is_sparse
            seen.append(net.weight.grad.coalesce().values())
            optimize.step()
            optimize.zero_grad()
        return seen, net.weight, net.weight.grad is None

    same(program)


# -- state


def test_names_are_those_of_the_class():
    def program(far):
        net = make(far)
        return (
            [name for name, _ in net.named_parameters()],
            [name for name, _ in net.named_parameters(remove_duplicate=False)],
            [name for name, _ in net.named_buffers()],
            [name for name, _ in net.named_modules()],
            list(net.state_dict()),
            [p.requires_grad for p in net.parameters()],
            net.get_submodule("body.0").in_features,
        )

    same(program)


def test_buffers_that_a_method_replaces_are_seen_here():
    def program(far):
        net = make(far)
        for seed in range(3):
            net(inputs(seed))
        net.calls.add_(10)
        net(inputs())
        return net.calls, net.body[2].running_mean, net.body[2].num_batches_tracked

    same(program, 1e-6)


@pytest.mark.parametrize("assign", [False, True])
def test_state_moves_between_one_process_and_many(assign):
    def program(far):
        net, near, file = make(far), make(False, seed=9), io.BytesIO()
        if assign:  # of tied tensors, torch assigns several parameters that share their memory
            net, near = net.body, near.body
        net(inputs())
        torch.save(net.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert all(type(value) is torch.Tensor for value in loaded.values())
        near.load_state_dict({key: value * 2 for key, value in loaded.items()})
        result = net.load_state_dict(near.state_dict(), assign=assign)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(inputs()).square().sum().backward()
        optimizer.step()
        return list(loaded), net.state_dict(), net(inputs()), list(result.missing_keys)

    same(program, 1e-5)
    net = make(True)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*'?other'?"):
        net.load_state_dict({**net.state_dict(), "other": torch.ones(1)})


def test_a_module_is_converted_where_it_is():
    def program(far):
        net = make(far)
        net(inputs()).square().sum().backward()
        net.to(torch.bfloat16)
        dtypes = [t.dtype for t in net.state_dict().values()]
        net.double().zero_grad()
        net.to("cpu").cpu()
        net(inputs().double()).square().sum().backward()
        return dtypes, net.state_dict(), [p.grad for p in net.parameters() if p.requires_grad]

    same(program, 1e-5)
    net = make(True).half().cpu()
    assert isinstance(net.frozen, RemoteTensor)
    with pytest.raises(RuntimeError, match="cannot be moved to"):
        net.to("meta")
    with pytest.raises(RuntimeError, match="share_memory_"):
        net.share_memory()


@pytest.mark.parametrize(
    "flag", ["swap_module_params_on_conversion", "overwrite_module_params_on_conversion"]
)
def test_the_ways_in_which_torch_converts_work(flag):
    def program(far):
        getattr(torch.__future__, f"set_{flag}")(True)
        try:
            net = make(far, nn.Linear, 6, 6).double()
            net(inputs().double()).sum().backward()
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            return net.state_dict()
        finally:
            getattr(torch.__future__, f"set_{flag}")(False)

    same(program, 1e-6)


def test_a_deep_copy_is_another_module_of_the_worker():
    def program(far):
        net = make(far)
        net.eval()
        net.register_forward_hook(lambda module, args, out: out + 1)
        new = copy.deepcopy(net)
        new(inputs()).square().sum().backward()
        torch.optim.SGD(new.parameters(), lr=0.1).step()
        tied = new.head.weight is new.body[0].weight
        return net.state_dict(), new.state_dict(), new(inputs()), tied, new.training

    same(program, 1e-5)


@pytest.mark.parametrize("ema", [False, True])
def test_weights_are_averaged(ema):
    def program(far):
        net = nn.Sequential(make(far, nn.Linear, 6, 6), nn.BatchNorm1d(6))
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9) if ema else None
        averaged = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=average, use_buffers=ema)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for seed in range(3):
            net(inputs(seed)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            averaged.update_parameters(net)
        torch.optim.swa_utils.update_bn([inputs(1), inputs(2)], averaged)
        return averaged.state_dict(), averaged(inputs())

    same(program, 1e-5)


def test_modules_of_one_worker_share_a_weight():
    def program(far):
        net = nn.ModuleList([make(far, nn.Embedding, 20, 6), make(far, nn.Linear, 6, 20, seed=2)])
        net[1].weight = net[0].weight
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        x = torch.arange(20)
        for _ in range(3):
            F.cross_entropy(net[1](net[0](x)), x).backward()
            optimizer.step()
            optimizer.zero_grad()
        new = copy.deepcopy(net)
        return len(list(net.parameters())), net.state_dict(), new[1].weight is new[0].weight

    same(program, 1e-6)


def test_it_prints_like_the_real_one():
    net = make(True, nn.Linear, 2, 3)
    assert repr(net) == "Linear(in_features=2, out_features=3, bias=True) on worker 'worker1'"
    assert net.extra_repr() == "in_features=2, out_features=3, bias=True"
    assert "(0): Linear(in_features=2, out_features=3, bias=True) on worker 'worker1'" in repr(
        nn.Sequential(net)
    )


def test_hooks_of_the_whole_module_run_here():
    def program(far):
        net, seen = make(far, nn.Linear, 6, 6), []
        net.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        net.register_forward_hook(lambda module, args, out: out * 3)
        net.register_full_backward_hook(lambda module, gi, go: seen.append((gi, go)))
        net(inputs().requires_grad_()).sum().backward()
        return net.weight.grad, seen

    same(program, 1e-4)
    with pytest.raises(TelegradError, match="a hook of this process is not called"):
        make(True).body.register_forward_hook(print)


# -- mistakes


def test_what_cannot_be_done_from_here_is_refused():
    net = make(True)
    with pytest.raises(TypeError, match=r"cannot be pickled or sent: save its state_dict\(\)"):
        pickle.dumps(net)
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save(nn.Sequential(net), io.BytesIO())
    with pytest.raises(TelegradError, match="cannot get a module 'head' from here"):
        net.head = nn.Linear(6, 6)
    with pytest.raises(TelegradError, match="cannot get a module 'more' from here"):
        net.add_module("more", nn.Linear(6, 6))
    with pytest.raises(TelegradError, match="is a tensor of this process, and belongs to"):
        net.frozen = nn.Parameter(torch.ones(6))
    with pytest.raises(TelegradError, match="has no parameter or buffer 'other'"):
        net.register_buffer("other", torch.ones(6))
    with pytest.raises(TelegradError, match=r"from here: (do it|register them) in a method"):
        nn.utils.parametrizations.weight_norm(net.head)
    for name in ("frozen", "mask", "body"):
        with pytest.raises(TelegradError, match=f"{name!r} of the Net.*cannot be deleted"):
            delattr(net, name)
    with pytest.raises(TelegradError, match=r"torch\.func transforms"):
        torch.func.grad(lambda p: torch.func.functional_call(net, p, inputs()).sum())(
            {name: p.detach() for name, p in net.named_parameters()}
        )
    with pytest.raises(TypeError, match="can only be copied with the whole module"):
        copy.deepcopy(net.body)
    with pytest.raises(TypeError, match="needs a class of modules"):
        telegrad.module("worker1", nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"returns an nn\.Module"):
        telegrad.module("worker1", dict.fromkeys, ["a"])
    with pytest.raises(TelegradError, match="worker9"):
        telegrad.module("worker9", nn.Linear, 2, 2)
    with pytest.raises(TypeError, match="got a NoneType"):
        telegrad.module(None, nn.Linear, 2, 2)
    other = make(True, worker="worker2")
    with pytest.raises(RuntimeError, match="copy_ copies from one worker to another"):
        net.frozen = other.frozen
    with pytest.raises(NotImplementedError, match="register parametrizations"):
        nn.utils.parametrizations.spectral_norm(net.head)
    with pytest.raises(TelegradError, match="none can be added from here"):
        prune.identity(net.head, "weight")
    net(inputs())  # it goes on


def test_errors_of_a_call_are_raised_here_and_the_module_goes_on():
    net = make(True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.ones(2, 3))
    net.mask.mul_(2.0)
    with pytest.raises(Exception, match=r"lock|pickle"):
        net(threading.Lock())  # it cannot be sent: what was to be sent with it is not lost
    assert net.mask.tolist() == [2.0] * 6
    net(inputs()).sum().backward()


def test_nothing_is_left_of_a_module_that_is_gone():
    keeper = make(True, nn.Linear, 1, 1)
    gc.collect()
    before = things_left(keeper)
    net = make(True)
    optimizer = torch.optim.AdamW(net.parameters())
    for seed in range(3):
        net(inputs(seed)).square().sum().backward()
        optimizer.step()
    copy.deepcopy(net)(inputs())
    net.state_dict()
    assert things_left(keeper) > before
    del net, optimizer
    gc.collect()
    assert things_left(keeper) == before


@pytest.mark.parametrize("both", [True, False])
def test_a_penalty_on_the_gradient_of_the_input_reaches_the_parameters(both):
    outcomes = []
    for far in (True, False):
        net, x = make(far), inputs().requires_grad_()
        loss = net(x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (gradient.square().sum() + (loss if both else 0)).backward()
        outcomes.append([x.grad, *[p.grad for p in net.parameters()]])
    for there, here in zip(*outcomes, strict=True):
        if here is None:
            assert there is None
        else:
            torch.testing.assert_close(there.cpu(), here)


def gradients(module):
    return [parameter.grad for parameter in module.parameters()]


def norm_of(tensors):
    return sum(each.cpu().square().sum() for each in tensors)


def test_a_penalty_on_the_gradients_of_parameters():
    def program(far):
        net, other = make(far), make(far, worker="worker2", seed=2)
        x = inputs().requires_grad_()
        loss = (net(x).sin() * other(net(x * 2))).sum()
        parts = [x, *(p for m in (net, other) for p in m.parameters() if p.requires_grad)]
        (loss + norm_of(torch.autograd.grad(loss, parts, create_graph=True))).backward()
        return x.grad, gradients(net), gradients(other)

    same(program, 1e-3)


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def test_third_derivatives_of_parameters():
    def program(far):
        net = make(far, mlp)
        parameters = list(net.parameters())
        first = torch.autograd.grad(net(inputs()).sin().sum(), parameters, create_graph=True)
        second = torch.autograd.grad(norm_of(first), parameters, create_graph=True)
        (norm_of(second) * 1e-4).backward()
        return gradients(net)

    same(program, 1e-3)


def test_meta_learning_through_steps_on_the_parameters():
    def program(far):
        net, losses = make(far, mlp), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(2):
            fast = dict(net.named_parameters())
            for seed in range(2):
                loss = torch.func.functional_call(net, fast, (inputs(seed),)).square().mean()
                found = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), found, strict=True)}
            loss = torch.func.functional_call(net, fast, (inputs(9),)).sin().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, gradients(net)

    same(program, 1e-4)


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, 0.4]))
        self.kept = []

    def forward(self, x):
        if not self.kept:
            self.kept.append(self.weight.tanh())
        return x * self.kept[0]


@pytest.mark.parametrize("uses_both", [True, False])
@pytest.mark.parametrize("way", ["grad", "backward"])
def test_what_a_module_has_computed_once_leads_to_its_parameters(uses_both, way):
    """Also if the loss does not use the result of another call, which does so, too."""

    def program(far):
        net, x = make(far, Caching), torch.ones(2, requires_grad=True)
        first, second = net(x), net(x * 2)
        loss = first.sin().sum() + (second.sum() if uses_both else 0)
        if way == "grad":
            return torch.autograd.grad(loss, [net.weight, x])
        loss.backward()
        return net.weight.grad, x.grad

    same(program, 1e-6)


@pytest.mark.parametrize("wanted", ["input", "behind", "itself", "before"])
@pytest.mark.parametrize("submitted", [True, False])
def test_no_second_derivative_is_left_out(wanted, submitted):
    """`torch.autograd.grad` and `inputs=` run only what leads to what is wanted."""

    def program(far):
        net, before = make(far), make(far, worker="worker2", seed=2)
        torch.manual_seed(5)
        behind, x = nn.Linear(6, 6), inputs().requires_grad_()
        y = before(x)
        y = behind(net.submit(y).result() if far and submitted else net(y))
        (gradient,) = torch.autograd.grad(y.square().mean(), net.head.weight, create_graph=True)
        leaf = {
            "input": x,
            "behind": behind.weight,
            "itself": net.head.weight,
            "before": before.head.weight,
        }[wanted]
        loss = gradient.square().sum().cpu() + leaf.square().sum().cpu()
        (found,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        loss.backward(inputs=[leaf])
        return found, leaf.grad

    same(program, 1e-5)


class Penalized(nn.Linear):
    def penalty(self, x):
        loss = self(x).square().sum()
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return sum(each.square().sum() for each in gradients)


def test_a_method_may_compute_second_derivatives():
    def program(far):
        net = make(far, Penalized, 6, 6)
        penalty = net.penalty(inputs())
        penalty.backward()
        return penalty, [p.grad for p in net.parameters()]

    same(program)


def test_a_module_cannot_be_an_argument():
    with pytest.raises(TelegradError, match="call it here and send its result"):
        telegrad.call("worker2", type, make(True))


def test_what_is_done_to_tensors_in_inference_mode():
    def program(far):
        net = make(far)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(inputs()).sum().backward()
        with torch.inference_mode():
            before = {name: value.cpu().clone() for name, value in net.state_dict().items()}
            net.head.weight.mul_(2)
            seen = [
                net.head(inputs(1)),
                net.head.weight.t().sum().item(),
                net.frozen.detach().cpu(),
            ]
            views = net.head.weight.t(), net.head.weight.detach()
        assert not any(view.is_inference() for view in views)
        optimizer.step()
        after = [parameter.detach().clone() for parameter in net.parameters()]
        net.load_state_dict(before)
        optimizer.zero_grad()
        net(inputs(2)).square().sum().backward()
        return [seen, after, [p.grad for p in net.parameters()]]

    same(program, within=1e-5)


# -- without waiting


def submitted(far, module, *args):
    return module.submit(*args).result() if far else module(*args)


def test_a_submitted_call_is_a_call():
    def program(far):
        net, x = make(far), inputs().requires_grad_()
        out = submitted(far, net, x)
        again = submitted(far, net, out)
        (out.square().sum() + again.sum()).backward()
        return out, again, x.grad, [p.grad for p in net.parameters()], net.calls

    same(program, 1e-5)


def test_gradients_reach_all_parameters_though_no_future_is_left():
    """A pass needs the calls of both futures, though their workers were told that these died."""

    def program(far):
        first, second = make(far), make(far, worker="worker2", seed=2)
        x = inputs().requires_grad_()
        out = second.submit(first.submit(x)).result() if far else second(first(x))
        engine_here().flush()
        for _ in range(50 if far else 0):
            telegrad.call("worker1", int), telegrad.call("worker2", int)
        out.square().sum().backward()
        return x.grad, [p.grad for m in (first, second) for p in m.parameters()]

    same(program, within=1e-4)


def test_futures_of_modules_go_from_worker_to_worker_with_their_gradients():
    def program(far):
        first, second = make(far), make(far, worker="worker2", seed=2)
        x = inputs().requires_grad_()
        hidden = first.submit(x) if far else first(x)
        out = second.submit(hidden).result() if far else second(hidden)
        loss = out.square().sum()
        loss.backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, first.head.weight, retain_graph=True)
        loss.backward()
        return x.grad, gradient, [p.grad for m in (first, second) for p in m.parameters()]

    same(program, 1e-4)


def test_a_method_is_submitted():
    net, local = make(True), make(False)
    assert torch.allclose(net.twice.submit(inputs()).result(), local.twice(inputs()), atol=1e-5)


def test_a_future_is_used_by_several():
    def program(far):
        first, second = make(far), make(far, worker="worker2", seed=2)
        hidden = first.submit(inputs()) if far else first(inputs())
        value = hidden.result() if far else hidden
        (second(hidden).sum() + first(hidden).square().sum() + value.sum()).backward()
        return [p.grad for m in (first, second) for p in m.parameters()]

    same(program, 1e-3)


def test_a_submitted_call_that_fails_is_raised_by_its_future():
    net = make(True)
    future = net.submit(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        future.result()
    assert net.submit(inputs()).result().shape == (8, 6)


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self):
        return self.weight


def test_a_parameter_that_a_submitted_call_returns_gets_its_gradient():
    holder = telegrad.module("worker1", Weight)
    (holder.submit().result() * 2).sum().backward()
    assert holder.weight.grad.tolist() == [2.0] * 3
    assert holder.submit().result().sum().item() == 3


def test_second_derivatives_through_a_future_that_went_from_worker_to_worker_are_refused():
    first, second = make(True), make(True, worker="worker2")
    x = inputs().requires_grad_()
    out = second.submit(first.submit(x)).result()
    with pytest.raises(TelegradError, match="the gradient has no way from here"):
        (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()


def test_nothing_is_left_of_submitted_calls():
    keeper = make(True, nn.Linear, 1, 1)
    net = make(True)
    before = things_left(keeper)
    for seed in range(50):
        net.submit(inputs(seed))  # is dropped
        with torch.no_grad():
            net.submit(inputs(seed)).result()
        net.submit(torch.ones(2, 3)).exception()
        net.submit(inputs(seed)).result().sum().backward()
        net.zero_grad()
    assert things_left(keeper) == before
    assert graphs_left() == [0, 0, 0]
