"""What `__main__` defines travels by value between a driver and its workers."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import main_program
import pytest

from telegrad.wire.function_names import name_of


@pytest.fixture(scope="module")
def outcomes():
    """Each check of the program with its traceback, or nothing if it passed."""
    done = subprocess.run(
        [sys.executable, str(pathlib.Path(main_program.__file__))],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("check", main_program.CHECKS)
def test_definitions_of_a_script(outcomes, check):
    assert outcomes[check] == ""


def test_without_workers_functions_of_a_script_are_named(monkeypatch):
    def top():
        pass

    top.__module__, top.__qualname__ = "__main__", "top"
    monkeypatch.setattr(sys.modules["__main__"], "top", top, raising=False)
    assert name_of(top) == b"__main__\0top"
