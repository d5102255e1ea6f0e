"""Calls between hosts that are joined by a slow cable."""

from __future__ import annotations

import subprocess
import sys

import pytest

from namespaces import two_hosts

PROGRAM = """
import sys
import time
import torch
from telegrad import rpc
from telegrad.errors import RpcTimeout

rank = int(sys.argv[1])
options = rpc.RpcOptions(init_method="tcp://10.99.8.1:29778", secret="shared")
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
if rank == 0:
    assert rpc.rpc_sync("worker1", len, ("abc",)) == 3
    begun = time.monotonic()
    for send, arguments in ((len, (torch.ones(1 << 22),)), (torch.ones, (1 << 22,))):
        try:
            rpc.rpc_sync("worker1", send, arguments, timeout=1)
        except RpcTimeout as error:
            assert "worker1" in str(error)
        else:
            raise AssertionError("the call has taken all the time that it wanted")
    # Each of the tensors takes half a minute.
    assert time.monotonic() - begun < 20
    assert rpc.rpc_sync("worker1", len, ("abc",)) == 3
rpc.shutdown()
"""


@pytest.fixture(name="slow_hosts")
def fixture_slow_hosts():
    with two_hosts("10.99.8") as names:
        for name in names:
            limit = ("tbf", "rate", "4mbit", "burst", "32kbit", "latency", "400ms")
            command = ("tc", "-n", name, "qdisc", "add", "dev", name, "root", *limit)
            try:
                subprocess.run(command, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"the network cannot be made slow here: {error}")
        yield names


def test_a_timeout_holds_while_large_tensors_go_or_come(slow_hosts, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    running = [
        subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, str(program), str(rank)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, space in enumerate(slow_hosts)
    ]
    try:
        for process in running:
            _, errors = process.communicate(timeout=100)
            assert process.returncode == 0, errors
    finally:
        for process in running:
            process.kill()
            process.communicate()
