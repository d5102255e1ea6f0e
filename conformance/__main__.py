"""`python -m conformance [suite or test substrings...] [--torch] [--jobs N]`"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from conformance import report, runner, suites
from conformance.expected_failures import EXPECTED_FAILURES

_LISTED_SECONDS = 20.0  # one that is expected to fail, and does so by waiting, must not take long


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the tests under way end, too
    tests = suites.load(on_torch=options.torch)
    chosen = [t for t in tests if not options.names or any(n in str(t) for n in options.names)]
    chosen = chosen * options.repeat
    if not chosen:
        print(f"no test's name contains {' or '.join(options.names)}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(str(test) for test in chosen))
        return 0
    expected = {} if options.torch else EXPECTED_FAILURES
    began = time.monotonic()
    outcomes = []

    def seconds(test: suites.TestId) -> float:
        limit: float = options.timeout
        return min(limit, _LISTED_SECONDS) if str(test) in expected else limit

    for outcome in runner.run_all(chosen, jobs=options.jobs, timeout=seconds):
        outcomes.append(outcome)
        _tell(outcome, expected, len(outcomes), len(chosen), options.output)
    print(f"\n{report.table(outcomes)}\n\n{time.monotonic() - began:.0f} seconds")
    if options.torch:
        if not options.names:
            import torch

            report.save_yardstick(outcomes, torch.__version__)
        return 0
    complaints = report.verdicts(outcomes, expected)
    print("\n".join(complaints) if complaints else "as expected")
    return 1 if complaints else 0


def _tell(
    outcome: runner.Outcome, expected: dict[str, str], number: int, total: int, output: Path | None
) -> None:
    name = str(outcome.test)
    if outcome.status == "passed":
        return
    listed = " (listed)" if name in expected else ""
    print(
        f"[{number}/{total}] {name} {outcome.status}{listed} after {outcome.seconds:.1f} s: "
        f"{report.brief(outcome.reason)}",
        flush=True,
    )
    if outcome.status == "failed" and output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / f"{name}.txt").write_text(f"{outcome.reason}\n\n{outcome.output}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conformance",
        description="Runs torch's own RPC suites, out of the installed wheel, on telegrad.",
    )
    parser.add_argument("names", nargs="*", help="parts of the names of suites or tests; all")
    parser.add_argument("--torch", action="store_true", help="run on torch's RPC: the yardstick")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="tests at a time; one per processor"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one test")
    parser.add_argument("--repeat", type=int, default=1, help="run each test so often")
    parser.add_argument("--list", action="store_true", help="list the tests, run none")
    parser.add_argument(
        "--output", type=Path, help="directory for what the processes of failed tests wrote"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
