"""Where the boxes of a picture stand: workers are columns, and whatever needs another is below it.

A box stands one row below the lowest of what it was made from, so time runs down the picture and a
message always leads to the next row. What depends on no message (parameters, and what is made of
them) stands just above its use instead of at the top. In a row of one column, boxes stand in the
order of what they were made from, which keeps most lines from crossing; a line that passes a row
has a place of its own there, so it never runs through a box.

A picture of more than `MOST_ROWS` rows leaves out the middle, and says how much.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from telegrad.observe.boxes import Box, BoxKind, DistributedGraph

__all__ = ["MOST_ROWS", "Cut", "Item", "Layout", "Place", "lay_out"]

MOST_ROWS = 40

Place = tuple[int, int]
"""(worker, key of its box)."""


@dataclass(eq=False)
class Item:
    """What stands in a cell: a box, or a line that passes by."""

    column: int
    row: int
    box: Box | None
    place: Place
    is_used: bool = True
    is_missing: bool = False
    """A message's end on a worker that could not be asked: known from the other end only."""
    order: float = 0.0


@dataclass(frozen=True)
class Cut:
    """Rows that are left out."""

    after_row: int
    rows: int
    boxes: int
    messages: int


@dataclass
class Layout:
    columns: list[tuple[int, str, str]] = field(default_factory=list)
    """Worker, its name, and what is wrong with it."""
    rows: list[list[list[Item]]] = field(default_factory=list)
    """Row → column → what stands there, from left to right."""
    lines: list[list[Item]] = field(default_factory=list)
    """Each goes from a box to one that is made from it, through the places on its way."""
    messages: list[tuple[Item, Item]] = field(default_factory=list)
    cut: Cut | None = None


def lay_out(graph: DistributedGraph) -> Layout:
    boxes, messages, missing = _with_missing_ends(graph)
    columns = _columns(graph, boxes)
    column_of = {worker: number for number, (worker, _, _) in enumerate(columns)}
    inputs: dict[Place, list[Place]] = {
        (worker, key): [(worker, input_) for input_ in box.inputs]
        for (worker, key), box in boxes.items()
    }
    arrives_from = {there: here for here, there in messages}
    row_of = _rows(boxes, inputs, arrives_from)
    used = graph.used()
    layout = Layout(columns)
    items = {
        place: Item(
            column=column_of[place[0]],
            row=row_of[place],
            box=box,
            place=place,
            is_used=used is None or place in used or place in missing,
            is_missing=place in missing,
        )
        for place, box in boxes.items()
    }
    everything = list(items.values())
    passing: dict[tuple[Place, int], Item] = {}  # one place for all lines from the same box
    for place, befores in inputs.items():
        for before in befores:
            column = items[place].column
            way = [
                passing.setdefault((before, row), Item(column, row, None, before))
                for row in range(row_of[before] + 1, row_of[place])
            ]
            layout.lines.append([items[before], *way, items[place]])
    everything += passing.values()
    layout.messages = [(items[here], items[there]) for here, there in messages]
    row_count = max(row_of.values(), default=-1) + 1
    layout.rows = [[[] for _ in columns] for _ in range(row_count)]
    for item in everything:
        layout.rows[item.row][item.column].append(item)
    _order(layout)
    if row_count > MOST_ROWS:
        _cut_middle(layout)
    return layout


def _with_missing_ends(
    graph: DistributedGraph,
) -> tuple[dict[Place, Box], list[tuple[Place, Place]], set[Place]]:
    boxes = {(worker, box.key): box for worker, box in graph.boxes()}
    sends = {b.message: place for place, b in boxes.items() if b.kind is BoxKind.SEND}
    receives = {b.message: place for place, b in boxes.items() if b.kind is BoxKind.RECEIVE}
    missing: set[Place] = set()
    for message, place in [*sends.items(), *receives.items()]:
        own = boxes[place]
        is_send = own.kind is BoxKind.SEND
        others = receives if is_send else sends
        if message in others or own.peer is None:
            continue
        stand_in = Box(
            key=-1 - len(missing),
            kind=BoxKind.RECEIVE if is_send else BoxKind.SEND,
            names=(("", 1),),
            sizes=own.sizes,
            message=message,
            peer=place[0],
        )
        others[message] = (own.peer, stand_in.key)
        missing.add(others[message])
        boxes[others[message]] = stand_in
    messages = [(sends[m], receives[m]) for m in sorted(m for m in sends if m is not None)]
    return boxes, messages, missing


