"""`torch.optim` on remote parameters does what it does on local ones."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from programs import loss_of, model, numbers, same, things_left
from torch import nn

from telegrad.tensors import RemoteTensor
from telegrad.testing.cluster import cluster

OPTIONS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5},
    "Adagrad": {},
    "Adadelta": {},
    "ASGD": {},
    "Adafactor": {},
}


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(3) as running:
        yield running


def train(kind, *, clip=None, matrices=False, steps=4, **options):
    def program(far):
        module, given = model(far), copy.deepcopy(options)
        big = [p for p in module.parameters() if p.dim() > 1]
        small = [p for p in module.parameters() if p.dim() < 2]
        groups = [{"params": big}, {"params": small, "weight_decay": 0.0}]
        optimizer = kind(big[1:] if matrices else groups, **given)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        norms = []
        for step in range(steps):
            loss_of(module, step).backward()
            if clip is not None:
                norms.append(nn.utils.clip_grad_norm_(module.parameters(), 0.5, **clip))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return numbers(module), norms, optimizer.state_dict()["state"]

    return program


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_optimizer_does_the_same_on_remote_parameters(name, foreach):
    same(train(getattr(torch.optim, name), foreach=foreach, **OPTIONS[name]))


@pytest.mark.parametrize("foreach", [False, True])
def test_rprop_does_the_same(foreach):
    same(train(torch.optim.Rprop, matrices=True, foreach=foreach))


def test_muon_does_the_same():
    same(train(torch.optim.Muon, matrices=True))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adam", "Adagrad"])
def test_fused_steps_do_the_same(name):
    same(train(getattr(torch.optim, name), fused=True))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_learning_rate_may_be_a_tensor(name):
    same(train(getattr(torch.optim, name), lr=torch.tensor(0.01)))


@pytest.mark.parametrize("clip", [{}, {"foreach": True}, {"norm_type": float("inf")}])
def test_gradients_are_clipped_by_their_norm_over_all_workers(clip):
    same(train(torch.optim.AdamW, clip=clip), 1e-6)


def test_lbfgs_works_on_the_parameters_of_one_worker():
    def program(far):
        module = model(far, one_worker=True)
        optimizer = torch.optim.LBFGS(
            module.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe"
        )

        def closure():
            optimizer.zero_grad()
            loss = loss_of(module)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(2)], numbers(module)

    same(program, 1e-5)


def test_lbfgs_says_that_it_needs_all_parameters_on_one_worker():
    optimizer = torch.optim.LBFGS(model(True).parameters())
    with pytest.raises(RuntimeError, match="this process: make one module"):
        optimizer.step(pytest.fail)


class Sign(torch.optim.Optimizer):
    """An optimizer that torch does not know."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.add_(self.state[p]["sum"].sign(), alpha=-group["lr"])


class Doubled(torch.optim.SGD):
    """A subclass of one that it does know."""

    def step(self, closure=None):
        super().step(closure)
        return super().step(closure)


@pytest.mark.parametrize("kind", [Sign, Doubled])
def test_an_optimizer_of_the_programs_own_works_too(kind):
    same(train(kind))


def test_a_step_is_one_message_from_the_second_on():
    module = model(True, one_worker=True)
    optimizer = torch.optim.AdamW(module.parameters())
    stream = module[0].weight.handle.stream
    sent, kinds = [], []
    put = stream.put
    stream.put = lambda operation: (sent.append(operation[0]), put(operation))
    try:
        for step in range(3):
            loss_of(module, step).backward()
            sent.clear()
            optimizer.step()
            kinds.append(list(sent))
            optimizer.zero_grad()
    finally:
        del stream.put
    assert len(kinds[0]) > 10
    assert kinds[1][-1] == "step"
    assert set(kinds[1][:-1]) == {"keep"}  # the counters of steps move there, once
    assert kinds[2] == ["step"]
    assert isinstance(optimizer.state[module[0].weight]["step"], RemoteTensor)
    assert optimizer.state[module[0].weight]["step"].item() == 3


def test_a_step_of_another_kind_goes_on_from_the_same_state():
    def program(far):
        module = model(far)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for step in range(8):
            loss_of(module, step).backward()
            if step in (3, 6):
                next(module.parameters()).grad = None
            if step == 4:
                optimizer.param_groups[0]["momentum"] = 0.5
            if step == 5:
                optimizer.step(lambda: loss_of(module))
            optimizer.step()
            optimizer.zero_grad()
        return numbers(module), optimizer.state_dict()["state"]

    same(program)


def test_an_optimizer_may_have_parameters_added():
    def program(far):
        module = model(far)
        optimizer = torch.optim.Adam(module[0].parameters(), lr=0.01)
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": list(module[1].parameters()), "lr": 0.1})
            loss_of(module, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return numbers(module)

    same(program)


def test_a_saved_run_is_resumed_where_it_was_or_elsewhere():
    def program(far, then_far):
        module, saved = model(far), None
        for _ in range(2):
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
            if saved is not None:
                module.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            for step in range(3):
                loss_of(module, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            file = io.BytesIO()
            torch.save([module.state_dict(), optimizer.state_dict()], file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            module = model(then_far)
        return saved

    same(lambda far: program(far, far))
    same(lambda far: program(far, not far))


def test_a_grad_scaler_works():
    def program(far):
        module = model(far)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            scaler.scale(loss_of(module, step)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return numbers(module)

    same(program, 1e-6)


def test_what_an_optimizer_has_there_ends_with_it():
    module = model(True, one_worker=True)
    gc.collect()
    before = things_left(module[0])
    optimizer = torch.optim.AdamW(module.parameters())
    for step in range(3):
        loss_of(module, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert things_left(module[0]) > before
    del optimizer
    gc.collect()
    assert things_left(module[0]) == before
