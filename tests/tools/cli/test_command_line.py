"""How commands are called, and what is said when they are called wrongly."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import telegrad
from telegrad.launch import processes
from telegrad.tools.cli import main
from telegrad.tools.cli.main import COMMANDS

CONSOLE_SCRIPT = Path(sys.executable).with_name("telegrad")


@pytest.fixture
def where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run"], "name a script, or a module by -m"),
        (["run", "none.py"], "there is no file 'none.py'"),
        (["run", "folder"], "'folder' is a directory: name a script in it"),
        (["run", "train.py/x"], "'train.py/x' cannot be read: Not a directory"),
        (["run", "-m", "no_such_module"], "there is no module 'no_such_module'"),
        (["run", "-m", "folder/train.py"], "leave out -m to run a script"),
        (["run", "-n", "0", "train.py"], "must be a whole number from 1 to 32768, got '0'"),
        (["run", "-n", "-2", "train.py"], "must be a whole number from 1 to 32768, got '-2'"),
        (["run", "-n", "32769", "train.py"], "must be a whole number from 1 to 32768, got '32769'"),
        (["run", "-n", "two", "train.py"], "must be a whole number from 1 to 32768, got 'two'"),
        (["run", "-n", "1.5", "train.py"], "must be a whole number from 1 to 32768, got '1.5'"),
        (["run", "--master-port", "70000", "train.py"], "a number up to 65535, got '70000'"),
        (["run", "--grace", "soon", "train.py"], "must be a number of seconds, got 'soon'"),
        (["run", "--wrong", "train.py"], "unrecognized arguments: --wrong"),
        (["rum"], "there is no command 'rum'; did you mean 'run'?"),
        (["train.py"], "did you mean `telegrad run train.py`?"),
        (["xyzzy"], "there is no command 'xyzzy': there are demo, run, "),
    ],
)
def test_a_mistake_is_named_in_one_line(where, capfd, arguments, complaint):
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("telegrad")
    assert complaint in err
    assert err.count("\n") == 1


def test_a_port_that_is_taken_is_named(where, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["run", "--master-port", str(port), "train.py"]) == 2
    assert capfd.readouterr().err == (
        f"telegrad run: port {port} is taken: choose another, or leave it to the launcher\n"
    )


@pytest.mark.parametrize("system", [{}, {"prctl": lambda *arguments: -1}], ids=["none", "refused"])
def test_a_system_without_adoption_is_named_and_nothing_starts(where, monkeypatch, capfd, system):
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: SimpleNamespace(**system))
    assert main(["run", "train.py"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("telegrad run: this system does not let a process adopt orphans")
    assert err.endswith(": start them by torchrun\n")


def test_a_script_that_may_not_be_read_is_named(where):
    where.chmod(0o755)
    (where / "train.py").chmod(0)
    code = "import sys; from telegrad.tools.cli import main; sys.exit(main(['run', 'train.py']))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        preexec_fn=_give_up_rights,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "telegrad run: 'train.py' cannot be read: permission denied\n"


def _give_up_rights():
    """Root reads everything by a right of its own: without that it is as good as anybody."""
    import ctypes

    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: gone after exec


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in text
        assert command.summary in text
    assert main([]) == 2


@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_has_help(capsys, name):
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: telegrad {name}")
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", [[CONSOLE_SCRIPT], [sys.executable, "-m", "telegrad"]])
def test_it_can_be_called_both_ways(where, command):
    ran = subprocess.run(
        [*command, "run", "train.py"], capture_output=True, text=True, timeout=100, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "trained\n", "")
    ran = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=100)
    assert ran.stdout == f"telegrad {telegrad.__version__}\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(where, closed):
    """What the workers say there goes nowhere, and disturbs nothing."""
    (where / "train.py").write_text(
        "import os, sys\n"
        "print('trained', flush=True)\n"
        "print('a warning', file=sys.stderr, flush=True)\n"
        "open('trained' + os.environ['RANK'], 'w').close()\n"
    )
    command = f"exec '{sys.executable}' -m telegrad run -n 2 train.py {closed}"
    ran = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    assert {"trained0", "trained1"} <= set(os.listdir(where))
