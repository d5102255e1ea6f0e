"""Operations on tensors that live on other workers."""

from __future__ import annotations

import copy
import gc
import io
import threading

import numpy as np
import pytest
import torch
from programs import loss_of, make, model, numbers, same, things_left
from torch import nn

import telegrad
from telegrad import rpc
from telegrad.errors import RemoteError, TelegradError
from telegrad.rpc.group import current
from telegrad.tensors import RemoteTensor, synchronize
from telegrad.testing.cluster import cluster


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(3) as running:
        yield running


@pytest.fixture
def p():
    return make(True, "worker1", 1, nn.Linear, 8, 6).weight


@pytest.fixture
def q():
    return make(True, "worker2", 2, nn.Linear, 8, 6).weight


def test_a_parameter_is_a_tensor_of_its_worker(p):
    assert isinstance(p, nn.Parameter)
    assert isinstance(p, RemoteTensor)
    assert p.is_leaf
    assert p in {p}
    assert p.device == torch.device("cpu", 2)  # the worker's id and one
    assert p.worker == "worker1"
    assert str(p).startswith("Parameter containing:")
    assert str(p).endswith("on worker 'worker1'")
    assert f"{p.detach().norm():.3f}" == f"{p.detach().cpu().norm():.3f}"


@pytest.mark.parametrize(
    "name",
    ["xavier_uniform_", "kaiming_normal_", "trunc_normal_", "orthogonal_", "eye_", "ones_"],
)
def test_initialisation_draws_the_numbers_of_one_process(name):
    def program(far):
        module = model(far)
        for p in module.parameters():
            if p.dim() > 1:
                getattr(nn.init, name)(p)
            else:
                nn.init.constant_(p, 0.5)
        return numbers(module)

    same(program)


def test_random_numbers_come_from_this_process():
    def program(far):
        p = make(far, "worker1", 1, nn.Linear, 4, 4).weight.detach()
        torch.manual_seed(3)
        out = [torch.rand_like(p), torch.randn_like(p), torch.dropout(p, 0.5, True)]
        out += [torch.bernoulli(p.abs().clamp(0, 1)), p.clone().random_(0, 9)]
        return out, torch.rand(3)

    same(program)


def test_operations_give_what_they_give_here():
    def program(far):
        p = make(far, "worker1", 1, nn.Embedding, 50, 16).weight
        p.data.mul_(2)
        p.data[3] = 1.0
        p.data[4:6, ::2].zero_()
        p.data = p.data + 1
        p.data.clamp_(-1, 1)
        q, rows = p.detach(), torch.tensor([1, 2])
        counts = (q > 0).sum(0)
        out = [q[rows], q[q > 0], (q > 0).nonzero(), q.std(0), q.topk(3), torch.cat(q.chunk(3))]
        out += [q.T @ q, q.view(-1, 8).sum(1, keepdim=True), q.max(1), counts + True, counts + 1.5]
        out += [(q > 0) + True, (q > 0) + 1, torch.stack([q, q]), q.unbind(0)[2], q.sort(1).indices]
        out += [
            torch.where(q > 0, q, 0.0),
            q.unique(),
            torch.linalg.svdvals(q),
            q.expand(2, 50, 16),
        ]
        out += [torch.nn.functional.interpolate(q[None, None], scale_factor=s) for s in (0.5, 2.0)]
        out += [p.norm().item(), bool((p > -9).all()), len(list(p)), q.tolist()[0], float(q.mean())]
        return out, torch.max(q, 1, out=(q[:, 0].clone(), q.new_empty(50, dtype=torch.int64)))

    same(program, 1e-5)


def test_autograd_of_this_process_goes_through_operations():
    def program(far):
        p = make(far, "worker1", 1, nn.Linear, 5, 5).weight
        (p.square().sum() * 2).backward()
        first = p.grad.clone()
        (grad,) = torch.autograd.grad((p.cpu() ** 3).sum(), p, create_graph=True)
        (grad.cpu() ** 2).sum().backward()
        return first, p.grad, grad

    same(program, 1e-5)


def test_functions_of_gradients_work():
    def program(far):
        p = make(far, "worker1", 1, nn.Linear, 5, 5).weight.detach()
        per_row = torch.func.vmap(lambda row: row.square().sum())(p)
        return per_row, torch.func.grad(lambda x: x.square().sum())(p)

    same(program)


