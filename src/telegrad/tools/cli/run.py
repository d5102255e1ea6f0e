"""`telegrad run`: a program on several workers of this machine."""

from __future__ import annotations

import argparse
import itertools
import sys

from telegrad.launch import LaunchOptions, Program, launch
from telegrad.launch.program import MOST_WORKERS
from telegrad.tools.cli.command import Command, Parser

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Starts a program on several workers of this machine, and ends them together.

  telegrad run -n 4 train.py --epochs 3     a script with arguments
  telegrad run -n 4 -m package.train        a module
  telegrad run -n 4 --drop-in old.py        a program for torch.distributed.rpc

Each worker finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR
and MASTER_PORT in its environment, as under torchrun; init_rpc(name) needs
nothing else. Use torchrun to start the same program on several machines.

Lines that workers print are marked with their rank; stdout and stderr stay
apart. When one worker fails the others are ended, and what it said is shown
last. The exit code is that of the worker that failed, 128 + n if signal n
killed it. Ctrl-C is passed on to the workers; a second one kills them.

Workers cannot read from a terminal: input() and breakpoint() get no line there.
Worker 0 reads what is piped in, as in `echo yes | telegrad run ...`.

The cores are shared out between the workers by OMP_NUM_THREADS, unless that is
set already.
"""


def _configure(parser: Parser) -> None:
    parser.usage = "telegrad run [-n WORKERS] [options] (SCRIPT | -m MODULE) [ARGUMENT ...]"
    parser.add_argument(
        "-n", "--workers", type=_count, default=None, help="how many workers; 1 by default"
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, as python -m does"
    )
    parser.add_argument(
        "--drop-in",
        action="store_true",
        help="put telegrad in the place of torch.distributed.rpc and .autograd first, in each "
        "worker and in the processes it starts",
    )
    parser.add_argument(
        "--master-port",
        type=_port,
        default=0,
        metavar="PORT",
        help="where the workers meet; by default a port that is free",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long workers that "
        "are asked to end may take before they are killed; 10 by default",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _run(options: argparse.Namespace) -> int:
    name, *arguments = options.program or [""]
    if name == "--":
        name, *arguments = arguments or [""]
    if not name:
        raise ValueError("name a script, or a module by -m (see telegrad run --help)")
    if name.startswith("-"):
        raise ValueError(f"there is no option {name!r} (see telegrad run --help)")
    _note_misplaced_count(options.workers, arguments)
    program = Program(
        name=name,
        arguments=tuple(arguments),
        is_module=options.is_module,
        drop_in=options.drop_in,
    )
    return launch(
        LaunchOptions(
            program=program,
            workers=options.workers or 1,
            master_port=options.master_port,
            grace=options.grace,
        )
    )


def _note_misplaced_count(workers: int | None, arguments: list[str]) -> None:
    """`telegrad run train.py -n 2` starts one worker, and the program gets the `-n`."""
    for option, value in itertools.pairwise(arguments):
        if workers is None and option in ("-n", "--workers") and value.isdecimal():
            print(
                f"telegrad run: {option} {value} stands after the program and is passed on to it; "
                f"to start {value} workers, put it before: telegrad run {option} {value} ...",
                file=sys.stderr,
            )


def _count(text: str) -> int:
    return _number(text, 1, MOST_WORKERS, f"a whole number from 1 to {MOST_WORKERS}")


def _port(text: str) -> int:
    return _number(text, 0, 65535, "a number up to 65535")


def _number(text: str, least: int, most: int, wanted: str) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")
    return seconds


COMMAND = Command(
    name="run",
    summary="run a program on several workers of this machine",
    description=_DESCRIPTION,
    configure=_configure,
    run=_run,
)
