"""The page about starting workers: its programs run, and its commands print what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
(PAGE,) = (ROOT / "docs").rglob("launching.md")
TEXT = PAGE.read_text()
PROGRAMS = re.findall(r"^```py\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = {
    command: answer or None  # what it prints follows at once, if it is shown
    for command, _, answer in re.findall(
        r"^```sh\n([^\n]*)\n```\n(\n```text\n(.*?)^```$)?", TEXT, re.MULTILINE | re.DOTALL
    )
}
OLD_PROGRAM = """
import os
import torch.distributed.rpc as rpc
rpc.init_rpc(os.environ["RANK"])
assert rpc.rpc_sync.__module__.startswith("telegrad")
rpc.shutdown()
"""


def run(where, command):
    (where / "old_program.py").write_text(OLD_PROGRAM)
    for program in PROGRAMS:
        (where / re.match(r"# (\w+\.py)\n", program)[1]).write_text(program)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=where,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return ran.returncode, ran.stdout.replace(f"{where}/", ""), ran.stderr


def words(text):
    """What does not differ from machine to machine."""
    return re.sub(r"[\d.]+|[ ]+|µs|ms|MISSED", " ", text).split()


@pytest.mark.parametrize("command", [c for c in COMMANDS if " doctor" not in c])
def test_commands_print_what_the_page_says(tmp_path, command):
    code, out, err = run(tmp_path, command)
    assert code == ("broken.py" in command), err
    if COMMANDS[command] is not None:
        assert words(out)[: len(words(COMMANDS[command]))] == words(COMMANDS[command])
    if "run -n" in command and "bench" not in command:
        assert out == (COMMANDS[command] or "")


def test_the_doctor_says_what_the_page_says(tmp_path):
    code, out, err = run(tmp_path, "telegrad doctor")
    assert code == 0, out + err
    shown = COMMANDS["telegrad doctor"]
    assert [line[6:20] for line in out.splitlines()[:-1]] == [
        line[6:20] for line in shown.splitlines()[:-1]
    ]


def test_the_program_runs_under_torchrun_too(tmp_path):
    code, out, err = run(tmp_path, "torchrun --standalone --nproc-per-node 2 train.py")
    assert (code, out) == (0, "tensor([2., 2.])\n"), err


def test_every_command_on_the_page_was_found():
    assert len(COMMANDS) == 5
