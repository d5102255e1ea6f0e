"""Programs whose script functions still wait end well, however they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from ending_pairs import assert_end_well

PROGRAM = Path(__file__).with_name("script_exit_program.py")
PAIRS = 3


@pytest.mark.parametrize(
    "ending", ["abandoned", "waiting", "interrupted", "interrupted synchronously", "raising"]
)
def test_no_process_aborts_at_its_end(tmp_path, ending):
    """A thread of torch's that needs the interpreter while it ends aborts the process."""
    assert_end_well(PROGRAM, ending, PAIRS, tmp_path)
