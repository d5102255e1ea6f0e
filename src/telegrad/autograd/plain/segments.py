"""Pieces of a graph between which the caller moves tensors and gradients itself.

A recorded call (`engine`) takes its tensors there and brings the gradients back. A pipeline does
not wait for replies, and its tensors go from stage to stage, so it uses these functions instead. At
a stage, `receive` begins a piece with the tensors that came, `keep` ends it with those that leave,
and `run_back` runs gradients through it. At the driver, `enter` and `leave` stand for all pieces in
between::

    arguments ── enter ── token ── leave ── results
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from telegrad.autograd.plain.entries import Export
from telegrad.autograd.plain.messages import engine_here
from telegrad.autograd.plain.nodes import EMPTY, apply_collect, apply_post, apply_received
from telegrad.autograd.plain.notes import Note
from telegrad.autograd.plain.passes import Modes, PassName, Report, watch_exported
from telegrad.autograd.plain.serving import as_served
from telegrad.errors import BackwardError

__all__ = ["EMPTY", "Begin", "End", "enter", "keep", "leave", "receive", "run_back", "served"]


class Begin(Protocol):
    """Where a piece begins, at the driver."""

    def collect(self) -> Sequence[Tensor | None]:
        """Waits for the gradients of the arguments."""


class End(Protocol):
    """Where a piece ends, at the driver."""

    def post(self, gradients: Sequence[Tensor | None]) -> None:
        """Sends the gradients of the results, and does not wait."""


def enter(begin: Begin, tensors: Sequence[Tensor], *, turn: int = 0) -> Tensor:
    """The token of a piece.

    Args:
        turn: of those that torch's engine can run, it runs the one with the highest turn first;
            small against the number of nodes made before, because anything else comes first.
    """
    return apply_collect(begin, tensors, turn=turn)


def leave(end: End, results: Sequence[Tensor], token: Tensor) -> Sequence[Tensor]:
    """Results with their history."""
    return apply_post(end, None, results, [token])


@contextmanager
def served() -> Iterator[None]:
    """Inside, calls to other workers are those of a function that another worker has called."""
    with as_served():
        yield


def receive(call: int, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Tensors that came, as the beginning of the piece that has this id."""
    return apply_received(call, None, tensors)


def keep(call: int, tensors: Sequence[Tensor], leaves: Sequence[Tensor], export: Export) -> Note:
    """Keeps the graph behind `tensors` until a pass without `retain_graph` has gone through it, its
    caller is lost, or what is returned here dies.

    Args:
        leaves: their gradients go to `export` and not into `.grad`.
    """
    engine = engine_here()
    for leaf in leaves:
        watch_exported(leaf)
    engine.entries.add(call, tensors, (leaves, export) if leaves else None)
    note = engine.lifetimes.keep_result(call, engine.worker_id)
    engine.lifetimes.watch()
    return note


def run_back(name: PassName, call: int, modes: Modes, gradients: Sequence[Tensor | None]) -> Report:
    """Runs the gradients of what was kept.

    Raises:
        BackwardError: they cannot be run by themselves.
    """
    passes = engine_here().passes
    report = passes.deliver(name, call, modes, gradients)
    if not report.is_run:
        passes.drop(lambda each: each == name)  # it has kept the gradients
        raise BackwardError(
            "what it has returned shares a part of its graph with another micro-batch or call, or "
            "uses a parameter that has a hook on its worker: detach what is kept from one call for "
            "the next, and register hooks on parameters at the driver"
        )
    return report
