"""The progress bar and the plot of the demo."""

from __future__ import annotations

import io
import math
import xml.etree.ElementTree as ElementTree

import pytest

from telegrad.observe import TrafficCount
from telegrad.tools.demo.progress import Progress
from telegrad.tools.plots import save_losses


class Terminal(io.StringIO):
    def isatty(self):
        return True


def traffic():
    return {"driver": TrafficCount(bytes_sent=2_000_000, calls_made=7, calls_served=1)}


def test_a_terminal_gets_a_bar_that_is_drawn_over():
    out = Terminal()
    progress = Progress(out, 10, traffic)
    progress._shown_at = -math.inf
    progress.step_done(5, 2.0)
    first = out.getvalue()
    assert "████████████░░░░░░░░░░░░ 5/10  loss 2.000" in first
    assert "driver   sent     2 MB" in first
    assert "calls 7 made, 1 served" in first
    progress.step_done(10, 2.0)
    assert out.getvalue()[len(first) :].startswith("\x1b[2A\r\x1b[K████████████████████████ 10/10")


def test_steps_in_quick_succession_are_not_all_drawn():
    out = Terminal()
    progress = Progress(out, 1000, traffic)
    for step in range(10):
        progress.step_done(step + 1, 1.0)
    assert out.getvalue().count("loss") <= 1


def test_without_a_terminal_there_are_a_few_lines():
    out = io.StringIO()
    progress = Progress(out, 1000, traffic)
    for step in range(1000):
        progress.step_done(step + 1, 1.0)
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("step 1000/1000  loss 1.000")
    assert lines[-1].endswith("(driver 2 MB 8 calls)")


@pytest.mark.parametrize("losses", [[1.0], [2.0, 1.0], [0.0, 0.0], [3.0, math.nan, math.inf, 1e-9]])
def test_any_losses_can_be_plotted(losses, tmp_path, fonts):
    save_losses(tmp_path / "loss.svg", losses, "a <title>")
    drawn = (tmp_path / "loss.svg").read_text()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert "nan" not in drawn


def test_no_loss_is_no_plot(tmp_path):
    with pytest.raises(ValueError, match="no loss"):
        save_losses(tmp_path / "loss.svg", [math.nan], "")
