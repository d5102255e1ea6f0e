"""Gradients over real processes equal those of the same program in one process."""

from __future__ import annotations

import random

import process_programs as programs
import pytest
import torch
from process_programs import leaf, relay, together, wait_until_clean, ways

import telegrad.autograd as dist_autograd
from telegrad import rpc
from telegrad.testing.cluster import cluster

WORKERS = [f"worker{i}" for i in range(4)]
DISTRIBUTED = [name for name in ways if name != "plainly"]


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(len(WORKERS)) as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_lives_on(group):
    yield
    wait_until_clean(WORKERS)


def wanted(program, passes=1):
    """The gradients of the program in this process, by the names of its leaves."""
    roots = program(programs.plainly)
    for _ in range(passes - 1):
        torch.autograd.backward(roots, retain_graph=True)
    torch.autograd.backward(roots)
    gradients = {name: leaf.grad for name, leaf in programs.leaves.items() if leaf.grad is not None}
    for parameter in programs.leaves.values():
        parameter.grad = None
    return gradients


def found(program, way=programs.synchronously, passes=1):
    with dist_autograd.context() as context_id:
        roots = program(way)
        for n in range(passes):
            dist_autograd.backward(context_id, roots, retain_graph=n + 1 < passes)
        return programs.gradients_everywhere(context_id, WORKERS)


def compare(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].layout == want[name].layout, name
        assert got[name].dtype == want[name].dtype, name
        torch.testing.assert_close(
            *(gradient.to_dense() for gradient in (got[name], want[name])), msg=name
        )


def check(program, **how):
    want = wanted(program, how.get("passes", 1))
    compare(found(program, **how), want)
    return want


@pytest.mark.parametrize("way", DISTRIBUTED)
def test_a_call_of_any_kind_passes_gradients_on(way):
    def program(call):
        x = leaf("x")
        y = call("worker1", programs.layer, "worker1", x)
        z = call("worker2", programs.layer, "worker2", y + x)
        return [(z * x).sum()]

    assert check(program, way=ways[way]).keys() == {"x", "worker1", "worker2"}


@pytest.mark.parametrize("way", DISTRIBUTED)
def test_a_call_to_oneself_passes_gradients_on(way):
    check(
        lambda call: [(call("worker0", programs.layer, "worker0", leaf("x")) * leaf("x")).sum()],
        way=ways[way],
    )


@pytest.mark.parametrize("is_first_in_a_context", [False, True])
def test_a_method_of_a_value_that_is_still_made_is_called_in_the_context_of_its_call(
    is_first_in_a_context,
):
    """What was called before it, and waits for the same value, was called in another or none."""
    x = leaf("x")
    rpc.rpc_sync("worker1", programs.set_fault, ("block",))
    late = rpc.remote("worker1", programs.LateCaller)
    if is_first_in_a_context:
        with dist_autograd.context():
            first = late.rpc_async().run(programs.layer, "worker1", x)
    else:
        first = late.rpc_async().run(programs.layer, "worker1", x)
    with dist_autograd.context() as context_id:
        second = late.rpc_async().run(programs.layer, "worker1", x)
        rpc.rpc_sync("worker1", programs.set_fault)
        dist_autograd.backward(context_id, [second.wait().sum()])
        got = programs.gradients_everywhere(context_id, WORKERS)
    assert first.wait().grad_fn is None  # its context had ended, or it had none
    compare(got, wanted(lambda call: [programs.layer("worker1", x).sum()]))


@pytest.mark.parametrize("way", DISTRIBUTED)
@pytest.mark.parametrize(
    "route",
    [
        ["worker1", "worker2"],
        ["worker1", "worker2", "worker3"],
        ["worker1", "worker0", "worker1", "worker0"],
        ["worker1", "worker1", "worker2", "worker2", "worker0", "worker3"],
    ],
    ids=lambda route: "-".join(name[-1] for name in route),
)
def test_nested_calls_pass_gradients_on(way, route):
    def program(call):
        name = way if call is not programs.plainly else "plainly"
        return [call(route[0], relay, name, route, leaf("x")).sum()]

    check(program, way=ways[way])


@pytest.mark.parametrize("way", DISTRIBUTED)
def test_results_require_grad_though_no_argument_does(way):
    check(lambda call: [call("worker1", programs.parameter_of, "worker1").sum()], way=ways[way])


