"""Programs whose script functions still wait end well, however they end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("script_exit_program.py")
PAIRS = 3


@pytest.mark.parametrize(
    "ending", ["abandoned", "waiting", "interrupted", "interrupted synchronously", "raising"]
)
def test_no_process_aborts_at_its_end(tmp_path, ending):
    """A thread of torch's that needs the interpreter while it ends aborts the process."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, ending, str(PAIRS), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.stdout == "ended badly: []\n", ran.stdout + ran.stderr
    assert ran.returncode == 0, ran.stderr
