"""The plain face has the types that a program expects, for mypy and for editors."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("typed_program.py")


@pytest.mark.timeout(300)  # mypy reads all of torch, if it has no cache yet
def test_mypy_agrees_with_a_typed_program():
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", PROGRAM],
        cwd=PROGRAM.parent.parent,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
