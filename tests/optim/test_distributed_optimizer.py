"""`DistributedOptimizer` between real processes, with local optimizers as the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

from telegrad import autograd, rpc
from telegrad.errors import ContextError, RemoteError, WorkerLost
from telegrad.optim import DistributedLRScheduler, DistributedOptimizer
from telegrad.optim.local import Group, LocalOptimizer
from telegrad.optim.together import wait_for_all
from telegrad.rpc import RRef
from telegrad.testing.cluster import cluster


class Weight:
    def __init__(self, seed):
        self.w = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_()

    def forward(self, x):
        return self.w @ x

    def get(self):
        return self.w

    def grad(self):
        return self.w.grad


class FailsToStep(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        raise ValueError("no step today")


class FailsToBegin(optim.Optimizer):
    def __init__(self, params):
        raise KeyError("no optimizer today")


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(3) as running:
        yield running


@pytest.fixture
def weights():
    return [rpc.remote("worker1", Weight, (1,)), rpc.remote("worker2", Weight, (2,))]


def references(weights):
    return [weight.remote().get() for weight in weights]


def train(weights, optimizer, steps=1):
    x = torch.ones(3, 1)
    for _ in range(steps):
        with autograd.context() as context_id:
            for weight in weights:
                x = weight.rpc_sync().forward(x)
            autograd.backward(context_id, [x.sum()])
            optimizer.step(context_id)
        x = torch.ones(3, 1)


def train_locally(make, steps=1):
    weights = [Weight(1), Weight(2)]
    optimizer = make(weights)
    for _ in range(steps):
        optimizer.zero_grad()
        weights[1].forward(weights[0].forward(torch.ones(3, 1))).sum().backward()
        optimizer.step()
    return [weight.w.detach() for weight in weights]


def values(weights):
    return [weight.rpc_sync().get().detach() for weight in weights]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        (optim.Adam, {"lr": 0.01, "amsgrad": True}),
        (optim.Adagrad, {"lr": 0.05}),
        (optim.RMSprop, {"lr": 0.05}),
    ],
)
def test_it_does_what_the_optimizer_does_locally(weights, optimizer, options):
    expected = train_locally(lambda w: optimizer([v.w for v in w], **options), steps=3)
    train(weights, DistributedOptimizer(optimizer, references(weights), **options), steps=3)
    for found, wanted in zip(values(weights), expected, strict=True):
        assert torch.equal(found, wanted)


def test_parameter_groups_have_options_of_their_own(weights):
    expected = train_locally(
        lambda w: optim.SGD([{"params": [w[0].w]}, {"params": w[1].w, "lr": 0.5}], lr=0.1)
    )
    first, second = references(weights)
    groups = [{"params": [first]}, {"params": second, "lr": 0.5}]
    train(weights, DistributedOptimizer(optim.SGD, groups, lr=0.1))
    for found, wanted in zip(values(weights), expected, strict=True):
        assert torch.equal(found, wanted)


def test_grad_is_the_programs_own(weights):
    train(weights, DistributedOptimizer(optim.SGD, references(weights), lr=0.1))
    assert all(weight.rpc_sync().grad() is None for weight in weights)


def test_a_parameter_without_a_gradient_in_the_context_is_not_stepped(weights):
    """Whatever the program has in its `.grad`."""
    idle = Weight(3)
    idle.w.grad = torch.ones(3, 3)
    before = idle.w.detach().clone()
    optimizer = DistributedOptimizer(
        optim.SGD, [RRef(idle.w), *references(weights)], lr=0.1, weight_decay=0.1
    )
    train(weights, optimizer)
    assert torch.equal(idle.w, before)
    assert torch.equal(idle.w.grad, torch.ones(3, 3))


def test_state_can_be_saved_and_loaded(weights):
    optimizer = DistributedOptimizer(optim.Adam, references(weights), lr=0.01)
    train(weights, optimizer, steps=2)
    saved = optimizer.state_dict()
    assert set(saved["workers"]) == {"worker1", "worker2"}
    again = DistributedOptimizer(optim.Adam, references(weights), lr=0.5)
    again.load_state_dict(saved)
    train(weights, again)
    expected = train_locally(lambda w: optim.Adam([v.w for v in w], lr=0.01), steps=3)
    for found, wanted in zip(values(weights), expected, strict=True):
        assert torch.equal(found, wanted)


def test_state_of_other_workers_is_refused(weights):
    optimizer = DistributedOptimizer(optim.SGD, references(weights)[:1], lr=0.01)
    with pytest.raises(ValueError, match="worker2"):
        optimizer.load_state_dict({"workers": {"worker2": {}}})


def test_a_scheduler_sets_the_rates_where_the_parameters_are(weights):
    optimizer = DistributedOptimizer(optim.SGD, references(weights), lr=1.0)
    scheduler = DistributedLRScheduler(optimizer, lr_scheduler.StepLR, step_size=1, gamma=0.5)
    assert scheduler.get_last_lr() == {"worker1": [1.0], "worker2": [1.0]}
    train(weights, optimizer)
    scheduler.step()
    assert scheduler.get_last_lr() == {"worker1": [0.5], "worker2": [0.5]}
    saved = scheduler.state_dict()
    scheduler.step()
    scheduler.load_state_dict(saved)
    assert saved["workers"]["worker1"]["last_epoch"] == 1


def test_a_failure_names_its_worker(weights):
    optimizer = DistributedOptimizer(FailsToStep, references(weights)[1:])
    with pytest.raises(RemoteError, match=r"'worker2'.*no step today") as caught:
        train(weights, optimizer)
    assert caught.value.worker == "worker2"
    assert isinstance(caught.value.__cause__, ValueError)


def test_failures_on_several_workers_are_all_told(weights):
    with pytest.raises(RemoteError, match="no step today") as caught:
        train(weights, DistributedOptimizer(FailsToStep, references(weights)))
    assert all(repr(name) in str(caught.value) for name in ("worker1", "worker2"))


def test_a_worker_that_does_not_answer_is_no_failure_of_its_optimizer():
    def lost():
        raise WorkerLost("worker 'worker2' was lost", worker="worker2")

    with pytest.raises(WorkerLost, match=r"^worker 'worker2' was lost"):
        wait_for_all("step", {}, {"worker2": lost})


def test_an_optimizer_that_cannot_be_made_names_its_worker(weights):
    with pytest.raises(RemoteError, match=r"construction failed on worker 'worker1'.*KeyError"):
        DistributedOptimizer(FailsToBegin, references(weights))


def test_a_closure_is_refused(weights):
    optimizer = DistributedOptimizer(optim.SGD, references(weights), lr=0.1)
    with pytest.raises(TypeError, match="no closure"):
        optimizer.step(lambda: 1.0)


def test_an_unknown_context_is_refused(weights):
    optimizer = DistributedOptimizer(optim.SGD, references(weights), lr=0.1)
    with pytest.raises(RuntimeError, match="there is no autograd context 12345 on this worker"):
        optimizer.step(12345)


def test_a_context_that_has_ended_is_refused_before_anything_is_stepped(weights):
    optimizer = DistributedOptimizer(optim.SGD, references(weights), lr=0.1)
    before = values(weights)
    with autograd.context() as context_id:
        loss = weights[0].rpc_sync().forward(torch.ones(3, 1)).sum()
        autograd.backward(context_id, [loss])
    with pytest.raises(
        ContextError, match=f"there is no autograd context {context_id} on this worker"
    ):
        optimizer.step(context_id)
    for found, wanted in zip(values(weights), before, strict=True):
        assert torch.equal(found, wanted)


def test_what_is_no_parameter_is_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        DistributedOptimizer(optim.SGD, [], lr=0.1)
    with pytest.raises(TypeError, match="RRefs"):
        DistributedOptimizer(optim.SGD, [torch.ones(2)], lr=0.1)
    with pytest.raises(ValueError, match="groups without a parameter"):
        DistributedOptimizer(optim.SGD, [{"params": []}, {"params": []}], lr=0.1)
    for params in (torch.ones(2), [torch.ones(2)]):
        with pytest.raises(TypeError, match="must be RRefs of parameters, got a Tensor"):
            DistributedOptimizer(optim.SGD, [{"params": params}], lr=0.1)


def test_while_one_steps_parameters_all_others_of_theirs_wait():
    params = [RRef(torch.rand(2, requires_grad=True)) for _ in range(20)]
    are_locked = []

    class Looks(optim.SGD):
        def step(self, closure=None):
            are_locked.append([lock.lock.locked() for lock in other._locks])

        def state_dict(self):
            self.step()
            return {}

        def load_state_dict(self, state):
            self.step()

    def of(kind, chosen):
        return LocalOptimizer(kind, [Group(params=chosen, options={})], (), {"lr": 0.1})

    first, second, *_ = [of(Looks, [param]) for param in params]
    other = of(optim.SGD, params[::-1])
    assert other._locks == sorted(other._locks)  # two that share several cannot block each other
    with autograd.context() as context_id:
        first.step(context_id)
        second.step(context_id)
    first.load_state_dict(first.state_dict())
    assert [held.index(True) for held in are_locked] == [0, 1, 0, 0]
    assert all(held.count(True) == 1 for held in are_locked)


def trainer(weights, params, steps):
    train(weights, DistributedOptimizer(optim.SGD, params, lr=1.0), steps)


def test_trainers_step_the_same_parameters_at_once():
    """Each step subtracts the same gradient: were two to mix, the sum would not come out."""
    weight = rpc.remote("worker2", Weight, (7,))
    before = weight.rpc_sync().get().detach()
    params = references([weight])
    trainers = [
        rpc.rpc_async(name, trainer, ([weight], params, 10)) for name in ("worker0", "worker1")
    ]
    for future in trainers:
        future.wait()
    after = weight.rpc_sync().get().detach()
    assert torch.allclose(after, before - 20, atol=1e-4)


def test_a_step_without_any_gradient_warns(weights):
    optimizer = DistributedOptimizer(optim.SGD, references(weights), lr=0.1)
    with autograd.context() as context_id:
        with pytest.warns(
            UserWarning, match=r"none of the optimizer's parameters.*backward\(\) called"
        ):
            optimizer.step(context_id)
    copy = DistributedOptimizer(
        optim.SGD, [rpc.RRef(rref.to_here()) for rref in references(weights)], lr=0.1
    )
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, (x, 2)).sum()])
        with pytest.warns(
            UserWarning, match="gradients of other tensors: 1 on 'worker0'"
        ) as caught:
            copy.step(context_id)
        assert caught[0].filename == __file__


def test_leaves_that_no_parameter_of_the_optimizer_is_are_found(weights):
    first, *others = references(weights)
    optimizer = DistributedOptimizer(optim.SGD, [first], lr=0.1)
    x = torch.ones(3, 1, requires_grad=True)
    with autograd.context() as context_id:
        loss = sum((rref.rpc_sync().mul(x[0, 0]).sum() for rref in (first, *others)), x.sum())
        autograd.backward(context_id, [loss])
        missing = optimizer.unstepped(context_id)
        assert missing[rpc.get_worker_info().name][-1] == (3, 1)
        assert set(missing) == {"worker0", *(rref.owner_name() for rref in others)}
        everything = DistributedOptimizer(optim.SGD, [rpc.RRef(x), *references(weights)], lr=0.1)
        assert everything.unstepped(context_id) == {}


def test_mistakes_are_found_here(weights):
    params = references(weights)
    for given, text in [
        ("SGD", "optimizer_class must be a class such as torch.optim.AdamW, got 'SGD'"),
        (optim.SGD([torch.ones(1, requires_grad=True)]), "got an instance of SGD"),
    ]:
        with pytest.raises(TypeError, match=text):
            DistributedOptimizer(given, params)
    with pytest.raises(
        TypeError, match=r"got a Parameter\. Wrap parameters.*rpc\.RRef\(p\) for p in"
    ):
        DistributedOptimizer(optim.SGD, torch.nn.Linear(2, 2).parameters())
    optimizer = DistributedOptimizer(optim.SGD, params, lr=0.1)
    with pytest.raises(TypeError, match=r"zero_grad\(\) is not needed"):
        optimizer.zero_grad()
    with pytest.raises(TypeError, match="context_id must be the integer"):
        optimizer.step("x")
    scheduler = DistributedLRScheduler(optimizer, optim.lr_scheduler.StepLR, step_size=1)
    for of in (optimizer, scheduler):
        with pytest.raises(ValueError, match=f"not a state of a {type(of).__name__}.*'workers'"):
            of.load_state_dict({})
    with pytest.raises(TypeError, match="the optimizer comes first"):
        DistributedLRScheduler(optim.lr_scheduler.StepLR, optimizer)
    with pytest.raises(TypeError, match="scheduler_class must be a class such as"):
        DistributedLRScheduler(optimizer, "StepLR")
