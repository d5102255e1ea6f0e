"""What a run says: each suite beside the yardstick, and whether it is as the written list says."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from conformance.runner import Outcome

__all__ = ["YARDSTICK", "brief", "load_yardstick", "save_yardstick", "table", "verdicts"]

YARDSTICK = Path(__file__).with_name("torch_results.json")
_STATUSES = ("passed", "failed", "skipped")
_PROCESS = re.compile(r"Process \d+ exited with error code \d+ and exception:\n")
_ERROR = re.compile(r"[\w.]*(Error|Lost|Timeout|Exception|NotInitialized)\b")


def brief(reason: str) -> str:
    """The one line of a report that tells most: how the first process failed that did not merely
    lose another one."""
    whole, *processes = _PROCESS.split(reason)
    told = [_last_error(part) for part in processes or [whole]]
    own = [line for line in told if line and "WorkerLost" not in line]
    return ([line for line in own or told if line] or ["no reason was given"])[0][:300]


def _last_error(part: str) -> str:
    lines = [line.strip() for line in part.strip().splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or [""])[-1]


def table(outcomes: Sequence[Outcome]) -> str:
    """Passed, failed and skipped per suite, with what torch's RPC passes of the same suite."""
    yardstick = load_yardstick()
    counts: dict[str, collections.Counter[str]] = {}
    seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
    for outcome in outcomes:
        suite = outcome.test.suite
        counts.setdefault(suite, collections.Counter())[outcome.status] += 1
        seconds[suite] += outcome.seconds
    rows: list[tuple[str, ...]] = [("suite", *_STATUSES, "seconds", "torch's RPC passes")]
    for suite, count in counts.items():
        theirs = yardstick.get(suite, {})
        mark = f"{theirs['passed']} of {sum(theirs.values())}" if theirs else "not measured"
        rows.append((suite, *(str(count[s]) for s in _STATUSES), f"{seconds[suite]:.0f}", mark))
    total = sum(counts.values(), collections.Counter())
    theirs_total = sum(suite["passed"] for name, suite in yardstick.items() if name in counts)
    rows.append(
        (
            "all",
            *(str(total[s]) for s in _STATUSES),
            f"{sum(seconds.values()):.0f}",
            str(theirs_total),
        )
    )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def verdicts(outcomes: Sequence[Outcome], expected: Mapping[str, str]) -> list[str]:
    """What differs from the list of expected failures; empty if the run is good."""
    complaints = []
    for outcome in outcomes:
        name = str(outcome.test)
        if outcome.status == "failed" and name not in expected:
            complaints.append(f"{name} failed: {brief(outcome.reason)}")
        elif outcome.status == "passed" and name in expected:
            complaints.append(f"{name} passed: take it off the list of expected failures")
    return complaints


def load_yardstick() -> dict[str, dict[str, int]]:
    if not YARDSTICK.exists():
        return {}
    found: dict[str, dict[str, int]] = json.loads(YARDSTICK.read_text())["suites"]
    return found


def save_yardstick(outcomes: Sequence[Outcome], torch_version: str) -> None:
    suites: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        counts = suites.setdefault(outcome.test.suite, dict.fromkeys(_STATUSES, 0))
        counts[outcome.status] += 1
    failed = {str(o.test): brief(o.reason) for o in outcomes if o.status == "failed"}
    content = {"torch": torch_version, "suites": suites, "failed": failed}
    YARDSTICK.write_text(json.dumps(content, indent=2) + "\n")