def test_tensors_in_containers_of_which_some_require_grad():
    def program(call):
        values = {
            "first": leaf("x"),
            "pair": (leaf("y"), torch.full((3, 3), 2.0, dtype=torch.double)),
            "named": {"x": leaf("x") * 3},
        }
        result = call("worker1", programs.sort, "worker1", values)
        assert not result["constant"].requires_grad
        assert not result["several"][1][0].requires_grad
        assert result["text"] == "as it is"
        return [(result["sum"] * result["constant"] + result["several"][1][1]).sum()]

    check(program)


def test_mixed_types():
    def program(call):
        x = leaf("x")
        total = x.sum()
        for number, dtype in enumerate(
            (torch.float, torch.half, torch.bfloat16, torch.complex64, torch.complex128)
        ):
            y = call(WORKERS[1 + number % 3], programs.cast, WORKERS[1 + number % 3], x, dtype)
            total = total + (y.abs() if dtype.is_complex else y).double().sum()
        return [total]

    check(program)


def test_sparse_gradients():
    def program(call):
        rows = [call(w, programs.look_up, w, torch.tensor([1, 4, 4, 7])) for w in WORKERS[1:]]
        twice = call("worker1", programs.look_up, "worker1", torch.tensor([0, 1]))
        return [torch.cat([*rows, twice]).pow(2).sum()]

    want = check(program)
    assert all(gradient.is_sparse for gradient in want.values())


def test_several_roots():
    def program(call):
        x = leaf("x")
        y = call("worker1", programs.layer, "worker1", x)
        z = call("worker2", programs.layer, "worker2", y)
        return [y.sum(), (z * y).sum(), (x * x).sum(), call("worker3", torch.sum, z)]

    check(program)


def test_passes_over_a_retained_graph_add_up():
    def program(call):
        y = call("worker1", relay, name_of(call), ["worker1", "worker2"], leaf("x"))
        return [y.sum()]

    check(program, passes=3)


def name_of(way):
    return way.__name__


def test_unused_results_do_not_hold_a_pass_up():
    def program(call):
        x = leaf("x")
        y, unused = call("worker1", programs.two_outputs, "worker1", x)
        call("worker2", programs.layer, "worker2", y)
        behind = call("worker2", programs.layer, "worker2", unused)
        call("worker3", programs.layer, "worker3", behind)
        return [call("worker3", programs.layer, "worker3", y).sum()]

    check(program)


def test_a_gradient_penalty():
    for route in (["worker1"], ["worker1", "worker2"], ["worker1", "worker2", "worker3"]):
        x = leaf("x")
        loss = relay("plainly", route, x).sum()
        parameters = [x, *(leaf(worker) for worker in route)]
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        penalty = (first[0] ** 2).sum() + loss
        second = torch.autograd.grad(penalty, parameters)
        want = dict(zip(("x", *route), map(torch.add, first, second), strict=True))

        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync(route[0], relay, ("synchronously", route, x)).sum()
            dist_autograd.backward(context_id, [loss], create_graph=True)
            gradient = dist_autograd.get_gradients(context_id)[x]
            dist_autograd.backward(context_id, [(gradient**2).sum() + loss])
            compare(programs.gradients_everywhere(context_id, WORKERS), want)


@pytest.mark.parametrize("size", [2, 3])
def test_a_hessian_vector_product(size):
    route = [*WORKERS[1:size], "worker0"]
    x, vector = leaf("x"), torch.linspace(-1, 1, 9, dtype=torch.double).view(3, 3)
    _, want = torch.autograd.functional.hvp(
        lambda x: relay("plainly", route, x).sum(), x.detach(), vector
    )
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync(route[0], relay, ("synchronously", route, x)).sum()
        dist_autograd.backward(context_id, [loss], create_graph=True)
        gradient = dist_autograd.get_gradients(context_id)[x]
        dist_autograd.backward(context_id, [(gradient * vector).sum()])
        total = dist_autograd.get_gradients(context_id)[x]
        torch.testing.assert_close(total - gradient, want)


def test_passes_of_many_threads_run_side_by_side():
    routes = [["worker1", "worker2"], ["worker2", "worker1"], ["worker3", "worker0", "worker1"]]

    def program_of(route):
        return lambda call: [call(route[0], relay, name_of(call), route, leaf("x")).sum()]

    want = {tuple(route): wanted(program_of(route)) for route in routes}

    def run(seed):
        chosen = random.Random(seed)
        for _ in range(6):
            route = chosen.choice(routes)
            compare(found(program_of(route)), want[tuple(route)])

    together(*(lambda seed=seed: run(seed) for seed in range(8)))


