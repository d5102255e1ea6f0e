"""`draw`: the picture of a live context."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch

from telegrad.autograd.boxes import DistributedGraph
from telegrad.autograd.graph import describe
from telegrad.observe import svg, text
from telegrad.observe.layout import Layout, lay_out
from telegrad.observe.words import amount

__all__ = ["GraphPicture", "draw"]

MOST_BOXES = 14


class GraphPicture:
    """A distributed graph, as SVG and as text. A notebook shows it by itself.

    Args:
        graph: what `telegrad.autograd.graph.describe` gave.
        title: stands above it; by default the context and what its messages carry.
    """

    def __init__(self, graph: DistributedGraph, title: str | None = None) -> None:
        self.graph = graph
        self.title = title if title is not None else _title(graph)

    @cached_property
    def _layout(self) -> Layout:
        return lay_out(self.graph)

    @property
    def svg(self) -> str:
        """The picture, as the text of an SVG file."""
        return svg.render(self._layout, self.title)

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return text.render(self._layout, self.title)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the SVG file; returns where it is."""
        where = Path(path)
        where.write_text(self.svg, encoding="utf-8")
        return where


def draw(
    context_id: int,
    roots: Sequence[torch.Tensor] = (),
    *,
    title: str | None = None,
    most_boxes: int = MOST_BOXES,
    timeout: float = 5.0,
) -> GraphPicture:
    """The picture of a live context on all its workers: workers are columns, what was sent from
    one to another are arrows with shapes and bytes. It works before `backward` and after it.

    A context does not know the loss until `backward` is called with it: give it as a root, and the
    picture goes all the way and shows what the loss does not use.

    Args:
        roots: tensors on this worker that the graph leads to; usually the loss.
        title: stands above the picture.
        most_boxes: a worker's part with more than so many nodes is folded: runs of operations, or
            all that lies between the same messages, become one box. 0 folds nothing.
        timeout: seconds for which a worker may keep silent. A worker that is lost or silent is
            drawn so, with what its peers know of it.

    Raises:
        ContextError: there is no such context on this worker.

    Example::

        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", model, args=(x,)).sum()
            draw(context_id, [loss]).save("step.svg")
    """
    graph = describe(context_id, roots, most_boxes=most_boxes, timeout=timeout)
    return GraphPicture(graph, title)


def _title(graph: DistributedGraph) -> str:
    messages = graph.messages.values()
    total = sum(size.nbytes for box in messages for size in box.sizes)
    workers = f"{len(graph.workers)} worker{'s' * (len(graph.workers) != 1)}"
    count = f"{len(messages)} message{'s' * (len(messages) != 1)}"
    return f"context {graph.context_id}: {workers}, {count}, {amount(total)}"
