"""Programs that use autograd end well, however they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from ending_pairs import assert_end_well

PROGRAM = Path(__file__).parent / "exit_program.py"
PAIRS = 5


@pytest.mark.parametrize("ending", ["graceful", "ungraceful", "abandoned", "bereaved"])
def test_no_process_aborts_at_its_end(tmp_path, ending):
    """A thread that ends while the interpreter does, and has autograd's thread state, aborts it."""
    assert_end_well(PROGRAM, ending, PAIRS, tmp_path)
