"""Script functions of programs that are written for torch's RPC, after `install()`."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("script_program.py")
INSTALL = """
import runpy, sys
if sys.argv.pop(1) == "telegrad":
    import telegrad
    telegrad.install()
program, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = program
runpy.run_path(program, run_name="__main__")
"""


def free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(side, method):
    arguments = [side, str(PROGRAM), method, free_port()]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INSTALL, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_program_runs_unchanged_in_the_processes_it_starts(method):
    assert run("telegrad", method) == "[4.0, 4.0] on telegrad\n"


def test_and_gives_what_torchs_own_gives():
    assert run("torch", "fork") == "[4.0, 4.0] on torch\n"
