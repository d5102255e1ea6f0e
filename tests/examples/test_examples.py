"""Every example runs, by the command it names, and says what the page says it does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "examples" / "README.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SECTION = re.compile(r"^```sh\n(telegrad run .*?)\n```\n+```text\n(.*?)^```$", re.M | re.S)
SHOWN = {
    re.search(r"(\w+)\.py", command)[1]: (command, out) for command, out in SECTION.findall(PAGE)
}

CHECKS = {
    "gradient_penalty": r"largest difference of 5 gradients to one process: \d\.\de-1\d",
    "parameter_server": r"same training in one process: \d\.\de[-+](0[6-9]|00)",
    "pipeline": r"largest difference to the same model in one process: \d\.\de[-+](0[6-9]|00)",
    "reinforcement_learning": r"average reward rose from 0\.\d+ to 0\.[789]\d",
    "rnn_remote_embedding": r"to the losses in one process: \d\.\de[-+](0[5-9]|00)",
    "split_learning_tls": r"(9\d|100)% of the diagnoses are right",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_does_what_it_promises(path):
    command, shown = SHOWN[path.stem]
    assert f"    {command}\n" in path.read_text(), "the file names the same command"
    ran = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(CHECKS[path.stem], ran.stdout), ran.stdout
    # figures may differ from machine to machine, words do not
    assert re.sub(r"[-+e\d.]+", "#", ran.stdout) == re.sub(r"[-+e\d.]+", "#", shown)
    assert re.fullmatch("(telegrad: OMP_NUM_THREADS=.*\n)?", ran.stderr)


SPOILED = {
    "gradient_penalty": ("dist_autograd.backward(context_id, [penalty])", "pass"),
    "parameter_server": ("gradients[parameter] / TRAINERS", "gradients[parameter]"),
    "pipeline": ("optimizer.step(context_id)", "pass"),
    "reinforcement_learning": ("return move.item()", "return 0"),
    "rnn_remote_embedding": ("optimizer.step(context_id)", "pass"),
    "split_learning_tls": ("optimizer.step(context_id)", "pass"),
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_notices_when_it_is_wrong(path, tmp_path):
    right, wrong = SPOILED[path.stem]
    assert right in path.read_text()
    spoiled = tmp_path / path.name
    spoiled.write_text(path.read_text().replace(right, wrong))
    command = SHOWN[path.stem][0].replace(f"examples/{path.name}", str(spoiled))
    ran = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr  # it is its own check that fails


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text().splitlines()) <= 110
