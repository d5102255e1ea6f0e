"""Pictures of distributed graphs, taken of real groups."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

from telegrad import autograd, rpc
from telegrad.errors import ContextError, NotInitialized
from telegrad.observe import GraphPicture, draw
from telegrad.observe.boxes import Box, BoxKind, DistributedGraph, Size, WorkerGraph
from telegrad.testing.cluster import cluster

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def group():
    with cluster(3) as running:
        yield running


def chain(x, length):
    for _ in range(length):
        x = x + 1
    return x


def residual(x, length):
    for _ in range(length):
        x = torch.relu(x) + x
    return x


def nested(x):
    return rpc.rpc_sync("worker2", torch.mul, args=(x, 3)) + 1


def layers(x):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))(x)


def leaf():
    return torch.ones(3, requires_grad=True)


def words(picture):
    """The text of a picture, without its spacing and what only passes add."""
    return re.sub(r"[─ ]+|\(has gradient\)", "", str(picture))


def texts_of(picture):
    return [
        "".join(text.itertext()) for text in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")
    ]


def overlaps(picture):
    """Pairs of boxes, and of texts, that cover each other. A character is 0.6 of its size wide."""
    root = ElementTree.fromstring(picture.svg)
    rectangles, texts = [], []
    for rectangle in root.iter(f"{SVG}rect"):
        if rectangle.get("class", "").split()[0] not in ("ground", "lane"):
            x, y = float(rectangle.get("x")), float(rectangle.get("y"))
            width, height = float(rectangle.get("width")), float(rectangle.get("height"))
            rectangles.append((x, y, x + width, y + height, "box"))
    for text in root.iter(f"{SVG}text"):
        size = 12 if text.get("class", "") in ("", "name") else 11
        width = 0.6 * size * len(text.text)
        x, y = float(text.get("x")), float(text.get("y"))
        left = x - width / 2 if text.get("text-anchor") == "middle" else x
        texts.append((left, y - 0.8 * size, left + width, y + 0.2 * size, text.text))
    found = []
    for shapes in (rectangles, texts):
        for number, a in enumerate(shapes):
            for b in shapes[number + 1 :]:
                if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]:
                    found.append((a, b))
    return found


def test_a_picture_shows_workers_nodes_and_what_messages_carry(group):
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
        loss = y.sum()
        picture = draw(context_id, [loss], title="a call")
    assert str(picture).splitlines() == [
        "a call",
        "",
        "worker0                   worker1",
        "───────                   ───────",
        "1 leaf [3]",
        "2 send ← 1",
        "└────── [3] · 12 B ──────▶",
        "                          1 receive",
        "                          2 Mul [3] ← 1",
        "                          3 send ← 2",
        "◀────── [3] · 12 B ──────┘",
        "3 receive",
        "4 Sum scalar ← 3 (root)",
    ]
    shown = texts_of(picture)
    for text in ("worker0", "worker1", "Mul", "Sum (root)", "leaf"):
        assert text in shown
    assert shown.count("[3] · 12 B") == 2


def test_a_picture_works_before_and_after_backward(group):
    x = leaf()
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
        assert "root" not in str(draw(context_id))  # nobody has said where it leads
        before = draw(context_id, [loss], title="")
        autograd.backward(context_id, [loss])
        after = draw(context_id, title="")
        assert "1 leaf [3] (has gradient)" in str(after)
        assert words(after) == words(before)
        assert 'class="leaf full"' in after.svg


def test_looking_changes_nothing(group):
    x = leaf()
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
        context = autograd._retrieve_context(context_id)
        known = context._known_worker_ids()
        first = draw(context_id).graph
        assert draw(context_id).graph == first
        assert context._known_worker_ids() == known
        assert autograd._current_context() is context
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[x].tolist() == [2, 2, 2]


def test_nested_calls_reach_workers_that_the_caller_never_spoke_to(group):
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", nested, args=(leaf(),)).sum()
        picture = draw(context_id, [loss])
        assert [part.name for part in picture.graph.workers] == ["worker0", "worker1", "worker2"]
        assert len(picture.graph.messages) == 4
        assert not overlaps(picture)


def test_results_that_the_root_does_not_use_are_faint(group):
    x = leaf()
    with autograd.context() as context_id:
        used = rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
        unused = rpc.rpc_sync("worker2", torch.mul, args=(used, 3))
        picture = draw(context_id, [used.sum()])
        assert str(picture).count("(unused)") == 5  # send, receive, Mul, send, receive
        assert "faint: not used by the root" in texts_of(picture)
        assert "(unused)" not in str(draw(context_id, [used.sum(), unused.sum()]))


def test_calls_to_oneself_are_arrows_within_a_column(group):
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker0", torch.mul, args=(leaf(), 2)).sum()
        picture = draw(context_id, [loss])
        assert [part.name for part in picture.graph.workers] == ["worker0"]
        assert str(picture).count("(to itself)") == 2
        assert not overlaps(picture)


def test_a_long_chain_becomes_one_box(group):
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", chain, args=(leaf(), 998)).sum()
        picture = draw(context_id, [loss])
        assert "Add ×998" in texts_of(picture)
        assert len(picture.svg) < 20_000


def test_a_graph_that_is_no_chain_becomes_one_box_between_the_same_messages(group):
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", residual, args=(leaf(), 500)).sum()
        picture = draw(context_id, [loss])
        assert "2 Relu, Add 1000 operations, [3] ← 1" in str(picture)


def test_nothing_is_folded_on_demand(group):
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", chain, args=(leaf(), 30)).sum()
        picture = draw(context_id, [loss], most_boxes=0)
        assert str(picture).count("Add [3]") == 30


def test_parameters_stand_with_their_layers_when_folded(group):
    with autograd.context() as context_id:
        x = torch.ones(5, 4, requires_grad=True)
        loss = rpc.rpc_sync("worker1", layers, args=(x,)).sum()
        folded = draw(context_id, [loss], most_boxes=2)
        assert "2 T, Addmm, Relu 5 operations, 4 leaves, 232 B, 5×2 ← 1" in str(folded)
        whole = draw(context_id, [loss])
        assert str(whole).count("leaf") == 5
        assert not overlaps(whole)


def test_many_messages_leave_out_the_middle(group):
    x = leaf()
    with autograd.context() as context_id:
        y = x
        for _ in range(50):
            y = rpc.rpc_sync("worker1", torch.mul, args=(y, x))
        picture = draw(context_id, [y.sum()])
        assert len(picture.graph.messages) == 100
        assert re.search(r"⋮ \d+ rows left out: \d+ boxes, \d+ messages", str(picture))
        assert any("rows left out" in text for text in texts_of(picture))
        assert not overlaps(picture)


def test_gradients_of_gradients_are_part_of_the_graph(group):
    x = leaf()
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", torch.pow, args=(x, 3)).sum()
        autograd.backward(context_id, [y], create_graph=True)
        penalty = (autograd.get_gradients(context_id)[x] ** 2).sum()
        picture = draw(context_id, [penalty])
        assert len(picture.graph.messages) == 3  # two of them carry what depends on x again
        assert not overlaps(picture)


def test_a_context_without_messages_has_a_picture_too(group):
    with autograd.context() as context_id:
        assert "worker0" in str(draw(context_id))
        assert "worker0" in draw(context_id).svg


def test_an_unknown_context_is_an_error(group):
    with pytest.raises(ContextError, match="there is no autograd context 12345 on this worker"):
        draw(12345)


def test_a_notebook_gets_the_svg_and_a_file_can_be_saved(group, tmp_path):
    with autograd.context() as context_id:
        picture = draw(context_id)
    assert picture._repr_svg_() == picture.svg
    where = picture.save(tmp_path / "graph.svg")
    assert ElementTree.parse(where).getroot().tag == f"{SVG}svg"
    with pytest.raises(FileNotFoundError):
        picture.save(tmp_path / "nowhere" / "graph.svg")


def test_names_are_escaped():
    box = Box(key=0, kind=BoxKind.OPERATION, names=(("<Evil & Co>Backward", 1),))
    part = WorkerGraph(worker=0, name='<"worker">', boxes=(box,))
    picture = GraphPicture(DistributedGraph(context_id=1, workers=(part,)), title="<title> & more")
    assert {'<"worker">', "<title> & more", "<Evil & Co>"} <= set(texts_of(picture))


def test_labels_of_messages_side_by_side_do_not_overlap():
    size = (Size((1000, 1000), "float64", 8_000_000),)

    def port(key, kind, message, peer):
        return Box(
            key=key, kind=kind, names=(("", 1),), sizes=size, message=message, peer=peer
        )  # fmt: skip

    sends = tuple(port(n, BoxKind.SEND, n, 1) for n in range(6))
    receives = tuple(port(n, BoxKind.RECEIVE, n, 0) for n in range(6))
    graph = DistributedGraph(
        context_id=1,
        workers=(
            WorkerGraph(worker=0, name="a", boxes=sends),
            WorkerGraph(worker=1, name="b", boxes=receives),
        ),
    )
    assert not overlaps(GraphPicture(graph))


def test_outside_of_a_group_there_is_nothing_to_draw(monkeypatch):
    monkeypatch.setattr(autograd, "_engine", autograd.engine_without_agent)
    monkeypatch.setattr(autograd, "_without_agent", None)
    with pytest.raises(NotInitialized):
        draw(1)


def test_a_picture_is_saved_as_svg_only(tmp_path):
    picture = GraphPicture(DistributedGraph(context_id=1, workers=[]), "nothing")
    with pytest.raises(ValueError, match=r"saved as SVG: name it \*\.svg, not 'g\.png'"):
        picture.save(tmp_path / "g.png")
    assert picture.save(tmp_path / "g.SVG").exists()
    assert repr(picture) == "<GraphPicture 'nothing': print it, or save it as SVG>"


def test_a_full_disk_names_the_file():
    picture = GraphPicture(DistributedGraph(context_id=1, workers=[]), "nothing")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        picture.save("/dev/full")
