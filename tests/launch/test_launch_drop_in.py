"""`telegrad run --drop-in`: programs written for torch's RPC, unchanged."""

from __future__ import annotations

import socket
import textwrap
from pathlib import Path

import pytest
from launching import telegrad

PROGRAM = Path(__file__).parents[1] / "compat" / "compat_program.py"

SCRIPT = """
    import os
    import torch
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    from torch.distributed.rpc import rpc_sync

    weight = torch.ones(2, requires_grad=True)

    def scale(x):
        return x * weight

    def gradient(context_id):
        return dist_autograd.get_gradients(context_id)[weight]

    def whose():
        return rpc.rpc_sync.__module__.partition(".")[0]

    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    if rank == 0:
        with dist_autograd.context() as context_id:
            loss = rpc_sync("worker1", scale, args=(torch.tensor([2.0, 3.0]),)).sum()
            dist_autograd.backward(context_id, [loss])
            print(rpc_sync("worker1", gradient, args=(context_id,)).tolist())
        print("on", rpc_sync("worker1", whose), __name__)
    rpc.shutdown()
"""


def run(tmp_path, *arguments):
    with telegrad("run", *arguments, cwd=tmp_path) as launched:
        code = launched.end()
        return code, launched.out, launched.err


@pytest.mark.parametrize("drop_in", [True, False])
def test_a_program_for_torchs_rpc_runs_on_telegrad(tmp_path, drop_in):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    options = ["--drop-in"] if drop_in else []
    code, out, err = run(tmp_path, "-n", "2", *options, "script.py")
    assert code == 0, err
    whose = b"telegrad" if drop_in else b"torch"  # the launcher itself suits torch's own as well
    assert out == b"[0] [2.0, 3.0]\n[0] on %s __main__\n" % whose


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_processes_that_the_program_starts_follow(tmp_path, method):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    code, out, err = run(tmp_path, "--drop-in", PROGRAM, method, port)
    assert (code, out) == (0, b"on telegrad\n"), err


def test_a_module_can_be_run_so(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(SCRIPT))
    code, out, err = run(tmp_path, "-n", "2", "--drop-in", "-m", "program")
    assert code == 0, err
    assert b"[0] on telegrad __main__\n" in out
