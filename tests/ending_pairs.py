"""Pairs of worker processes that end as a script does, through the end of the interpreter."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def assert_end_well(program, ending, pairs, directory):
    """Runs a program that calls `run_pairs`."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", program, ending, str(pairs), str(directory)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert ran.stdout == "ended badly: []\n", ran.stdout + ran.stderr
    assert ran.returncode == 0, ran.stderr


def run_pairs(run, ends_with=lambda ending: 0):
    """The program: prints the exit codes of those that did not end well.

        python program.py <how they end> <pairs> <directory>

    Args:
        run: called in each process, with its rank, the path of a store, how it ends, a function
            that waits for the other process to call it as well, and the number of the pair.
        ends_with: the right exit code.
    """
    ending, pairs, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    ended_badly = []
    for pair in range(pairs):
        ends = socket.socketpair()
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                ends[1 - rank].close()  # only the other process has it: its end ends a wait

                def meet(end=ends[rank]):
                    end.send(b".")
                    assert end.recv(1), "the other process has ended"

                run(rank, f"{directory}/store{pair}", ending, meet, pair)
                return  # ends the interpreter
            children.append(child)
        for end in ends:
            end.close()
        for child in children:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code != ends_with(ending):
                ended_badly.append(code)
    print("ended badly:", ended_badly)
