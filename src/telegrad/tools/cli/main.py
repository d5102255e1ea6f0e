"""Finds the command and runs it. A new one is a file like `run.py` and a place in `COMMANDS`."""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Sequence

import telegrad
from telegrad.errors import TelegradError
from telegrad.tools.cli import bench, doctor, run
from telegrad.tools.cli.command import MISUSED
from telegrad.tools.demo.command import COMMAND as DEMO

__all__ = ["main"]

COMMANDS = {command.name: command for command in (DEMO, run.COMMAND, doctor.COMMAND, bench.COMMAND)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit code.

    Args:
        arguments: what follows the program's name; by default that of this process.
    """
    _open_closed_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        print(_help(), file=sys.stderr)
        return MISUSED
    name, *rest = given
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(f"telegrad {telegrad.__version__}")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        print(f"telegrad: there is no command {name!r}{_suggestion(name)}", file=sys.stderr)
        return MISUSED
    try:
        options = command.parser().parse_args(rest)
    except SystemExit as exit:  # how argparse ends after help or a complaint
        return int(exit.code or 0)
    try:
        return command.run(options)
    except (TelegradError, ValueError) as error:
        print(f"telegrad {name}: {error}", file=sys.stderr)
        return MISUSED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: telegrad COMMAND ...",
            "",
            "Distributed autograd for PyTorch: calls to other processes and machines, and one",
            "backward pass through all of them.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  -h, --help     show this help",
            "  -V, --version  show the version",
            "",
            "`telegrad COMMAND --help` says more about a command.",
        ]
    )


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    if os.path.exists(name):
        return f"; did you mean `telegrad run {name}`?"
    return f": there are {', '.join(COMMANDS)}"


def _open_closed_streams() -> None:
    """Lets standard streams that whoever started us has closed (`>&-`) lead nowhere: their numbers
    would go to the next files and sockets that are opened, and what is said to the user would end
    up there. Called first of all, while they are free. Python has None in their place."""
    for descriptor, mode in ((0, "r"), (1, "w"), (2, "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(nowhere, True)
            stream = open(nowhere, mode, encoding="utf-8")  # noqa: SIM115 - as long as we run
            setattr(sys, ("stdin", "stdout", "stderr")[descriptor], stream)
