"""What workers ask of each other in a plain pass.

Gradients travel as a message of their own, which needs no pickle. If they are recorded themselves
(`create_graph`), the delivery is a recorded call, and a second pass goes through it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from telegrad.autograd.plain.passes import Modes, PassName, Report
from telegrad.autograd.plain.serving import export_leaves, serve_pass
from telegrad.errors import ProtocolError
from telegrad.rpc.calls.outcome import described_by_arguments
from telegrad.rpc.group import current
from telegrad.wire.codec import Packet
from telegrad.wire.frames import Kind

if TYPE_CHECKING:
    from telegrad.autograd.plain.engine import PlainEngine
    from telegrad.rpc.calls.agent import Agent

__all__ = [
    "EXTENSION",
    "About",
    "ask",
    "begin_to_deliver",
    "deliver",
    "delivered",
    "engine_here",
    "finish",
    "report_of",
]

EXTENSION = "plain"
"""The name under which a worker has its engine."""

About = tuple[int, int, int, int]
"""The pass: where it began, and its number; the call; the modes."""

_ABOUT = struct.Struct("<4q")
_CREATES_GRAPH = Modes(False, True, False).as_bits()


def engine_here() -> PlainEngine:
    """The engine of the worker that this thread acts for.

    Raises:
        NotInitialized
    """
    engine: PlainEngine = current.current().extensions[EXTENSION]  # type: ignore[assignment]
    return engine


def begin_to_deliver(
    agent: Agent, to: int, about: About, gradients: Sequence[Tensor | None]
) -> Callable[[], Report | Packet] | None:
    """Sends gradients of what a call has returned; what it returns waits for the answer. None if
    they should go as a call."""
    head = _ABOUT.pack(*about) + bytes(gradient is not None for gradient in gradients)
    present = [gradient for gradient in gradients if gradient is not None]
    return agent.begin_request(to, Kind.PLAIN_GRADIENTS, Packet(head, present))


def delivered(_source: int, packet: Packet) -> Report | Packet:
    """Serves that message."""
    head = bytes(packet.head)
    present = iter(packet.tensors)
    is_there = head[_ABOUT.size :]
    if sum(is_there) != len(packet.tensors):
        raise ProtocolError("damaged gradients: their number is not what the message says")
    gradients = [next(present) if each else None for each in is_there]
    return deliver(*_ABOUT.unpack_from(head), *gradients)


def report_of(answer: Report | Packet) -> Report:
    """What `deliver` or `ask` has returned."""
    if not isinstance(answer, Packet):
        return answer
    present = iter(answer.tensors)
    return Report([next(present) if is_there else None for is_there in answer.head], [], True)


# -- what runs at the other end


def deliver(
    origin: int, task: int, call: int, modes: int, *gradients: Tensor | None
) -> Report | Packet:
    _begin((origin, task), call)
    report = engine_here().passes.deliver((origin, task), call, Modes.from_bits(modes), gradients)
    found, later, is_run, exported = report
    if found is None or not is_run or later or exported is not None or modes & _CREATES_GRAPH:
        return report
    present = [gradient for gradient in found if gradient is not None]
    return Packet(bytes(gradient is not None for gradient in found), present)


def ask(origin: int, task: int, call: int, modes: int) -> Report:
    _begin((origin, task), call)
    return engine_here().passes.ask((origin, task), call, Modes.from_bits(modes))


def finish(origin: int, task: int) -> list[int]:
    return engine_here().passes.finish((origin, task))


def _begin(name: PassName, call: int) -> None:
    """If gradients are recorded themselves, those of a second pass go the way of the first."""
    serve_pass(name)
    entry = engine_here().entries.get(call)
    if entry is not None and entry.exported is not None:
        export_leaves(*entry.exported)


for _function in (deliver, ask, finish):
    described_by_arguments(_function, lambda _: "a backward pass")