def test_passes_of_one_context_run_side_by_side():
    x = leaf("x")
    want = wanted(lambda call: [relay("plainly", ["worker1", "worker2"], x).sum()])
    with dist_autograd.context() as context_id:
        root = rpc.rpc_sync("worker1", relay, ("synchronously", ["worker1", "worker2"], x)).sum()
        together(
            *(
                lambda: dist_autograd.backward(context_id, [root], retain_graph=True)
                for _ in range(8)
            )
        )
        got = programs.gradients_everywhere(context_id, WORKERS)
    compare(got, {name: 8 * gradient for name, gradient in want.items()})


def train(steps):
    """On a trainer: steps against one server; the sums of what both sides got."""
    x = leaf("x")
    totals = {}
    for step in range(1, steps + 1):
        with dist_autograd.context() as context_id:
            y = rpc.rpc_sync("worker0", programs.layer, ("worker0", x * step))
            dist_autograd.backward(context_id, [(y * x).sum()])
            here = rpc.get_worker_info().name
            for name, gradient in programs.gradients_everywhere(
                context_id, ["worker0", here]
            ).items():
                totals[name] = totals.get(name, 0) + gradient
    return totals


def test_three_trainers_use_one_server_at_once():
    steps = 20
    want = wanted(
        lambda call: [
            (programs.layer("worker0", leaf("x") * step) * leaf("x")).sum()
            for step in range(1, steps + 1)
        ]
    )
    for trainer in [rpc.rpc_async(trainer, train, (steps,)) for trainer in WORKERS[1:]]:
        compare(trainer.wait(), want)


def train_in_parallel(rank, path, steps):
    """On a trainer: a local layer in DistributedDataParallel, the other on the server."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2
    )
    try:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 3).double()
        ddp = torch.nn.parallel.DistributedDataParallel(net)
        for step in range(steps):
            x = torch.full((2, 3), 0.1 * (rank + 1) * (step + 1), dtype=torch.double)
            with dist_autograd.context() as context_id:
                hidden = rpc.rpc_sync("worker0", programs.layer, ("worker0", ddp(x)))
                dist_autograd.backward(context_id, [(hidden * 2).sum()])
                got = dist_autograd.get_gradients(context_id)
            ddp.zero_grad()
            (programs.layer("copy of worker0", ddp(x)) * 2).sum().backward()
            for parameter in net.parameters():
                torch.testing.assert_close(got[parameter], parameter.grad)
            ddp.zero_grad()
    finally:
        torch.distributed.destroy_process_group()


def share_leaf(name, copy):
    programs.leaves[name] = copy.detach().requires_grad_()


def test_data_parallel_trainers_on_one_server(tmp_path):
    for trainer in WORKERS[1:3]:
        rpc.rpc_sync(trainer, share_leaf, ("copy of worker0", leaf("worker0").detach()))
    trainers = [
        rpc.rpc_async(trainer, train_in_parallel, (rank, str(tmp_path / "group"), 3))
        for rank, trainer in enumerate(WORKERS[1:3])
    ]
    for trainer in trainers:
        trainer.wait()


@pytest.fixture
def unhurried_releases(monkeypatch):
    """Here the end of a context is told by nothing but the next call."""
    releases = dist_autograd._engine()._releases
    monkeypatch.setattr(releases, "_seconds", 3600.0)
    releases.send()
    yield
    releases.send()  # forgets the timer of an hour


def test_the_end_of_a_context_rides_with_the_next_call(unhurried_releases):
    for _ in range(3):
        with dist_autograd.context():
            rpc.rpc_sync("worker1", programs.layer, ("worker1", leaf("x")))
            assert rpc.rpc_sync("worker1", programs.counts) == (0, 1)
        rpc.rpc_sync("worker1", programs.counts)  # takes the news along
        assert rpc.rpc_sync("worker1", programs.counts) == (0, 0)


@pytest.mark.parametrize(
    ("side", "passes", "is_freed_first"),
    [
        (3, 0, True),  # the graph may be as large as a step's activations
        (3, 1, False),
        (300, 1, True),
    ],
    ids=["of a graph", "of a small gradient", "of a large gradient"],
)
def test_the_memory_of_a_context_is_free_for_the_next_call_if_it_is_much(
    unhurried_releases, side, passes, is_freed_first
):
    for _ in range(3):
        with dist_autograd.context() as context_id:
            x = torch.ones(side, side, requires_grad=True)
            loss = rpc.rpc_sync("worker1", programs.scaled, (x, f"scale{side}", side))
            for _ in range(passes):
                dist_autograd.backward(context_id, [loss])
        left = 0 if is_freed_first else 1
        assert rpc.rpc_sync("worker1", programs.counts) == (0, left)
        assert rpc.rpc_sync("worker1", programs.counts) == (0, 0)
