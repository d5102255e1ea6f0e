"""Makes a large local graph small enough to look at, without telling anything false.

Two steps, each taken only if the one before has left too many boxes:

1. *Runs.* An operation whose result has one use, there alone, becomes one with that use; so does
   what is made from nothing but leaves for one use (a transposed weight). A loop of 998 additions
   becomes one box, and so does a stack of layers with its parameters.
2. *Neighbourhoods.* Operations that depend on the same received messages, and that the same sent
   messages and roots depend on, become one. What lies between two of them depends on no less than
   the one and serves no less than the other, so it belongs to the same: the folded graph has no
   cycles, and every way from one message to another is still there.

Nothing here knows torch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from telegrad.observe.boxes import Box, BoxKind

__all__ = ["fold"]


def fold(boxes: Sequence[Box], most: int) -> list[Box]:
    """
    Args:
        boxes: one worker's part, inputs first.
        most: how many boxes besides messages are not too many.
    """
    if _count(boxes) <= most:
        return list(boxes)
    folded = _fold_runs(boxes)
    if _count(folded) > most:
        folded = _fold_runs(_fold_neighbourhoods(folded))
    return folded


def _count(boxes: Iterable[Box]) -> int:
    return sum(box.message is None for box in boxes)


def _fold_runs(boxes: Sequence[Box]) -> list[Box]:
    kinds = {box.key: box for box in boxes}
    uses = Counter(key for box in boxes for key in box.inputs)
    group = {box.key: box.key for box in boxes}  # box → the box it becomes one with
    left = {box.key: set(box.inputs) for box in boxes}

    for box in boxes:
        if box.kind is not BoxKind.OPERATION:
            continue
        for key in box.inputs:
            input_ = kinds[key]
            if uses[key] == 1 and input_.message is None and not input_.is_root and not left[key]:
                group[key] = box.key
                left[box.key].discard(key)
        if len(left[box.key]) == 1 and not box.is_root:
            (key,) = left[box.key]
            input_ = kinds[key]
            is_run = input_.kind is BoxKind.OPERATION and not input_.is_root
            if uses[key] == 1 and is_run:
                group[key] = box.key
                left[box.key] = set(left[key])

    def last(key: int) -> Hashable:
        chain = [key]
        while group[chain[-1]] != chain[-1]:
            chain.append(group[chain[-1]])
        for member in chain:
            group[member] = chain[-1]
        return chain[-1]

    return _join(boxes, lambda box: last(box.key))


def _fold_neighbourhoods(boxes: Sequence[Box]) -> list[Box]:
    borders = [box.key for box in boxes if box.message is not None or box.is_root]
    bit_of = {key: 1 << number for number, key in enumerate(borders)}
    depends: dict[int, int] = {}  # sets, as bits of a number
    serves = {box.key: 0 for box in boxes}
    for box in boxes:
        depends[box.key] = bit_of[box.key] if box.kind is BoxKind.RECEIVE else 0
        for key in box.inputs:
            depends[box.key] |= depends[key]
    for box in reversed(boxes):
        if box.kind is BoxKind.SEND or box.is_root:
            serves[box.key] |= bit_of[box.key]
        for key in box.inputs:
            serves[key] |= serves[box.key]

    def neighbourhood(box: Box) -> Hashable:
        if box.message is not None or box.is_root:
            return box.key
        return box.kind, depends[box.key], serves[box.key]

    return _join(boxes, neighbourhood)


def _join(boxes: Sequence[Box], group_of: Callable[[Box], Hashable]) -> list[Box]:
    """One box for each group, inputs first. The last of a group, in that order, gives it its place,
    its key and what comes out of it."""
    groups: dict[Hashable, list[Box]] = {}
    for box in boxes:
        groups.setdefault(group_of(box), []).append(box)
    key_of = {box.key: group[-1].key for group in groups.values() for box in group}
    joined = [_joined(group, key_of) for group in groups.values()]
    return _inputs_first(joined)


def _joined(group: list[Box], key_of: dict[int, int]) -> Box:
    last = group[-1]
    if len(group) == 1:
        keys = dict.fromkeys(key_of[key] for key in last.inputs)
        return dataclasses.replace(last, inputs=tuple(keys))
    names: Counter[str] = Counter()
    for box in group:
        if box.kind is BoxKind.OPERATION:
            for name, count in box.names:
                names[name] += count
    leaves = sum(box.leaf_count for box in group)
    inputs = dict.fromkeys(key_of[key] for box in group for key in box.inputs)
    inputs.pop(last.key, None)
    return Box(
        key=last.key,
        kind=last.kind,
        names=tuple(names.items()) or (("leaf", leaves),),
        inputs=tuple(inputs),
        sizes=last.sizes if last.kind is BoxKind.OPERATION else (),
        is_root=last.is_root,
        leaf_count=leaves,
        leaf_bytes=sum(box.leaf_bytes for box in group),
        gradient_count=sum(box.gradient_count for box in group),
    )


def _inputs_first(boxes: Sequence[Box]) -> list[Box]:
    by_key = {box.key: box for box in boxes}
    placed: dict[int, Box] = {}
    for start in boxes:
        todo = [start]
        while todo:
            box = todo[-1]
            missing = [by_key[key] for key in box.inputs if key not in placed]
            if missing:
                todo += missing
            else:
                placed.setdefault(todo.pop().key, box)
    return list(placed.values())