def test_shapes_are_changed_in_place():
    def program(far):
        p = make(far, "worker1", 1, nn.Linear, 4, 6).weight.detach()
        out = [p.clone().t_(), p.clone().unsqueeze_(1).squeeze_(), p.clone().transpose_(0, 1)]
        q = p.clone()
        q.t_().mul_(2)
        q[0] += 1
        return out, q, torch.matmul(p.expand(3, 6, 4), p[0]), q.sum(0)

    same(program, 1e-6)


def test_dtypes_are_converted_there(p):
    half = p.detach().half()
    assert half.worker == "worker1"
    assert half.dtype == torch.float16
    assert p.detach().to("cpu", torch.float64).dtype == torch.float64
    assert type(p.detach().to("cpu")) is torch.Tensor
    assert p.detach().to(torch.float32, copy=True).worker == "worker1"
    assert type(p.detach().cpu()) is torch.Tensor
    assert np.asarray(p.detach()).shape == (6, 8)
    assert p.detach().numpy().dtype == np.float32


def test_tensors_are_copied_between_workers_and_here(p, q):
    there = torch.zeros_like(q).copy_(p.detach())
    assert there.worker == "worker2"
    assert torch.equal(there, p.detach().cpu())
    here = torch.empty(6, 8).copy_(p.detach())
    assert torch.equal(here, p)
    assert torch.allclose(p, here)
    assert torch.equal(p.detach().to(q.device), there)
    torch.testing.assert_close(p, here, check_device=False)
    p.data = torch.ones(6, 8)
    assert p.detach().sum().item() == 48


def test_tensors_of_two_workers_do_not_mix(p, q):
    with pytest.raises(RuntimeError, match="two, 'worker1' and 'worker2'"):
        p + q
    with pytest.raises(RuntimeError, match="is in this process"):
        p.detach() + torch.ones(6, 8)
    with pytest.raises(RuntimeError, match="is in this process"):
        torch.ones(6, 8).add_(p.detach())
    with pytest.raises(RuntimeError, match="to a tensor of this process: use copy_"):
        torch.ones(6, 8)[torch.tensor([0])] = p.detach()[:1]
    with pytest.raises(RuntimeError, match="copy_ copies from one worker to another"):
        p.data = q.detach()
    with pytest.raises(RuntimeError, match="cannot be moved to meta"):
        p.detach().to("meta")


def test_tensors_without_dimensions_mix(p):
    total = torch.zeros(())
    total += p.detach().abs().sum()
    assert total.item() == pytest.approx(p.detach().cpu().abs().sum().item())
    assert (p.detach() * torch.tensor(2.0)).worker == "worker1"


def test_shapes_that_do_not_fit_are_refused_at_once(p):
    with pytest.raises(RuntimeError, match="broadcast"):
        p.detach() + p.detach()[:, :3]


def test_what_needs_memory_of_this_process_is_refused(p):
    for use in (
        lambda: p.data_ptr(),
        lambda: p.untyped_storage(),
        lambda: p.share_memory_(),
        lambda: torch.from_dlpack(p.detach()),
        lambda: np.from_dlpack(p.detach()),
    ):
        with pytest.raises(RuntimeError, match=r"is on worker 'worker1': use \.cpu"):
            use()
    for use in (lambda: p.detach().resize_(2), lambda: p.detach().set_()):
        with pytest.raises((NotImplementedError, RuntimeError)):
            use()


def test_an_operation_that_fails_is_raised_by_the_next_wait(p):
    square = p.detach()[:, :6]
    broken = torch.linalg.cholesky(-(square @ square.T)) + 1
    with pytest.raises(RemoteError, match=r"failed on worker 'worker1'.*positive-definite"):
        broken.sum().item()
    assert square.norm().item() > 0  # it goes on
    with pytest.raises(RemoteError, match="was never computed, because an earlier operation"):
        broken.sum().item()
    torch.linalg.cholesky(-(square @ square.T))
    with pytest.raises(RemoteError, match="positive-definite"):
        synchronize()
    synchronize()


