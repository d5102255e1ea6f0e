"""Programs that use autograd end well, however they end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "exit_program.py"
PAIRS = 5


@pytest.mark.parametrize("ending", ["graceful", "ungraceful", "abandoned", "bereaved"])
def test_no_process_aborts_at_its_end(tmp_path, ending):
    """A thread that ends while the interpreter does, and has autograd's thread state, aborts it."""
    ran = subprocess.run(
        [sys.executable, PROGRAM, ending, str(PAIRS), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.stdout == "ended badly: []\n", ran.stdout + ran.stderr
    assert ran.returncode == 0
