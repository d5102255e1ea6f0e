"""What the bridge changes about compiling, and what it leaves alone. No worker runs here."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import script_functions as script
import torch

from telegrad import rpc


def compiled(function):
    return torch.jit.script(function)


def run(code):
    """Runs code in a fresh interpreter; functions that are compiled need a file."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- what the compiler refuses, in its own words


def test_too_few_arguments():
    def call(dst: str):
        return rpc.rpc_async(dst, script.scaled_sum, (torch.ones(1),)).wait()

    with pytest.raises(RuntimeError, match="Argument y not provided"):
        compiled(call)


def test_too_many_arguments():
    def call(dst: str):
        return rpc.rpc_sync(dst, script.scaled_sum, (torch.ones(1), torch.ones(1), 1.0, 1, 1))

    expected = "Expected at most 4 arguments but found 5 positional arguments"
    with pytest.raises(RuntimeError, match=expected):
        compiled(call)


@pytest.mark.parametrize("way", ["rpc_async", "rpc_sync", "remote"])
def test_an_argument_of_another_type(way, tmp_path):
    source = f"""
        import torch
        from script_functions import scaled_sum
        from telegrad import rpc

        def call(dst: str):
            rpc.{way}(dst, scaled_sum, (torch.ones(1), "one"))
    """
    names = _written(tmp_path, source, f"wrong_{way}")
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor' for argument 'y'"):
        compiled(names["call"])


def _written(directory, source, name):
    """The names in a module with that source."""
    path = directory / f"{name}.py"
    path.write_text(textwrap.dedent(source))
    names = {"__name__": name}
    exec(compile(path.read_text(), str(path), "exec", dont_inherit=True), names)
    return names


def test_neither_enough_nor_named_arguments():
    def alone(dst: str):
        return rpc.rpc_async(dst)

    def named(dst: str):
        return rpc.rpc_async(dst, script.add, args=(torch.ones(1), torch.ones(1)))

    with pytest.raises(RuntimeError, match=r"Possible forms of call to rpc_async\(..\) are"):
        compiled(alone)
    with pytest.raises(RuntimeError, match="does not support kwargs yet"):
        compiled(named)


def test_a_target_that_is_no_function():
    def call(dst: str):
        return rpc.remote(dst, torch.ones, (2,))

    with pytest.raises(RuntimeError, match="user_callable should be a FunctionValue"):
        compiled(call)


def test_a_function_that_calls_itself(tmp_path):
    source = """
        from telegrad import rpc

        def again(dst: str) -> int:
            return rpc.remote(dst, again, (dst,)).to_here()
    """
    with pytest.raises(RuntimeError, match="called recursively"):
        compiled(_written(tmp_path, source, "calls_itself")["again"])


def test_a_reference_needs_a_type():
    def call(rref: rpc.RRef):
        return rref

    with pytest.raises(RuntimeError, match="RRef without a contained type"):
        compiled(call)


# -- what comes out


def test_graphs_hold_our_operators_only():
    for function, operators in (
        (script.add_async, ["telegrad::rpc_async"]),
        (script.add_sync, ["telegrad::rpc_sync"]),
        (script.add_remote, ["telegrad::rpc_remote"]),
        (script.backward_in_script, ["telegrad::dist_backward", "telegrad::get_gradients"]),
        (script.one_more, ["telegrad::typed_future"]),
    ):
        graph = str(function.graph)
        for operator in operators:
            assert operator in graph
        assert "prim::rpc" not in graph
        assert "destination" not in graph


def test_a_python_function_is_compiled_when_a_script_calls_it(tmp_path):
    source = """
        from telegrad import rpc

        def plain(x: int) -> int:
            return x + 1

        def call(dst: str):
            return rpc.remote(dst, plain, (1,))
    """
    call = compiled(_written(tmp_path, source, "calls_python")["call"])
    assert "__torch__.calls_python.plain" in str(call.graph)


# -- what is left alone

NOT_OURS = """
import torch
from torch import Tensor
from torch.futures import Future

def wait(future: Future[Tensor]) -> Tensor:
    return future.wait()
"""

TORCHS_OWN = """
import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.rpc import RRef

@torch.jit.script
def add(x, y):
    return x + y

@torch.jit.script
def call(dst: str, x: Tensor):
    return rpc.rpc_async(dst, add, (x, x)).wait()

@torch.jit.script
def fetch(rref: RRef[Tensor]) -> Tensor:
    return rref.to_here()
"""


def test_a_module_that_does_not_know_telegrad_is_compiled_as_ever(tmp_path):
    wait = compiled(_written(tmp_path, NOT_OURS, "not_ours")["wait"])
    assert "telegrad" not in str(wait.graph)


def test_torchs_own_rpc_is_left_alone(tmp_path):
    names = _written(tmp_path, TORCHS_OWN, "torchs_own")
    assert "prim::rpc_async" in str(names["call"].graph)
    assert "RRef(Tensor)" in str(names["fetch"].schema)


def test_install_and_uninstall_decide_whose_functions_are_meant(tmp_path):
    (tmp_path / "torchs_own.py").write_text(TORCHS_OWN)
    run(f"""
        import importlib, sys
        sys.path.insert(0, {str(tmp_path)!r})
        import telegrad

        def of_telegrad():
            sys.modules.pop("torchs_own", None)
            module = importlib.import_module("torchs_own")
            ours = "telegrad::rpc_async" in str(module.call.graph)
            assert ours == ("prim::rpc_async" not in str(module.call.graph))
            assert ours == ("RRef(Tensor)" not in str(module.fetch.schema))
            return ours

        assert not of_telegrad()
        for _ in range(2):
            telegrad.install()
            telegrad.install()
            assert of_telegrad()
            telegrad.uninstall()
            telegrad.uninstall()
            assert not of_telegrad()
    """)


def test_nothing_is_loaded_before_something_is_compiled(tmp_path):
    (tmp_path / "compiled_here.py").write_text(
        "import torch\n\n@torch.jit.script\ndef f(x):\n    return x\n"
    )
    run(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import telegrad
        loaded = "telegrad.compat.torchscript.hooks"
        assert loaded not in sys.modules
        import compiled_here
        assert loaded in sys.modules
    """)
