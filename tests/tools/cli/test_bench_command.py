"""`telegrad bench`: real measurements, of a part."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch

from telegrad.tools import plots
from telegrad.tools.bench import passes
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


def test_bars_point_to_the_right_of_one_where_telegrad_is_faster(tmp_path, fonts):
    def bar(ratio):
        path = tmp_path / "ratios.svg"
        plots.save_ratios(path, [("a < b", ratio, "")], "title", "foot")
        drawn = ElementTree.parse(path).getroot()
        assert "a < b" in [e.text for e in drawn.iter("{http://www.w3.org/2000/svg}text")]
        paths = list(drawn.iter("{http://www.w3.org/2000/svg}path"))
        (filled,) = [p for p in paths if {"#2a7f62", "#b5483a"} & set(p.get("style", "").split())]
        return filled.get("style"), filled.get("d")

    assert "#2a7f62" in bar(8.0)[0]
    assert "#b5483a" in bar(0.5)[0]
    assert "nan" not in bar(1e-3)[1]


def test_a_plot_without_matplotlib_is_refused_with_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(plots, "are_available", lambda: False)
    assert main(["bench", "echo", "--plot", "plot.svg"]) == 2
    assert "pip install 'telegrad[plots]'" in capsys.readouterr().err


def test_matplotlib_is_loaded_by_plots_only():
    code = "import sys, telegrad, telegrad.tools.cli; sys.exit('matplotlib' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], timeout=100, check=False)
    assert ran.returncode == 0


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
