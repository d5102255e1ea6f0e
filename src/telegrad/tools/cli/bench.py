"""`telegrad bench`: telegrad beside torch's own RPC, on this machine."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from telegrad.tools.cli.command import Command, Parser

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Measures telegrad and torch's own RPC in turn, in one run, and prints a table.

  telegrad bench                       everything; takes some minutes
  telegrad bench echo burst            cases whose names hold one of the words
  telegrad bench --plot bench.svg      also draws the ratios

A ratio is the median over rounds that time one side right after the other.
Absolute times mean little on a machine that does other things as well.
"""


def _configure(parser: Parser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="run only cases whose name contains WORD"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and measure nothing")
    parser.add_argument("--plot", metavar="FILE.svg", help="write a picture of the ratios")
    parser.add_argument("--write", metavar="FILE.md", help="write the table as Markdown")
    parser.add_argument("--check", action="store_true", help="fail if a case misses its mark")


def _run(options: argparse.Namespace) -> int:
    # Torch's own RPC is loaded by these: not by a command that has no use for it.
    from telegrad.tools import plots
    from telegrad.tools.bench import suite, table

    known = suite.names()
    if options.list:
        print("\n".join(known))
        return 0
    for word in options.words:
        if not any(word in name for name in known):
            raise ValueError(f"no case has {word!r} in its name: see telegrad bench --list")
    if options.plot and not options.plot.endswith(".svg"):
        raise ValueError(f"a plot is written as SVG: name it *.svg, not {options.plot!r}")
    if options.plot and not plots.are_available():
        raise ValueError("--plot needs matplotlib: pip install 'telegrad[plots]'")
    for path in filter(None, (options.plot, options.write)):
        _check_writable(path)
    results = []
    print(table.HEAD)
    for result in suite.run(options.words):
        results.append(result)
        print(table.line(result), flush=True)
    if options.plot:
        table.plot(options.plot, results)
        print(f"wrote {options.plot}")
    if options.write:
        Path(options.write).write_text(table.markdown(results), encoding="utf-8")
        print(f"wrote {options.write}")
    missed = [result.name for result in results if not result.is_good]
    if missed:
        print(f"below the mark: {', '.join(missed)}")
    return 1 if options.check and missed else 0


def _check_writable(path: str) -> None:
    """Now, and not after minutes of measuring."""
    directory = os.path.dirname(path) or "."
    if not os.access(directory, os.W_OK) or os.path.isdir(path):
        raise ValueError(f"{path!r} cannot be written")


COMMAND = Command(
    name="bench",
    summary="measure telegrad beside torch's own RPC",
    description=_DESCRIPTION,
    configure=_configure,
    run=_run,
)
