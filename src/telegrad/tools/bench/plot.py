"""Results as a picture: one bar a case, to the right of 1× where telegrad is the faster.

The scale is logarithmic, so that twice as fast and half as fast are equally far from the middle.
SVG is text: it needs no library, and no browser lacks it.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from telegrad.tools.bench.harness import Result
from telegrad.tools.bench.table import amount, machine

__all__ = ["svg"]

_NAMES, _BARS, _MARGIN = 390, 400, 150
_ROW, _TOP, _BOTTOM = 24, 64, 34
_FASTER, _SLOWER, _GREY = "#2a7f62", "#b5483a", "#999"
_TICKS = (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def svg(results: Sequence[Result]) -> str:
    ratios = [result.ratio for result in results]
    low = math.log(min([*ratios, 0.8]))
    high = math.log(max([*ratios, 2.0]))

    def x(ratio: float) -> float:
        return _NAMES + (math.log(ratio) - low) / (high - low) * _BARS

    height = _TOP + _ROW * len(results) + _BOTTOM
    width = _NAMES + _BARS + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="16" y="24" font-size="16">How many times faster telegrad is than torch\'s RPC'
        "</text>",
        f'<text x="16" y="{height - 12}" font-size="11" fill="{_GREY}">'
        f"{escape(f'{datetime.date.today()}, {machine()}; times: torch → telegrad')}</text>",
    ]
    for tick in _TICKS:
        if low <= math.log(tick) <= high:
            parts.append(
                f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{_TOP - 8}" '
                f'y2="{height - _BOTTOM}" stroke="{"black" if tick == 1 else "#ddd"}"/>'
                f'<text x="{x(tick):.1f}" y="{_TOP - 14}" font-size="11" fill="{_GREY}" '
                f'text-anchor="middle">{tick:g}×</text>'
            )
    for row, result in enumerate(results):
        parts += _bar(result, _TOP + _ROW * row, x(1.0), x(result.ratio))
    return "\n".join([*parts, "</svg>", ""])


def _bar(result: Result, y: float, middle: float, end: float) -> list[str]:
    begin, length = min(middle, end), abs(end - middle)
    times = f"{amount(result.torch, result.unit)} → {amount(result.telegrad, result.unit)}"
    return [
        f'<text x="{_NAMES - 10}" y="{y + 16}" text-anchor="end">{escape(result.name)}</text>',
        f'<rect x="{begin:.1f}" y="{y + 4}" width="{length:.1f}" height="{_ROW - 8}" '
        f'fill="{_FASTER if result.ratio >= 1 else _SLOWER}"><title>{escape(times)}</title></rect>',
        f'<text x="{max(middle, end) + 6:.1f}" y="{y + 16}" font-size="11">{result.ratio:.1f}× '
        f'<tspan fill="{_GREY}">{escape(times)}</tspan></text>',
    ]
