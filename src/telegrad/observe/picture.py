"""`draw`: the picture of a distributed graph."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch

from telegrad.observe import svg, text
from telegrad.observe.boxes import DistributedGraph
from telegrad.observe.context_graph import describe
from telegrad.observe.layout import Layout, lay_out
from telegrad.observe.plain_graph import describe_plain
from telegrad.observe.words import amount

__all__ = ["GraphPicture", "draw"]

MOST_BOXES = 14


class GraphPicture:
    """A distributed graph, as SVG and as text. A notebook shows it by itself.

    Args:
        graph: what `describe` or `describe_plain` gave.
        title: stands above it; by default what its messages carry.
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
        """Writes the SVG file; returns where it is.

        Raises:
            ValueError: the name says that it is something else than SVG.
            OSError: it cannot be written.
        """
        where = Path(path)
        if where.suffix.lower() not in ("", ".svg"):
            raise ValueError(f"a picture is saved as SVG: name it *.svg, not {where.name!r}")
        try:
            where.write_text(self.svg, encoding="utf-8")
        except OSError as error:
            if error.filename is None:  # a full disk, say, is found out while writing
                error.filename = str(where)
            raise
        return where

    def __repr__(self) -> str:
        return f"<GraphPicture {self.title!r}: print it, or save it as SVG>"


def draw(
    what: int | torch.Tensor | Sequence[torch.Tensor],
    roots: Sequence[torch.Tensor] = (),
    *,
    title: str | None = None,
    most_boxes: int = MOST_BOXES,
    timeout: float = 5.0,
) -> GraphPicture:
    """The picture of a graph on all its workers: workers are columns, what was sent from one to
    another are arrows with shapes and bytes.

    `draw(loss)` shows what `loss.backward()` goes through. Draw it before: a backward pass frees
    the graph, here as well as elsewhere.

    `draw(context_id)` shows a live context, before `backward` and after it. A context does not know
    the loss until `backward` is called with it: give it as a root, and the picture goes all the way
    and shows what the loss does not use.

    Args:
        what: a tensor, usually the loss, or several; or the id of a context.
        roots: of a context: tensors on this worker that the graph leads to; usually the loss.
        title: stands above the picture.
        most_boxes: a worker's part with more than so many nodes is folded: runs of operations, or
            all that lies between the same messages, become one box. 0 folds nothing.
        timeout: seconds for which a worker may keep silent. A worker that is lost or silent is
            drawn so, with what its peers know of it.

    Raises:
        ContextError: there is no such context on this worker.
        NotInitialized: this process is no worker.
        ValueError: a tensor has no history.

    Example::

        loss = model(x).sum()
        draw(loss).save("step.svg")
    """
    if isinstance(what, torch.Tensor):
        what = [what]
    if isinstance(what, list | tuple):
        graph = describe_plain(what, most_boxes=most_boxes, timeout=timeout)
    else:
        graph = describe(what, roots, most_boxes=most_boxes, timeout=timeout)  # type: ignore[arg-type]
    return GraphPicture(graph, title)


def _title(graph: DistributedGraph) -> str:
    messages = graph.messages.values()
    total = sum(size.nbytes for box in messages for size in box.sizes)
    workers = f"{len(graph.workers)} worker{'s' * (len(graph.workers) != 1)}"
    count = f"{len(messages)} message{'s' * (len(messages) != 1)}"
    context = "" if graph.context_id is None else f"context {graph.context_id}: "
    return f"{context}{workers}, {count}, {amount(total)}"
