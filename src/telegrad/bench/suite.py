"""`python -m bench [words...]`: runs the cases whose names hold one of the words; all by default.

Options:
    --write FILE   also writes the table as Markdown, with date and machine
    --check        fails if a case misses its mark
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import warnings

import torch

from bench import passes, processes
from bench.cases import all_cases
from bench.harness import Case, Result, arenas, measure


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--write", metavar="FILE")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's own, about its own

    def wanted(name: str) -> bool:
        return not options.words or any(word in name for word in options.words)

    results: list[Result] = []
    print(f"{'case':48} {'torch':>10} {'telegrad':>10} {'ratio':>7}  mark")
    if wanted("start shutdown memory"):
        for result in processes.run():  # first: they fork, so nothing else may run yet
            results.append(result)
            show(result)
    torch.set_num_threads(1)
    for size, cases in by_size([case for case in all_cases() if wanted(case.name)]).items():
        with arenas(size) as sides:
            for case in cases:
                results.append(measure(case, sides))
                show(results[-1])
    if wanted("local graph"):
        with arenas(2, ("telegrad",)) as sides:
            sides["telegrad"].resume()
            for nodes in (1000, 10000):
                results.append(sides["telegrad"].ask(passes.local_graph, nodes))
                show(results[-1])
    if options.write:
        with open(options.write, "w", encoding="utf-8") as file:
            file.write(table(results))
    missed = [result for result in results if not result.is_good]
    if missed:
        print("below the mark: " + ", ".join(result.name for result in missed))
    return 1 if options.check and missed else 0


def by_size(cases: list[Case]) -> dict[int, list[Case]]:
    found: dict[int, list[Case]] = {}
    for case in cases:
        found.setdefault(case.workers, []).append(case)
    return found


def amount(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / (1 << 20):.0f} MB"
    return f"{value * 1e6:.0f} µs" if value < 1e-2 else f"{value * 1e3:.1f} ms"


def show(result: Result) -> None:
    mark = "" if result.mark is None else f"≥ {result.mark:g}"
    print(
        f"{result.name:48} {amount(result.torch, result.unit):>10} "
        f"{amount(result.telegrad, result.unit):>10} {result.ratio:6.1f}× "
        f" {mark}{'' if result.is_good else '  MISSED'}",
        flush=True,
    )


def table(results: list[Result]) -> str:
    lines = [
        f"Measured on {datetime.date.today()} with torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.machine()}.",
        "",
        "| work | torch's RPC | telegrad | ratio | mark |",
        "|---|---:|---:|---:|---:|",
    ]
    for r in results:
        mark = "" if r.mark is None else f"≥ {r.mark:g}×"
        lines.append(
            f"| {r.name} | {amount(r.torch, r.unit)} | {amount(r.telegrad, r.unit)} "
            f"| {r.ratio:.1f}× | {mark} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
