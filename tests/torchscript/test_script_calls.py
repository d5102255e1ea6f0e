"""Calls, futures and references inside of TorchScript, between real processes, by telegrad's own
names: nothing is installed."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import script_functions as script
import torch
from torch.futures import Future

from telegrad import rpc
from telegrad.compat.remote_module import RemoteModule, _RemoteModule
from telegrad.testing.cluster import cluster

X = torch.ones(2)


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(3) as running:
        yield running


@pytest.mark.parametrize("to", ["worker1", "worker0"])
@pytest.mark.parametrize("call", [script.add_async, script.add_sync, script.add_remote])
def test_a_script_calls_a_script_function(call, to):
    assert call(to, X, 2 * X).tolist() == [3, 3]


@pytest.mark.parametrize("count", [0, 2])
def test_values_of_any_type_come_back(count):
    for numbers, tensors, word, number in script.assorted_everywhere("worker1", count):
        assert numbers == list(range(count))
        assert tensors["ones"].shape == (count,)
        assert word == ("several" if count else None)
        assert number == 0.5


def test_a_function_may_return_nothing():
    assert script.nothing_everywhere("worker1") == 1


def test_keywords_are_checked_when_the_call_is_made():
    assert script.with_keywords("worker1", X, {"factor": 3.0}).tolist() == [6, 6]
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'factr'"):
        script.with_keywords("worker1", X, {"factr": 3.0})


@pytest.mark.parametrize("call", [script.fail_async, script.fail_sync, script.fail_remote])
def test_a_failure_there_is_raised_here(call):
    with pytest.raises(RuntimeError, match="expected failure"):
        call("worker1", X)


@pytest.mark.parametrize(
    "call",
    [script.product_async, script.product_sync, script.product_remote, script.product_forked],
)
def test_a_failure_of_an_operator_there_names_the_worker_and_the_function(call):
    """What is raised there is a RuntimeError, as it can be rebuilt here; scripts keep its text."""
    with pytest.raises(RuntimeError, match="self must be a matrix") as caught:
        call("worker1", X)
    assert "on worker 'worker1'" in str(caught.value)
    assert "return torch.mm(x, x)" in str(caught.value)


def test_a_timeout_may_be_an_int_and_nothing_but_a_number():
    assert script.whole_seconds("worker1", X).tolist() == [6, 6]
    with pytest.raises(RuntimeError, match="timeout must be a number of seconds"):
        script.seconds_in_words("worker1", X)


@pytest.mark.parametrize("call", [script.slow_async, script.slow_sync, script.slow_remote])
def test_a_timeout_is_raised_and_names_the_worker(call):
    with pytest.raises(RuntimeError, match="timeout") as caught:
        call("worker1", X, 0.3, 0.05)
    assert "worker1" in str(caught.value)
    assert call("worker1", X, 0.0, 0.0).tolist() == [1, 1]


def test_an_unknown_worker_is_an_error():
    with pytest.raises(RuntimeError, match="could not find destination 'nobody'"):
        script.add_sync("nobody", X, X)


def test_forks_call_too():
    assert script.forked("worker1", X).tolist() == [4, 4]


def test_forks_that_wait_leave_torchs_threads_to_others():
    """What they wait for needs the same few threads: each call comes back here, and waits again."""
    forks = 4 * torch.get_num_interop_threads()
    total = script.many_back_and_forth("worker1", "worker0", X, forks)
    assert total.tolist() == [4 * forks, 4 * forks]


def test_a_call_is_made_also_if_nobody_looks_at_its_result():
    rref = rpc.remote("worker1", script.numbers_up_to, (0,))
    script.left_alone("worker1", rref)
    while rref.to_here() != [1, 1, 1]:
        pass


def test_methods_of_classes_and_modules_call():
    assert script.through_a_class("worker1", X).tolist() == [2, 2]
    module = torch.jit.script(script.CallingModule("worker2"))
    assert module(X).tolist() == [6, 6]


def test_an_argument_may_have_the_name_of_one_of_our_functions():
    assert script.shadowed(X, X) == 4


def test_a_future_is_typed_and_can_be_waited_for_in_python():
    future = script.future_of("worker1", X)
    assert future.wait().tolist() == [2, 2]
    assert script.one_more(script.future_of("worker1", X)).tolist() == [3, 3]


def two(x):
    return x * 2


@pytest.mark.parametrize("function", [script.add, torch.add])
def test_a_future_from_python_can_be_waited_for_in_a_script(function):
    assert script.one_more(rpc.rpc_async("worker1", function, (X, X))).tolist() == [3, 3]


def test_so_can_that_of_a_python_function_and_one_of_the_programs_own():
    assert script.one_more(rpc.rpc_async("worker1", two, (X,))).tolist() == [3, 3]
    own: Future[torch.Tensor] = Future()
    own.set_result(X)
    assert script.one_more(own).tolist() == [2, 2]
    assert script.one_more_than_python("worker1", X).tolist() == [3, 3]


def test_so_can_several():
    futures = [rpc.rpc_async("worker1", torch.add, (X, n)) for n in range(3)]
    assert script.sum_of_futures([*futures, script.future_of("worker1", X)]).tolist() == [8, 8]


def test_a_failed_future_from_python_fails_the_script():
    with pytest.raises(RuntimeError, match="unsupported operand"):
        script.one_more(rpc.rpc_async("worker1", two, (None,)))


def test_a_script_function_may_answer_later():
    assert rpc.rpc_sync("worker1", script.relay, ("worker2", X)).tolist() == [2, 2]
    assert rpc.remote("worker1", script.relay, ("worker2", X)).to_here().tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="must return an IValue of Future type, but got Tensor"):
        rpc.rpc_sync("worker1", script.no_future, (X,))


# -- references


def test_a_reference_knows_its_owner():
    rref = rpc.remote("worker1", torch.add, (X, X))
    assert rref.to_here() is not None
    is_owner, name, info, is_confirmed = script.all_about(rref)
    assert (is_owner, name, info) == (False, "worker1", rpc.WorkerInfo("worker1", 1))
    assert is_confirmed
    assert rpc.rpc_sync("worker1", script.all_about, (rref,))[0]


def test_a_reference_goes_through_scripts_and_back():
    rref = script.made_remotely("worker1", X)
    assert isinstance(rref, rpc.RRef)
    assert rref.to_here().tolist() == [2, 2]
    assert script.here_plus_one(rref).tolist() == [3, 3]
    assert rpc.rpc_sync("worker2", script.here_plus_one, (rref,)).tolist() == [3, 3]
    assert script.ask_the_owner(rref).tolist() == [2, 2]
    assert script.sum_of_all([rref, rpc.RRef(X)]).tolist() == [3, 3]


def test_local_value_is_for_the_owner():
    with pytest.raises(RuntimeError, match=r"local_value\(\) works only on the owner"):
        script.local(rpc.remote("worker1", torch.add, (X, X)))


def test_what_a_script_changes_in_place_others_see():
    rref = rpc.remote("worker1", script.numbers_up_to, (2,))
    for number in (7, 8):
        rpc.rpc_sync("worker1", script.append, (rref, number))
    assert rref.to_here() == [0, 1, 7, 8]
    here = rpc.RRef([1])
    script.append(here, 2)
    assert here.local_value() == [1, 2]


def test_a_module_is_used_at_its_owner():
    rref = rpc.rpc_sync("worker1", script.make_scale, (3.0,))
    assert rpc.rpc_sync("worker1", script.run_scaling, (rref, X)).tolist() == [3, 3]
    for fetch in (lambda: script.fetch_scaling(rref, X), rref.to_here):
        with pytest.raises(RuntimeError, match="It can't be sent through RPC from owner"):
            fetch()


class HoldsReferences(torch.nn.Module):
    def __init__(self, rref):
        super().__init__()
        self.rref = rref
        self.rrefs = [rref, rref]
        self.named = {"one": rref}

    def forward(self):
        return self.rref.to_here() + self.rrefs[1].to_here() + self.named["one"].to_here()


def test_a_module_may_hold_references():
    rref = rpc.remote("worker1", torch.add, (X, X))
    assert torch.jit.script(HoldsReferences(rref))().tolist() == [6, 6]


def reference_of(rref):
    return rref


class HoldsReferenceOfReference(torch.nn.Module):
    def __init__(self, rref):
        super().__init__()
        self.rref = rref

    def forward(self):
        return self.rref.to_here().to_here()


def test_also_references_to_references():
    rref = rpc.remote("worker1", reference_of, (rpc.RRef(X),))
    assert torch.jit.script(HoldsReferenceOfReference(rref))().tolist() == [1, 1]


def test_a_remote_module_with_an_interface_is_called_from_scripts():
    module = _RemoteModule("worker1", script.Scale, (3.0,), _module_interface_cls=script.Scaling)
    assert module.forward_async(X, 2).wait().tolist() == [6, 6]
    assert script.scale_by_interface(torch.jit.script(module), X).tolist() == [6, 6]
    again = RemoteModule.init_from_module_rref("worker1", module.get_module_rref(), script.Scaling)
    assert torch.jit.script(again)(X, 1).tolist() == [3, 3]


# -- saved functions


def test_a_saved_function_calls_where_it_is_loaded():
    saved = io.BytesIO()
    torch.jit.save(torch.jit.script(script.CallingModule("worker2")), saved)
    assert rpc.rpc_sync("worker1", script.load_and_run, (saved.getvalue(), X)).tolist() == [6, 6]


def test_a_saved_function_runs_where_its_module_was_never_imported(tmp_path):
    torch.jit.save(torch.jit.script(script.CallingModule("worker0")), tmp_path / "saved.pt")
    program = f"""
        import sys, torch, telegrad
        from telegrad import rpc
        options = rpc.RpcOptions(init_method="file://{tmp_path}/store")
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
        loaded = torch.jit.load("{tmp_path}/saved.pt")
        assert "script_functions" not in sys.modules
        print(loaded(torch.ones(2)).tolist())
        rpc.shutdown()
    """
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=Path(script.__file__).parent,
    )
    assert run.stdout == "[6.0, 6.0]\n", run.stderr