def test_a_copy_may_be_sent_in_a_call(p):
    assert rpc.rpc_sync("worker2", torch.sum, (p.detach(),)).item() == pytest.approx(
        p.detach().sum().item(), abs=1e-5
    )
    with pytest.raises(TelegradError, match=r"requires grad cannot be sent in a call.*p\.cpu\(\)"):
        rpc.rpc_sync("worker2", torch.sum, (p,))


def test_it_is_saved_as_an_ordinary_tensor(p):
    file = io.BytesIO()
    torch.save({"p": p, "d": p.detach()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["d"]) is torch.Tensor
    assert type(loaded["p"]) is nn.Parameter
    assert torch.equal(loaded["p"], p)


def test_a_deep_copy_is_on_the_same_worker(p):
    new = copy.deepcopy(p)
    assert isinstance(new, nn.Parameter)
    assert (new.worker, new.requires_grad) == ("worker1", True)
    new.data.zero_()
    assert p.detach().abs().sum().item() > 0


def test_threads_share_the_stream_to_a_worker(p):
    values = [torch.zeros_like(p.detach()) for _ in range(4)]

    def count(value):
        for _ in range(300):
            value += 1
            value *= 1

    threads = [threading.Thread(target=count, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [value.mean().item() for value in values] == [300.0] * 4


def test_what_is_not_needed_any_more_is_released():
    module = make(True, "worker1", 1, nn.Linear, 8, 6)
    gc.collect()
    before = things_left(module)
    for _ in range(100):
        loss = module(torch.ones(2, 8)).sum()
        loss.backward()
        module.weight.detach().mul(2).add(1).sum()
    del loss
    module.zero_grad()
    gc.collect()
    assert things_left(module) == before


def test_a_compiled_function_runs_as_it_is(p):
    compiled = torch.compile(lambda t: t.detach() * 2 + 1, backend="eager")
    assert torch.equal(compiled(p), p.detach().cpu() * 2 + 1)


def test_parameters_become_a_vector_and_back():
    def program(far):
        module = model(far, one_worker=True)
        vector = nn.utils.parameters_to_vector(module.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 2, module.parameters())
        first = loss_of(module).item()
        local = torch.cat([p.detach().cpu().flatten() for p in module.parameters()])
        nn.utils.vector_to_parameters(local, module.parameters())
        return numbers(module), first, loss_of(module).item()

    same(program)


def test_no_module_can_be_made_outside_of_a_group(monkeypatch):
    monkeypatch.setattr(current.Here, "worker", None)
    with pytest.raises(TelegradError, match=r"has not joined a group|has shut down"):
        telegrad.module("worker1", nn.Linear, 1, 1)


def test_a_state_dict_is_fetched_in_one_message():
    module = make(True, "worker1", 1, nn.LSTM, 8, 8, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3, 8))[0].sum().backward()
    optimizer.step()
    optimizer.step()
    stream = module._connection.stream
    asked = []
    ask = stream.ask
    stream.ask = lambda *args: (asked.append(args[0]), ask(*args))[1]
    try:
        torch.save(module.state_dict(), io.BytesIO())
        assert len(asked) == 1
        torch.save(optimizer.state_dict(), io.BytesIO())
        assert len(asked) == 2
    finally:
        del stream.ask


def test_what_was_fetched_together_is_not_used_after_a_change():
    module = make(True, "worker1", 1, nn.Linear, 3, 3)
    state = module.state_dict()
    state["weight"].cpu()
    module.bias.data.fill_(5.0)
    assert state["bias"].cpu().tolist() == [5.0] * 3
    state["bias"].cpu().zero_()
    assert state["bias"].cpu().tolist() == [5.0] * 3
    assert module.weight.detach().cpu().equal(state["weight"].cpu())


def test_threads_that_drop_tensors_do_not_take_them_from_each_other(p):
    failed = []

    def churn():
        try:
            for n in range(200):
                value = p.detach() + n
                value = value * 2
                if n % 50 == 0:
                    value.sum().item()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    synchronize()


def test_a_gradient_that_is_here_cannot_be_assigned():
    p = next(model(True).parameters())
    with pytest.raises(RuntimeError, match=r"must be there too.*zeros_like"):
        p.grad = torch.ones(p.shape)
    p.grad = torch.zeros_like(p).copy_(torch.ones(p.shape))
    assert p.grad.sum().item() == p.numel()
    p.grad = None
    assert p.grad is None
