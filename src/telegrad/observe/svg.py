"""A layout as SVG, written by hand: one file, no fonts, no scripts, light and dark.

Text is set in a monospaced font, so that its width is known without measuring: nothing overlaps,
whoever draws it. The picture brings its own background and follows the reader's choice of light or
dark by itself, also where it is embedded as an image.
"""

from __future__ import annotations

import html
import itertools
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from telegrad.observe.boxes import Box, BoxKind, Size
from telegrad.observe.layout import Cut, Item, Layout
from telegrad.observe.words import details_of, message_label, title_of, words_of_cut

__all__ = ["document", "render", "text_at"]

_CHARACTER = 7.3  # the width of one, at 12 pixels
_SMALL_CHARACTER = 6.7  # at 11
_LINE = 15.0
_BESIDE = 14.0  # between boxes of a cell
_PASSING = 10.0  # the width of a line that passes
_LANE_PADDING = 16.0
_BETWEEN_LANES = 40.0
_GAP = 26.0  # between rows
_TRACK = 22.0  # more of it for each message on its way sideways
_MARGIN = 16.0
_CUT = 44.0

_STYLE = """
svg { --ground:#ffffff; --lane:#f4f6f8; --edge:#d5dbe1; --ink:#1c2530; --soft:#5b6875;
 --box:#ffffff; --line:#8a97a5; --leaf:#e3f4e7; --leafline:#3f9a5a; --root:#fff0c9;
 --rootline:#c08a00; --message:#2f6fd0; --port:#e3edfb; --bad:#c5372c; }
@media (prefers-color-scheme: dark) { svg { --ground:#14191f; --lane:#1b222a; --edge:#303a45;
 --ink:#e6ebf0; --soft:#98a5b2; --box:#232c36; --line:#738190; --leaf:#1c3a27;
 --leafline:#5fbf7d; --root:#40350f; --rootline:#d9a520; --message:#6fa8ff; --port:#1d2f4a;
 --bad:#ff7b6e; } }
text { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size:12px;
 fill:var(--ink); }
.small { font-size:11px; fill:var(--soft); }
.name { font-weight:600; font-size:13px; }
.bad { fill:var(--bad); }
.ground { fill:var(--ground); }
.lane { fill:var(--lane); stroke:var(--edge); }
.lane.lost { stroke:var(--bad); stroke-dasharray:5 4; }
.box { fill:var(--box); stroke:var(--line); }
.leaf { fill:var(--box); stroke:var(--leafline); }
.leaf.full { fill:var(--leaf); stroke-width:1.6; }
.root { fill:var(--root); stroke:var(--rootline); stroke-width:1.6; }
.port { fill:var(--port); stroke:var(--message); }
.missing { fill:none; stroke:var(--bad); stroke-dasharray:4 3; }
.line { fill:none; stroke:var(--line); stroke-width:1.2; }
.message { fill:none; stroke:var(--message); stroke-width:1.8; }
.label { font-size:11px; fill:var(--message); stroke:var(--ground); stroke-width:5px;
 stroke-linejoin:round; paint-order:stroke; }
.unused { opacity:.45; }
.cut { fill:none; stroke:var(--soft); stroke-dasharray:2 5; }
""".strip()


@dataclass
class _Shape:
    """An item with its size and, later, its place."""

    item: Item
    lines: list[str]
    width: float
    height: float
    x: float = 0.0  # of its middle
    y: float = 0.0  # of its top

    @property
    def bottom(self) -> float:
        return self.y + self.height


@dataclass
class _Lane:
    name: str
    note: list[str]
    is_lost: bool
    left: float = 0.0
    width: float = 0.0

    @property
    def middle(self) -> float:
        return self.left + self.width / 2


@dataclass
class _Track:
    """The way of a message sideways, between two rows."""

    upper: _Shape
    lower: _Shape
    label: str
    number: int = 0

    @property
    def label_at(self) -> float:
        """The middle of its label: over the line, or beside it where it only leads down."""
        width = len(self.label) * _SMALL_CHARACTER
        if self.upper.item.column != self.lower.item.column:
            return (self.upper.x + self.lower.x) / 2
        return max(self.upper.x, self.lower.x) + width / 2 + 10

    @property
    def extent(self) -> tuple[float, float]:
        half = len(self.label) * _SMALL_CHARACTER / 2 + 8
        ends = (self.upper.x, self.lower.x, self.label_at - half, self.label_at + half)
        return min(ends), max(ends)


