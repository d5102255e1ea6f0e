"""A layout as text, for terminals and logs: the same columns and rows, with arrows between them.

Every box has a number in its column, and says the numbers of what it is made from.
"""

from __future__ import annotations

from telegrad.observe.boxes import BoxKind
from telegrad.observe.layout import Item, Layout
from telegrad.observe.words import details_of, message_label, title_of, words_of_cut

__all__ = ["render"]

_BETWEEN = 3


def render(layout: Layout, title: str) -> str:
    """
    Args:
        title: the first line.
    """
    numbers = _numbers(layout)
    made_from: dict[Item, list[int]] = {}
    for line in layout.lines:
        made_from.setdefault(line[-1], []).append(numbers.get(line[0], 0))
    cells = [
        [[_line(item, numbers, made_from) for item in cell if item.box is not None] for cell in row]
        for row in layout.rows
    ]
    leaving: dict[int, list[tuple[Item, Item]]] = {}
    for upper, lower in layout.messages:
        leaving.setdefault(upper.row, []).append((upper, lower))
    labels = [message_label(u.box.sizes) for u, _ in layout.messages if u.box is not None]
    names = [name for _, name, _ in layout.columns]
    widths = [
        max([len(name), *(len(text) for row in cells for text in row[number])])
        for number, name in enumerate(names)
    ]
    for number in range(len(widths) - 1):  # an arrow to the next column has room for its label
        room = max((len(label) for label in labels), default=0) + 6
        widths[number] = max(widths[number], room - _BETWEEN)
    starts = [sum(widths[:n]) + _BETWEEN * n for n in range(len(widths))]
    lines = [title, "", _across(names, widths), _across(["─" * len(n) for n in names], widths)]
    for _, name, trouble in layout.columns:
        if trouble:
            lines.append(f"{name} {trouble}")
    for number, row in enumerate(cells):
        for depth in range(max((len(cell) for cell in row), default=0)):
            lines.append(_across([c[depth] if depth < len(c) else "" for c in row], widths))
        lines += [_arrow(u, lo, starts, widths) for u, lo in leaving.get(number, ())]
        if layout.cut is not None and layout.cut.after_row == number:
            lines.append(f"⋮ {words_of_cut(layout.cut)}")
    return "\n".join(line.rstrip() for line in lines)


def _numbers(layout: Layout) -> dict[Item, int]:
    counts = [0] * len(layout.columns)
    numbers: dict[Item, int] = {}
    for row in layout.rows:
        for cell in row:
            for item in cell:
                if item.box is not None:
                    counts[item.column] += 1
                    numbers[item] = counts[item.column]
    return numbers


def _line(item: Item, numbers: dict[Item, int], made_from: dict[Item, list[int]]) -> str:
    box = item.box
    if box is None:
        return ""
    words = [f"{numbers[item]}", title_of(box)]
    if details_of(box):
        words.append(", ".join(details_of(box)))
    if made_from.get(item):
        words.append(f"← {' '.join(map(str, made_from[item]))}")
    if box.is_root:
        words.append("(root)")
    if box.kind is BoxKind.LEAF and box.gradient_count:
        words.append("(has gradient)")
    if item.is_missing:
        words.append("(unknown)")
    if not item.is_used:
        words.append("(unused)")
    return " ".join(words)


def _arrow(upper: Item, lower: Item, starts: list[int], widths: list[int]) -> str:
    label = message_label(upper.box.sizes) if upper.box is not None else ""
    if upper.column == lower.column:
        return " " * starts[upper.column] + f"  ↓ {label} (to itself)"
    left, right = sorted((starts[upper.column], starts[lower.column]))
    inner = f" {label} ".center(right - left - 2, "─")
    return " " * left + (f"└{inner}▶" if lower.column > upper.column else f"◀{inner}┘")


def _across(texts: list[str], widths: list[int]) -> str:
    return (" " * _BETWEEN).join(
        text.ljust(width) for text, width in zip(texts, widths, strict=True)
    )
