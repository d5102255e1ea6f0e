"""The curve of a loss, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from telegrad.observe.svg import document, text_at

__all__ = ["plot_losses"]

_WIDTH, _HEIGHT = 640.0, 340.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 20.0, 44.0, 44.0
_MOST_POINTS = 600


def plot_losses(losses: Sequence[float], title: str) -> str:
    """Single steps are faint, their running mean is not. Losses that are no numbers are left out.

    Raises:
        ValueError: there are none.
    """
    points = [(step, loss) for step, loss in enumerate(losses) if math.isfinite(loss)]
    if not points:
        raise ValueError("there is no loss to plot")
    top = _tick_above(max(loss for _, loss in points))
    last = max(1, len(losses) - 1)

    def place(step: float, loss: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last
        y = _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * loss / top
        return x, y

    parts = []
    for number in range(5):
        value = top * number / 4
        x, y = place(0, value)
        parts.append(f'<path class="cut" d="M{x:.1f} {y:.1f} H{_WIDTH - _RIGHT:.1f}"/>')
        parts.append(text_at(x - 8, y + 4, f"{value:.3g}", "small", "end"))
    for number in range(5):
        step = round(last * number / 4)
        x, y = place(step, 0)
        parts.append(text_at(x, y + 18, f"{step}", "small", "middle"))
    parts.append(text_at(_WIDTH / 2, _HEIGHT - 8, "step", "small", "middle"))
    thin = points[:: max(1, len(points) // _MOST_POINTS)]
    parts.append(_curve("line unused", [place(*point) for point in thin]))
    parts.append(_curve("message", [place(*point) for point in _running_mean(points)]))
    return document(title, _WIDTH, _HEIGHT, parts)


def _tick_above(value: float) -> float:
    """A round number that is not less."""
    if value <= 0:
        return 1.0
    unit: float = 10.0 ** math.floor(math.log10(value))
    return next(unit * n for n in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if unit * n >= value)


def _running_mean(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    window = max(1, len(points) // 50)
    means = []
    for end in range(window, len(points) + 1, max(1, len(points) // _MOST_POINTS)):
        part = points[end - window : end]
        means.append((sum(s for s, _ in part) / window, sum(y for _, y in part) / window))
    return means


def _curve(kind: str, places: Sequence[tuple[float, float]]) -> str:
    path = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path class="{kind}" d="M{path}"/>'
