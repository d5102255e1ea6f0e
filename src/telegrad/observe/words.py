"""How boxes, tensors and amounts are called in a picture."""

from __future__ import annotations

import re
from collections.abc import Sequence

from telegrad.observe.boxes import Box, BoxKind, Size
from telegrad.observe.layout import Cut

__all__ = ["amount", "details_of", "message_label", "shape_of", "title_of", "words_of_cut"]

_LONGEST_NAME = 26
_BACKWARD = re.compile(r"Backward\d*$")


def amount(nbytes: float) -> str:
    """Bytes as people say them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            number = nbytes / size
            return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return f"{nbytes:.0f} B"


def shape_of(size: Size) -> str:
    shape = "×".join(map(str, size.shape)) or "scalar"
    if len(size.shape) == 1:
        shape = f"[{shape}]"
    return shape if size.dtype == "float32" else f"{shape} {size.dtype}"


def message_label(sizes: Sequence[Size]) -> str:
    """What stands on an arrow: the tensors and their bytes."""
    total = amount(sum(size.nbytes for size in sizes))
    if len(sizes) > 2:
        return f"{len(sizes)} tensors · {total}"
    return f"{', '.join(map(shape_of, sizes))} · {total}"


def words_of_cut(cut: Cut) -> str:
    return f"{cut.rows} rows left out: {cut.boxes} boxes, {cut.messages} messages"


def title_of(box: Box) -> str:
    """The name of a box: of the operation that runs forward, since the picture runs that way."""
    if box.kind is BoxKind.LEAF:
        return "leaf" if box.leaf_count == 1 else f"{box.leaf_count} leaves"
    if box.message is not None:
        return "send" if box.kind is BoxKind.SEND else "receive"
    names = [(_forward_name(name), count) for name, count in box.names]
    if len(names) == 1:
        (name, count), *_ = names
        return name if count == 1 else f"{name} ×{count}"
    if len(names) <= 3:
        listed = ", ".join(name for name, _ in names)
        if len(listed) <= _LONGEST_NAME:
            return listed
    return f"{names[0][0]} … {names[-1][0]}"


def details_of(box: Box) -> list[str]:
    """The lines under the name."""
    if box.message is not None:
        return []
    if box.kind is BoxKind.LEAF:
        if box.leaf_count == 1:
            return [shape_of(box.sizes[0])]
        return [amount(box.leaf_bytes)]
    lines = []
    if box.node_count > 1 and len(box.names) > 1:
        lines.append(f"{box.node_count} operations")
    if box.leaf_count:
        leaves = "leaf" if box.leaf_count == 1 else "leaves"
        lines.append(f"{box.leaf_count} {leaves}, {amount(box.leaf_bytes)}")
    if box.sizes:
        more = "" if len(box.sizes) == 1 else f" +{len(box.sizes) - 1}"
        lines.append(shape_of(box.sizes[0]) + more)
    return lines


def _forward_name(name: str) -> str:
    short = _BACKWARD.sub("", name.rpartition("::")[2]) or name
    return short if len(short) <= _LONGEST_NAME else short[: _LONGEST_NAME - 1] + "…"