class _Drawing:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.over: list[str] = []
        """What is drawn last: labels."""

    def rect(self, kind: str, x: float, y: float, width: float, height: float, rx: float) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" rx="{rx:g}"/>'
        )

    def path(self, kind: str, way: str, marker: str = "") -> None:
        end = f' marker-end="url(#{marker})"' if marker else ""
        self.parts.append(f'<path class="{kind}"{end} d="{way}"/>')


def render(layout: Layout, title: str) -> str:
    """
    Args:
        title: stands above the picture.
    """
    shapes = {item: _shape(item) for row in layout.rows for cell in row for item in cell}
    rows = [[[shapes[item] for item in cell] for cell in row] for row in layout.rows]
    lanes = _place_lanes(layout, rows)
    _place_across(layout, rows, shapes, lanes)
    tracks = _tracks(layout, shapes)
    bottom, cut_at = _place_down(layout, rows, tracks, lanes)
    width = max(lanes[-1].left + lanes[-1].width + _MARGIN if lanes else 0.0, 200.0)
    width = max(width, len(title) * _CHARACTER + 2 * _MARGIN)
    legend = _legend(layout)
    height = bottom + _MARGIN + (24.0 if legend else 0.0)
    drawing = _Drawing()
    _draw_lanes(drawing, lanes, bottom)
    if layout.cut is not None:
        _draw_cut(drawing, layout.cut, lanes, cut_at)
    for line in layout.lines:
        _draw_line(drawing, [shapes[item] for item in line])
    for track_list in tracks.values():
        for track in track_list:
            _draw_message(drawing, track)
    for shape in shapes.values():
        if shape.item.box is not None:
            _draw_box(drawing, shape, shape.item.box)
    if legend:
        drawing.over.append(text_at(_MARGIN, bottom + 26, legend, "small"))
    return document(title, width, height, [*drawing.parts, *drawing.over])


def document(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    """A whole picture: its parts on the ground, under a title."""
    shown = html.escape(title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{shown}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">',
            f"<title>{shown}</title>",
            f"<style>{_STYLE}</style>",
            f"<defs>{_marker('head', 8, 'message')}{_marker('tip', 6, 'line')}</defs>",
            f'<rect class="ground" width="{width:.0f}" height="{height:.0f}" rx="8"/>',
            text_at(_MARGIN, 24, title, "small"),
            *parts,
            "</svg>",
            "",
        ]
    )


def _marker(name: str, size: int, color: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 {size} {size}" refX="{size - 1}" refY="{size / 2:g}" '
        f'markerWidth="{size}" markerHeight="{size}" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 0.5 L{size} {size / 2:g} L0 {size - 0.5:g} z" style="fill:var(--{color})"/>'
        "</marker>"
    )


# -- sizes and places


def _shape(item: Item) -> _Shape:
    box = item.box
    if box is None:
        return _Shape(item, [], _PASSING, 0.0)
    title, details = title_of(box), details_of(box)
    if box.is_root:
        title = f"{title} (root)"
    widths = [len(title) * _CHARACTER, *(len(line) * _SMALL_CHARACTER for line in details)]
    padding = 10.0 if box.message is not None else 14.0
    height = _LINE * (1 + len(details)) + (6.0 if box.message is not None else 9.0)
    return _Shape(item, [title, *details], max(widths) + 2 * padding, height)


def _place_lanes(layout: Layout, rows: Sequence[Sequence[Sequence[_Shape]]]) -> list[_Lane]:
    lanes = []
    left = _MARGIN
    for number, (_, name, trouble) in enumerate(layout.columns):
        note = textwrap.wrap(trouble, 30)
        lane = _Lane(name, note, bool(trouble), left)
        inner = [
            sum(shape.width for shape in row[number]) + _BESIDE * max(0, len(row[number]) - 1)
            for row in rows
        ]
        inner += [
            shape_width / 2 + len(message_label(sizes)) * _SMALL_CHARACTER + 30
            for shape_width, sizes in _own_messages(layout, number)
        ]
        texts = [len(name) * 8.0, *(len(line) * _SMALL_CHARACTER for line in note)]
        lane.width = max([*inner, *texts, 90.0]) + 2 * _LANE_PADDING
        left += lane.width + _BETWEEN_LANES
        lanes.append(lane)
    return lanes


def _own_messages(layout: Layout, column: int) -> list[tuple[float, tuple[Size, ...]]]:
    """Of a worker to itself: their labels stand within its lane."""
    return [
        (_shape(upper).width, upper.box.sizes)
        for upper, lower in layout.messages
        if upper.column == lower.column == column and upper.box is not None
    ]


