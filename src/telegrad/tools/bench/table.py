"""Results: a line for the terminal, a table for a page, a picture."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterable, Sequence

import torch

from telegrad.tools import plots
from telegrad.tools.bench.harness import Result

__all__ = ["HEAD", "line", "markdown", "plot"]

HEAD = f"{'case':48} {'torch':>10} {'telegrad':>10} {'ratio':>7}  mark"


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / (1 << 20):.0f} MB"
    return f"{value * 1e6:.0f} µs" if value < 1e-2 else f"{value * 1e3:.1f} ms"


def line(result: Result) -> str:
    mark = "" if result.mark is None else f"≥ {result.mark:g}"
    return (
        f"{result.name:48} {_amount(result.torch, result.unit):>10} "
        f"{_amount(result.telegrad, result.unit):>10} {result.ratio:6.1f}× "
        f" {mark}{'' if result.is_good else '  MISSED'}"
    )


def _machine() -> str:
    """What it was measured on."""
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"{platform.system()} {platform.machine()}"
    )


def markdown(results: Iterable[Result]) -> str:
    lines = [
        f"Measured on {datetime.date.today()} with {_machine()}.",
        "",
        "| work | torch's RPC | telegrad | ratio | mark |",
        "|---|---:|---:|---:|---:|",
    ]
    for r in results:
        mark = "" if r.mark is None else f"≥ {r.mark:g}×"
        lines.append(
            f"| {r.name} | {_amount(r.torch, r.unit)} | {_amount(r.telegrad, r.unit)} "
            f"| {r.ratio:.1f}× | {mark} |"
        )
    return "\n".join([*lines, ""])


def plot(path: str, results: Sequence[Result]) -> None:
    """Writes the ratios as an SVG file."""
    bars = [
        (
            r.name,
            r.ratio,
            f"{r.ratio:.1f}×   {_amount(r.torch, r.unit)} → {_amount(r.telegrad, r.unit)}",
        )
        for r in results
    ]
    title = "How many times faster telegrad is than torch's RPC"
    foot = f"{datetime.date.today()}, {_machine()}; times: torch → telegrad"
    plots.save_ratios(path, bars, title, foot)
