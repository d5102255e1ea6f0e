"""`telegrad doctor`: does it work here, and how well?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from telegrad.launch.output import wants_colour
from telegrad.tools.cli.command import Command, Parser
from telegrad.tools.doctor.host import Finding, Level, look_at_host
from telegrad.tools.doctor.workers import try_two_workers

__all__ = ["COMMAND"]

_DESCRIPTION = """\
Looks at what telegrad needs: versions, sockets, shared memory, limits, the
secret; then starts two workers and measures what lies between them.

Each line is ok, warn (it works, but not as well as it could) or fail (it does
not), with what to do. The exit code is 1 if something fails.
"""

_COLOURS = {Level.OK: 32, Level.WARN: 33, Level.FAIL: 31}


def _configure(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def _run(options: argparse.Namespace) -> int:
    if options.json:
        findings = list(_findings())
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        findings = []
        colour = wants_colour(sys.stdout.fileno(), os.environ)
        for finding in _findings():
            findings.append(finding)
            print(_line(finding, colour), flush=True)
        print(_summary(findings))
    return 1 if any(finding.level is Level.FAIL for finding in findings) else 0


def _findings() -> Iterator[Finding]:
    works = True
    for finding in look_at_host(os.environ):
        works = works and finding.level is not Level.FAIL
        yield finding
    if works:
        yield from try_two_workers()
    else:
        text = "not tried, because of what fails above"
        yield Finding(level=Level.WARN, subject="two workers", text=text)


def _line(finding: Finding, colour: bool) -> str:
    level = f"{finding.level.value:4}"
    if colour:
        level = f"\x1b[{_COLOURS[finding.level]}m{level}\x1b[0m"
    advice = f"\n{'':21}→ {finding.advice}" if finding.advice else ""
    return f"{level}  {finding.subject:15}{finding.text}{advice}"


def _summary(findings: list[Finding]) -> str:
    counts = Counter(finding.level for finding in findings)
    if counts[Level.FAIL]:
        return f"{counts[Level.FAIL]} of {len(findings)} checks failed"
    if counts[Level.WARN]:
        return f"telegrad works here; {counts[Level.WARN]} of {len(findings)} could be better"
    return "telegrad works here"


COMMAND = Command(
    name="doctor",
    summary="check whether telegrad works here, and how well",
    description=_DESCRIPTION,
    configure=_configure,
    run=_run,
)
