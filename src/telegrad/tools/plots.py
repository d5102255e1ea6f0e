"""Curves and bars by matplotlib, which comes with `pip install 'telegrad[plots]'`, as SVG files."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["are_available", "save_losses", "save_ratios"]

_TICKS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def are_available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def _axes(path: str | Path, width: float, height: float) -> Iterator[Any]:
    """What to draw on; saved at the end. Without pyplot, which would look for a display."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9}):  # text stays text
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        yield axes
        figure.savefig(path, format="svg")


def save_losses(path: str | Path, losses: Sequence[float], title: str) -> None:
    """Draws single steps faintly and their running mean clearly. Losses that are not finite are
    left out.

    Raises:
        ValueError: there are none.
    """
    import numpy

    points = [(step, loss) for step, loss in enumerate(losses) if math.isfinite(loss)]
    if not points:
        raise ValueError("there is no loss to plot")
    steps, values = numpy.array(points).T
    window = numpy.full(max(1, len(points) // 50), 1 / max(1, len(points) // 50))
    with _axes(path, 6.4, 3.4) as axes:
        axes.plot(steps, values, alpha=0.3, linewidth=0.8)
        means = (numpy.convolve(line, window, mode="valid") for line in (steps, values))
        axes.plot(*means, color="C0", linewidth=1.6)
        axes.set(title=title, xlabel="step")
        axes.set_ylim(bottom=0)


def save_ratios(
    path: str | Path, bars: Sequence[tuple[str, float, str]], title: str, foot: str
) -> None:
    """Draws a bar per case, to the right of 1× where it is faster. The scale is logarithmic: twice
    as fast and half as fast are equally far from the middle.

    Args:
        bars: name, ratio, and what stands beside the bar.
    """
    names, ratios, notes = zip(*bars, strict=True)
    with _axes(path, 9.5, 1.0 + 0.25 * len(bars)) as axes:
        drawn = axes.barh(
            range(len(bars)),
            [ratio - 1 for ratio in ratios],
            left=1,
            color=["#2a7f62" if ratio >= 1 else "#b5483a" for ratio in ratios],
        )
        axes.set_yticks(range(len(bars)), names)
        axes.bar_label(drawn, notes, padding=4)
        axes.set_xscale("log")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.margins(x=0.25, y=0.01)
        axes.invert_yaxis()
        low, high = axes.get_xlim()
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
        axes.minorticks_off()
        axes.set(title=title, xlabel=foot)
