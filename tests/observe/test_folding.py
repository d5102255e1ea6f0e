"""Folding a worker's part of the graph keeps what it says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from telegrad.observe.boxes import Box, BoxKind
from telegrad.observe.folding import fold


@st.composite
def graphs(draw):
    """Boxes in a valid order, with a few messages in and out."""
    boxes = []
    for key in range(draw(st.integers(1, 40))):
        kind = draw(st.sampled_from(list(BoxKind)))
        makers = [box.key for box in boxes if box.kind is not BoxKind.SEND]
        inputs = ()
        if kind in (BoxKind.OPERATION, BoxKind.SEND) and makers:
            chosen = st.lists(st.sampled_from(makers), min_size=1, max_size=3, unique=True)
            inputs = tuple(draw(chosen))
        is_message = kind in (BoxKind.SEND, BoxKind.RECEIVE)
        is_leaf = kind is BoxKind.LEAF
        boxes.append(
            Box(
                key=key,
                kind=kind,
                names=((f"name{key % 5}", 1),),
                inputs=inputs,
                message=key if is_message else None,
                peer=1 if is_message else None,
                is_root=kind is BoxKind.OPERATION and draw(st.integers(0, 9)) == 0,
                leaf_count=int(is_leaf),
                leaf_bytes=4 * is_leaf,
                gradient_count=int(is_leaf and draw(st.booleans())),
            )
        )
    return boxes


def ways(boxes):
    """Which messages come in to be part of which messages out and roots."""
    behind = {}
    for box in boxes:
        behind[box.key] = {box.key} if box.kind is BoxKind.RECEIVE else set()
        for key in box.inputs:
            behind[box.key] |= behind[key]
    ends = [box for box in boxes if box.kind is BoxKind.SEND or box.is_root]
    return {box.key: behind[box.key] for box in ends}


@given(graphs(), st.integers(1, 20))
def test_folding_keeps_every_way_between_messages(boxes, most):
    assert ways(fold(boxes, most)) == ways(boxes)


@given(graphs(), st.integers(1, 20))
def test_folding_keeps_an_order_without_cycles(boxes, most):
    seen = set()
    for box in fold(boxes, most):
        assert seen.issuperset(box.inputs)
        assert box.key not in seen
        seen.add(box.key)


@given(graphs(), st.integers(1, 20))
def test_folding_loses_no_leaf_and_no_operation(boxes, most):
    def counted(boxes):
        leaves = [(b.leaf_count, b.leaf_bytes, b.gradient_count) for b in boxes]
        operations = sum(b.node_count for b in boxes if b.kind is BoxKind.OPERATION)
        return [sum(column) for column in zip(*leaves, strict=True)], operations

    assert counted(fold(boxes, most)) == counted(boxes)


def test_a_small_part_is_left_as_it_is():
    boxes = [Box(key=0, kind=BoxKind.LEAF, names=(("leaf", 1),))]
    for key in range(1, 5):
        boxes.append(Box(key=key, kind=BoxKind.OPERATION, names=(("Add", 1),), inputs=(key - 1,)))
    assert fold(boxes, 5) == boxes
    assert len(fold(boxes, 4)) == 1


def test_a_run_of_equal_operations_is_one_box():
    boxes = [Box(key=0, kind=BoxKind.RECEIVE, names=(("receive", 1),), message=7, peer=1)]
    for key in range(1, 1000):
        boxes.append(Box(key=key, kind=BoxKind.OPERATION, names=(("Add", 1),), inputs=(key - 1,)))
    folded = fold(boxes, 10)
    assert [box.names for box in folded] == [(("receive", 1),), (("Add", 999),)]