def _place_across(
    layout: Layout,
    rows: Sequence[Sequence[Sequence[_Shape]]],
    shapes: dict[Item, _Shape],
    lanes: Sequence[_Lane],
) -> None:
    """Each box as near to its neighbours in the rows above and below as those beside it allow."""
    near: dict[Item, list[_Shape]] = {}
    for line in layout.lines:
        for upper, lower in itertools.pairwise(line):
            near.setdefault(upper, []).append(shapes[lower])
            near.setdefault(lower, []).append(shapes[upper])
    for row in rows:
        for cell, lane in zip(row, lanes, strict=True):
            for shape in cell:
                shape.x = lane.middle
            _spread(cell, lane)
    for _ in range(6):
        for row in (*rows, *reversed(rows)):
            for cell, lane in zip(row, lanes, strict=True):
                for shape in cell:
                    beside = near.get(shape.item)
                    if beside:
                        # A line that passes many rows had better be straight than short.
                        weights = [20 if s.item.box is shape.item.box else 1 for s in beside]
                        total = sum(s.x * w for s, w in zip(beside, weights, strict=True))
                        shape.x = total / sum(weights)
                _spread(cell, lane)


def _spread(cell: Sequence[_Shape], lane: _Lane) -> None:
    """Moves boxes that are too near apart, in their order and within the lane."""
    if not cell:
        return
    offsets = [0.0]
    for left, right in itertools.pairwise(cell):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + _BESIDE)
    # With the distances subtracted, the places must not decrease: neighbours that would, share
    # their mean. This is the nearest such sequence.
    blocks: list[tuple[float, int]] = []
    for shape, offset in zip(cell, offsets, strict=True):
        blocks.append((shape.x - offset, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (mean, count), (before, count_before) = blocks.pop(), blocks.pop()
            total = count + count_before
            blocks.append(((mean * count + before * count_before) / total, total))
    wanted = [mean for mean, count in blocks for _ in range(count)]
    least = lane.left + _LANE_PADDING + cell[0].width / 2
    most = lane.left + lane.width - _LANE_PADDING - cell[-1].width / 2 - offsets[-1]
    for shape, mean, offset in zip(cell, wanted, offsets, strict=True):
        shape.x = min(max(mean, least), most) + offset


def _tracks(layout: Layout, shapes: dict[Item, _Shape]) -> dict[int, list[_Track]]:
    """Row → the messages that leave it, each on a track on which it meets no other."""
    found: dict[int, list[_Track]] = {}
    for upper, lower in layout.messages:
        sizes = upper.box.sizes if upper.box is not None else ()
        track = _Track(shapes[upper], shapes[lower], message_label(sizes))
        found.setdefault(upper.row, []).append(track)
    for tracks in found.values():
        taken: list[list[tuple[float, float]]] = []  # of each track
        for track in sorted(tracks, key=lambda track: track.extent):
            extent = track.extent
            is_free = [all(_are_apart(extent, other) for other in others) for others in taken]
            if True not in is_free:
                taken.append([])
                is_free.append(True)
            track.number = is_free.index(True)
            taken[track.number].append(extent)
    return found


def _are_apart(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[1] + 6 < b[0] or b[1] + 6 < a[0]


def _place_down(
    layout: Layout,
    rows: Sequence[Sequence[Sequence[_Shape]]],
    tracks: dict[int, list[_Track]],
    lanes: Sequence[_Lane],
) -> tuple[float, float]:
    """Returns where the lanes end, and where rows are left out."""
    y = 36.0 + 30.0 + 14.0 * max((len(lane.note) for lane in lanes), default=0)
    cut_at = 0.0
    for number, row in enumerate(rows):
        height = max((shape.height for cell in row for shape in cell), default=0.0)
        for cell in row:
            for shape in cell:
                if shape.item.box is None:
                    shape.height = height
                shape.y = y + (height - shape.height) / 2
        y += height
        if number == len(rows) - 1:
            continue
        count = 1 + max((track.number for track in tracks.get(number, ())), default=-1)
        y += _GAP + _TRACK * count
        if layout.cut is not None and layout.cut.after_row == number:
            cut_at = y - _GAP / 2
            y += _CUT
    return y + _LANE_PADDING, cut_at


# -- drawing


def _draw_lanes(drawing: _Drawing, lanes: Sequence[_Lane], bottom: float) -> None:
    for lane in lanes:
        kind = "lane lost" if lane.is_lost else "lane"
        drawing.rect(kind, lane.left, 36, lane.width, bottom - 36, 8)
        drawing.parts.append(text_at(lane.middle, 56, lane.name, "name", "middle"))
        for number, line in enumerate(lane.note):
            y = 72 + 14 * number
            drawing.parts.append(text_at(lane.middle, y, line, "small bad", "middle"))


def _draw_cut(drawing: _Drawing, cut: Cut, lanes: Sequence[_Lane], y: float) -> None:
    left, right = lanes[0].left, lanes[-1].left + lanes[-1].width
    for edge in (y + 4, y + _CUT - 4):
        drawing.path("cut", f"M{left:.1f} {edge:.1f} H{right:.1f}")
    drawing.over.append(
        text_at((left + right) / 2, y + _CUT / 2 + 4, words_of_cut(cut), "label", "middle")
    )


def _draw_line(drawing: _Drawing, shapes: Sequence[_Shape]) -> None:
    way = [f"M{shapes[0].x:.1f} {shapes[0].bottom:.1f}"]
    for before, shape in itertools.pairwise(shapes):
        is_last = shape is shapes[-1]
        end = shape.y - (2 if is_last else 0)
        middle = (before.bottom + end) / 2
        way.append(
            f"C{before.x:.1f} {middle:.1f} {shape.x:.1f} {middle:.1f} {shape.x:.1f} {end:.1f}"
        )
        if not is_last:
            way.append(f"V{shape.bottom:.1f}")
    drawing.path(f"line{_unused(shapes[0], shapes[-1])}", " ".join(way), "tip")


def _draw_message(drawing: _Drawing, track: _Track) -> None:
    upper, lower = track.upper, track.lower
    y = lower.y - _GAP / 2 - _TRACK * track.number
    radius = min(8.0, abs(upper.x - lower.x) / 2)
    side = 1 if lower.x > upper.x else -1
    way = (
        f"M{upper.x:.1f} {upper.bottom:.1f} V{y - radius:.1f} "
        f"Q{upper.x:.1f} {y:.1f} {upper.x + side * radius:.1f} {y:.1f} "
        f"H{lower.x - side * radius:.1f} "
        f"Q{lower.x:.1f} {y:.1f} {lower.x:.1f} {y + radius:.1f} V{lower.y - 1:.1f}"
    )
    unused = _unused(upper, lower)
    drawing.path(f"message{unused}", way, "head")
    at = y + (3 if upper.item.column == lower.item.column else -5)
    drawing.over.append(text_at(track.label_at, at, track.label, f"label{unused}", "middle"))


def _unused(upper: _Shape, lower: _Shape) -> str:
    return "" if upper.item.is_used and lower.item.is_used else " unused"


def _draw_box(drawing: _Drawing, shape: _Shape, box: Box) -> None:
    kind, radius = "box", 4.0
    if shape.item.is_missing:
        kind = "missing"
    elif box.message is not None:
        kind, radius = "port", 3.0
    elif box.kind is BoxKind.LEAF:
        kind = "leaf full" if box.gradient_count else "leaf"
        radius = min(shape.height / 2, 14.0)
    elif box.is_root:
        kind = "root"
    unused = "" if shape.item.is_used else ' class="unused"'
    listed = ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in box.names[:40])
    drawing.parts.append(f"<g{unused}><title>{html.escape(listed)}</title>")
    left = shape.x - shape.width / 2
    drawing.rect(kind, left, shape.y, shape.width, shape.height, radius)
    y = shape.y + (14.5 if box.message is not None else 17.0)
    for number, line in enumerate(shape.lines):
        kind_of_text = "small" if number or box.message is not None else ""
        drawing.parts.append(text_at(shape.x, y + _LINE * number, line, kind_of_text, "middle"))
    drawing.parts.append("</g>")


def _legend(layout: Layout) -> str:
    items = [item for row in layout.rows for cell in row for item in cell if item.box is not None]
    said = []
    if any(item.box and item.box.gradient_count for item in items):
        said.append("filled: a leaf with a gradient")
    if any(not item.is_used for item in items):
        said.append("faint: not used by the root")
    return " · ".join(said)


def text_at(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """Text of a kind that the style knows."""
    of_kind = f' class="{kind}"' if kind else ""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text{of_kind} x="{x:.1f}" y="{y:.1f}"{at}>{html.escape(text)}</text>'
