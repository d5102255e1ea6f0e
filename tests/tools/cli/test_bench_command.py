"""`telegrad bench`: real measurements, of a part."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch

from telegrad.tools.bench import passes
from telegrad.tools.bench.harness import Result
from telegrad.tools.bench.plot import svg
from telegrad.tools.cli import main


def test_it_measures_what_is_asked_for_and_draws_it(tmp_path):
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "telegrad", "bench", "empty call", "torch builtin"),
            *("--plot", "ratios.svg", "--write", "table.md"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    head, first, second, *rest = ran.stdout.splitlines()
    assert head.split() == ["case", "torch", "telegrad", "ratio", "mark"]
    assert first.startswith("empty call ")
    assert second.startswith("torch builtin, two small tensors ")
    assert rest[:2] == ["wrote ratios.svg", "wrote table.md"]
    drawn = ElementTree.parse(tmp_path / "ratios.svg").getroot()
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "empty call" in texts
    assert "| empty call |" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nonsense"], "no case has 'nonsense' in its name: see telegrad bench --list"),
        (["echo", "--plot", "plot.png"], "a plot is written as SVG: name it *.svg"),
        (["echo", "--plot", "nowhere/plot.svg"], "'nowhere/plot.svg' cannot be written"),
        (["echo", "--write", "."], "'.' cannot be written"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(
    tmp_path, monkeypatch, capsys, arguments, complaint
):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert complaint in err
    assert err.count("\n") == 1


def test_it_names_its_cases(capsys):
    assert main(["bench", "--list"]) == 0
    assert {"empty call", "echo of 16 MB"} < set(capsys.readouterr().out.splitlines())


def test_bars_point_to_the_right_of_one_where_telegrad_is_faster():
    def bar(ratio):
        result = Result(name="a < b", torch=ratio, telegrad=1.0, ratio=ratio, mark=None)
        root = ElementTree.fromstring(svg([result]))
        *_, rect = root.iter("{http://www.w3.org/2000/svg}rect")
        (one,) = [line for line in root if line.get("stroke") == "black"]
        return float(rect.get("x")), float(rect.get("width")), float(one.get("x1"))

    begin, width, one = bar(8.0)
    assert begin == pytest.approx(one, abs=0.1)
    assert width > 100
    begin, width, one = bar(0.5)
    assert begin + width == pytest.approx(one, abs=0.2)
    assert bar(1e-3)[0] >= 0


def test_all_trainers_train_at_once(monkeypatch):
    """The driver is one of them: it begins when the others have been told to."""
    events = []

    def train(side_name, steps):
        events.append("worker0")
        return 1.0

    def rpc_async(to, function, args):
        events.append(to)
        future = torch.futures.Future()
        future.set_result(3.0 if to == "worker3" else 2.0)
        return future

    monkeypatch.setattr(passes, "train", train)
    side = SimpleNamespace(name="telegrad", rpc=SimpleNamespace(rpc_async=rpc_async))
    assert passes.trainers(side)() == 3.0
    assert events == ["worker2", "worker3", "worker0"]
