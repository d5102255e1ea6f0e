"""The same program under `torchrun`, on several machines: two agents, each with its worker."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from namespaces import two_hosts

EXAMPLE = Path(__file__).parents[2] / "examples" / "rnn_remote_embedding.py"
DIFFERENCE = "largest difference to the losses in one process:"


def agent(node, address, port, *before, **settings):
    """torchrun on one of two machines; `before` is what puts it there."""
    return subprocess.Popen(
        [
            *(*before, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--node-rank", str(node), "--nproc-per-node", "1"),
            *("--master-addr", address, "--master-port", str(port), str(EXAMPLE)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(agents):
    """What both have printed, once both have ended well."""
    try:
        ends = [running.communicate(timeout=100) for running in agents]
    finally:
        for running in agents:
            running.kill()
            running.communicate()
    for running, (_, errors) in zip(agents, ends, strict=True):
        assert running.returncode == 0, errors
    return "".join(printed for printed, _ in ends)


def free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_agents_on_one_machine():
    port = free_port()
    printed = outcome([agent(node, "127.0.0.1", port) for node in (0, 1)])
    assert DIFFERENCE in printed
    assert printed.endswith("ok\n")


@pytest.fixture
def hosts():
    with two_hosts("10.99.8") as names:
        yield names


def test_two_agents_on_two_machines(hosts):
    printed = outcome(
        [
            agent(node, "10.99.8.1", 29600, "ip", "netns", "exec", host, TELEGRAD_SECRET="5" * 64)
            for node, host in enumerate(hosts)
        ]
    )
    assert DIFFERENCE in printed
    assert printed.endswith("ok\n")


def test_two_machines_without_a_secret_are_refused(hosts):
    agents = [
        agent(node, "10.99.8.1", 29600, "ip", "netns", "exec", host)
        for node, host in enumerate(hosts)
    ]
    try:
        ends = [running.communicate(timeout=100) for running in agents]
    finally:
        for running in agents:
            running.kill()
            running.communicate()
    assert all(running.returncode for running in agents)
    for _, errors in ends:
        assert "export TELEGRAD_SECRET=$(" in errors
