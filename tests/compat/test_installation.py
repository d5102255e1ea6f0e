"""`install()` and `uninstall()`: in processes of their own, since they change the whole process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compat_program.py")


def run(code, *arguments):
    """Runs code in a fresh interpreter, with warnings as they come; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_it_takes_the_places_of_torchs_modules():
    run("""
        import telegrad
        telegrad.install()
        telegrad.install()
        import torch.distributed.rpc, torch.distributed.rpc.api as api
        import torch.distributed.rpc.backend_registry, torch.distributed.rpc._testing
        import torch.distributed.autograd as dist_autograd
        from torch.distributed.optim import DistributedOptimizer
        from torch.distributed.nn import RemoteModule
        from torch.distributed.rpc import BackendType, RRef
        for thing in (torch.distributed.rpc.rpc_sync, api._all_gather, dist_autograd.backward,
                      DistributedOptimizer, RemoteModule, RRef, BackendType):
            assert thing.__module__.startswith("telegrad."), thing
        assert torch.distributed.rpc.is_available()
        assert BackendType.TENSORPIPE in BackendType
    """)


def test_what_was_imported_before_is_replaced_too():
    run("""
        import torch.distributed.rpc as rpc
        from torch.distributed.rpc import rpc_sync, RRef
        from torch.distributed.autograd import context
        from torch.distributed.optim import DistributedOptimizer
        from torch.distributed.nn import RemoteModule
        import torch.nn.parallel.distributed as ddp
        before = [rpc, rpc_sync, RRef, context, DistributedOptimizer, RemoteModule, ddp.RRef]
        import telegrad
        telegrad.install()
        for thing in (rpc_sync, RRef, context, DistributedOptimizer, RemoteModule, ddp.RRef):
            assert thing.__module__.startswith("telegrad."), thing
        assert rpc.__name__.startswith("telegrad.")
        telegrad.uninstall()
        after = [rpc, rpc_sync, RRef, context, DistributedOptimizer, RemoteModule, ddp.RRef]
        assert all(a is b for a, b in zip(before, after)), after
    """)


def test_it_can_be_taken_back_and_done_again():
    run("""
        import sys, telegrad
        from telegrad import compat
        for _ in range(2):
            telegrad.install()
            assert compat.is_installed()
            from torch.distributed.rpc import rpc_sync
            from torch.distributed.optim import DistributedOptimizer
            from torch.distributed.nn import RemoteModule
            for thing in (rpc_sync, DistributedOptimizer, RemoteModule):
                assert thing.__module__.startswith("telegrad."), thing
            telegrad.uninstall()
            telegrad.uninstall()
            assert not compat.is_installed()
            for thing in (rpc_sync, DistributedOptimizer, RemoteModule):
                assert thing.__module__.startswith("torch."), thing
            import torch.distributed.rpc
            assert torch.distributed.rpc is sys.modules["torch.distributed.rpc"]
            assert torch.distributed.rpc.__name__ == "torch.distributed.rpc"
    """)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_follow(method):
    """The program installs nothing: its parent has, and is not asked again."""
    printed = run(
        """
        import runpy, sys, telegrad
        program, *sys.argv[1:] = sys.argv[1:]
        sys.argv[0] = program
        telegrad.install()
        runpy.run_path(program, run_name="__main__")
        """,
        str(PROGRAM),
        method,
        free_port(),
    )
    assert printed == "on telegrad\n"


def test_nothing_of_torchs_own_runs_afterwards():
    """Every function of torch's RPC and autograd extension is made to fail."""
    printed = run(
        """
        import runpy, sys, types
        import torch
        import telegrad
        program, *sys.argv[1:] = sys.argv[1:]
        sys.argv[0] = program
        telegrad.install()

        def poisoned(name):
            def fail(*args, **kwargs):
                raise SystemExit(f"torch's own {name} was called")
            return fail

        for extension in (torch._C._distributed_rpc, torch._C._distributed_autograd):
            for name, value in list(vars(extension).items()):
                if isinstance(value, type):
                    try:
                        value.__init__ = poisoned(name)
                    except TypeError:
                        pass
                elif callable(value):
                    setattr(extension, name, poisoned(name))
        torch._C._rpc_init = torch._C._dist_autograd_init = poisoned("_rpc_init")
        torch._C._faulty_agent_init = poisoned("_faulty_agent_init")
        for module in list(sys.modules.values()):
            if getattr(module, "__file__", None) and "torch/distributed/rpc/" in module.__file__:
                for name, value in list(vars(module).items()):
                    if isinstance(value, types.FunctionType):
                        setattr(module, name, poisoned(name))
        runpy.run_path(program, run_name="__main__")
        with open("/proc/self/maps") as maps:
            pass
        """,
        str(PROGRAM),
        "fork",
        free_port(),
    )
    assert printed == "on telegrad\n"


def test_torch_running_is_not_pulled_from_under_a_program():
    run("""
        import os, torch.distributed.rpc as rpc, telegrad
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        import tempfile
        place = tempfile.mktemp()
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{place}")
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
        try:
            telegrad.install()
        except RuntimeError as error:
            assert "shut it down first" in str(error)
        else:
            raise AssertionError("installed")
        rpc.shutdown()
        telegrad.install()
        import torch.distributed.rpc as ours
        ours.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=(
            ours.TensorPipeRpcBackendOptions(init_method=f"file://{place}2")))
        try:
            telegrad.uninstall()
        except RuntimeError as error:
            assert "shutdown()" in str(error)
        else:
            raise AssertionError("uninstalled")
        ours.shutdown()
        telegrad.uninstall()
    """)
