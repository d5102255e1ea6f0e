"""`install()` and `uninstall()`: in processes of their own, since they change the whole process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compat_program.py")
POISONED = Path(__file__).with_name("poisoned_program.py")


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


def test_packages_that_are_imported_later_know_their_parts():
    run("""
        import sys, torch, telegrad
        telegrad.install()
        assert "torch.distributed.nn" not in sys.modules  # or else this proves nothing
        assert "torch.distributed.optim" not in sys.modules
        import torch.distributed.nn.api.remote_module as remote_module
        import torch.distributed.optim.optimizer as optimizer
        assert torch.distributed.nn.api.remote_module is remote_module
        assert torch.distributed.nn.RemoteModule is remote_module.RemoteModule
        assert torch.distributed.optim.optimizer is optimizer
        assert torch.distributed.optim.DistributedOptimizer is optimizer.DistributedOptimizer
        for module in (remote_module, optimizer):
            assert module.__name__ == module.__spec__.name
            assert module.__name__.startswith("telegrad."), module
        finders = list(sys.meta_path)
        telegrad.uninstall()
        assert len(sys.meta_path) == len(finders) - 1
        assert remote_module.__name__ == "torch.distributed.nn.api.remote_module"
        assert torch.distributed.nn.api.remote_module is remote_module
        assert torch.distributed.optim.optimizer is optimizer
        assert optimizer.DistributedOptimizer.__module__.startswith("torch.")
    """)


def test_what_was_imported_before_is_replaced_too():
    run("""
        import torch.distributed.rpc as rpc
        from torch.distributed.rpc import rpc_sync, RRef
        from torch.distributed.autograd import context
        from torch.distributed.optim import DistributedOptimizer
        from torch.distributed.nn import RemoteModule
        from torch.autograd.profiler_legacy import profile
        import torch.nn.parallel.distributed as ddp
        things = "rpc_sync, RRef, context, DistributedOptimizer, RemoteModule, ddp.RRef, profile"
        before = [rpc, *eval(things)]
        import telegrad
        telegrad.install()
        for thing in eval(things):
            assert thing.__module__.startswith("telegrad."), thing
        assert rpc.__name__.startswith("telegrad.")
        telegrad.uninstall()
        after = [rpc, *eval(things)]
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


def test_torchs_own_runs_after_uninstall():
    run("""
        import sys, tempfile, telegrad
        telegrad.install()
        telegrad.uninstall()
        # Nobody has asked for it, and it would replace the enumeration of backends.
        assert "torch.distributed.rpc._testing.faulty_agent_backend_registry" not in sys.modules
        import torch.distributed.rpc as rpc
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tempfile.mktemp()}")
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
        assert rpc.rpc_sync("worker0", abs, args=(-1,)) == 1
        rpc.shutdown()
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


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_nothing_of_torchs_own_runs_afterwards(method):
    """Every function of torch's RPC and autograd extension is made to fail, in every process."""
    command = [sys.executable, str(POISONED), method, free_port()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout == "on telegrad\n"


def test_the_poison_is_deadly():
    """The proof above proves something: without `install` the program meets the poison."""
    source = POISONED.read_text(encoding="utf-8").replace("    install()\n", "    pass\n")
    command = [sys.executable, "-c", source, "fork", free_port()]
    environment = {**os.environ, "PYTHONPATH": str(POISONED.parent)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode != 0
    assert "torch's own" in ended.stderr


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