def _columns(graph: DistributedGraph, boxes: Iterable[Place]) -> list[tuple[int, str, str]]:
    known = {part.worker: (part.name, part.trouble) for part in graph.workers}
    for worker, _ in boxes:
        known.setdefault(worker, (f"worker {worker}", "is not known"))
    return [(worker, *known[worker]) for worker in sorted(known)]


def _rows(
    boxes: dict[Place, Box],
    inputs: dict[Place, list[Place]],
    arrives_from: dict[Place, Place],
) -> dict[Place, int]:
    order = _in_order(boxes, inputs, arrives_from)
    row_of: dict[Place, int] = {}
    depends_on_message: dict[Place, bool] = {}
    uses: dict[Place, list[Place]] = {place: [] for place in boxes}
    for place in order:
        before = [*inputs[place]]
        if place in arrives_from:
            before.append(arrives_from[place])
        row_of[place] = 1 + max((row_of.get(b, -1) for b in before), default=-1)
        depends_on_message[place] = boxes[place].kind is BoxKind.RECEIVE or any(
            depends_on_message.get(b, False) for b in before
        )
        for b in before:
            uses[b].append(place)
    for place in reversed(order):
        if uses[place] and not depends_on_message[place] and boxes[place].message is None:
            row_of[place] = min(row_of[use] for use in uses[place]) - 1
    return row_of


def _in_order(
    boxes: dict[Place, Box],
    inputs: dict[Place, list[Place]],
    arrives_from: dict[Place, Place],
) -> list[Place]:
    """Whatever is needed comes before what needs it. A description is gathered while workers may
    go on working, so it may not fit together: what would be a cycle is left open."""
    done: dict[Place, None] = {}
    begun: set[Place] = set()
    for start in boxes:
        todo = [start]
        while todo:
            place = todo[-1]
            before = [*inputs[place], *([arrives_from[place]] if place in arrives_from else [])]
            missing = [b for b in before if b not in done and b not in begun]
            begun.add(place)
            if missing:
                todo += missing
            else:
                done.setdefault(todo.pop())
    return list(done)


def _order(layout: Layout) -> None:
    above: dict[Item, list[Item]] = {}
    below: dict[Item, list[Item]] = {}
    for line in layout.lines:
        for upper, lower in itertools.pairwise(line):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    for upper, lower in layout.messages:
        above.setdefault(lower, []).append(upper)
        below.setdefault(upper, []).append(lower)
    for neighbours, rows in ((above, layout.rows), (below, layout.rows[::-1])) * 2:
        for row in rows:
            for cell in row:
                for item in cell:
                    near = neighbours.get(item)
                    if near:
                        item.order = sum(n.column * 1000 + n.order for n in near) / len(near)
                        item.order -= item.column * 1000
                cell.sort(key=lambda item: item.order)
                for number, item in enumerate(cell):
                    item.order = number - (len(cell) - 1) / 2


def _cut_middle(layout: Layout) -> None:
    kept = MOST_ROWS // 2
    first, last = kept, len(layout.rows) - kept  # these rows are left out
    gone = [item for row in layout.rows[first:last] for cell in row for item in cell]
    gone_items = set(gone)
    layout.cut = Cut(
        after_row=first - 1,
        rows=last - first,
        boxes=sum(item.box is not None and item.box.message is None for item in gone),
        messages=sum(lower in gone_items for _, lower in layout.messages),
    )
    layout.rows = layout.rows[:first] + layout.rows[last:]
    for number, row in enumerate(layout.rows):
        for cell in row:
            for item in cell:
                item.row = number
    layout.messages = [
        (upper, lower)
        for upper, lower in layout.messages
        if upper not in gone_items and lower not in gone_items
    ]
    kept_lines = []
    for line in layout.lines:
        above_cut = [item for item in line if item not in gone_items and item.row < first]
        below_cut = [item for item in line if item not in gone_items and item.row >= first]
        kept_lines += [part for part in (above_cut, below_cut) if len(part) > 1]
    layout.lines = kept_lines
