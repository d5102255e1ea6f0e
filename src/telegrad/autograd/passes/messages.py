"""What a pass sends: gradients, credit and failures.

Gradient messages are most of a pass's traffic, two for every call, so their layout is explicit: a
fixed head, the reports of workers, and the tensors as they are. What is rare (a part of the credit,
the history of gradients that are to be differentiated again) follows as a pickle.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch

from telegrad.autograd.passes.protocol import Credit, Reports, Standing
from telegrad.errors import (
    BackwardError,
    ContextError,
    ProtocolError,
    TelegradError,
    WorkerLost,
)
from telegrad.rpc.calls.outcome import text_of, traceback_of
from telegrad.wire.allowed.allow_list import loads_data
from telegrad.wire.codec import Packet, head_of_packet

__all__ = [
    "Failure",
    "GradientMessage",
    "pack_credit",
    "pack_reports",
    "unpack_credit",
    "unpack_reports",
]

_HEAD = struct.Struct("<QQQBHI")  # context, pass, message, flags, reports, gradients
_REPORT = struct.Struct("<HIB")  # worker, number of its report, standing
_STANDINGS = tuple(Standing)

_DAMAGES = (
    struct.error,
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    IndexError,
    StopIteration,
)

_RETAIN = 1
_CREATE = 2
_SOME_ABSENT = 4  # a bit for each gradient follows
_MORE = 8  # credit and histories follow


@dataclass(slots=True)
class GradientMessage:
    """The gradients of the tensors of a message, on their way back to its sender.

    Attributes:
        message_id: the message whose tensors they belong to.
        credit, reports: see `protocol`.
        gradients: one for each of those tensors that required grad, or None where there is none.
        history: with `create_graph`, the id under which these gradients were recorded, and the
            positions of those that were.
    """

    context_id: int
    pass_id: int
    message_id: int
    retain_graph: bool
    create_graph: bool
    credit: Credit
    reports: Reports
    gradients: list[torch.Tensor | None]
    history: tuple[int, tuple[int, ...]] = (-1, ())

    def pack(self) -> Packet:
        flags = 0
        reports, gradients = self.reports, self.gradients
        tail: list[bytes] = []
        for worker, (n, standing) in reports.items():
            tail.append(_REPORT.pack(worker, n, standing))
        tensors: list[torch.Tensor] = []
        for gradient in gradients:
            if gradient is not None:
                if gradient.requires_grad:
                    gradient = gradient.detach()
                tensors.append(gradient)
        if self.retain_graph:
            flags |= _RETAIN
        if self.create_graph:
            flags |= _CREATE
        if len(tensors) < len(gradients):
            flags |= _SOME_ABSENT
            present = sum(1 << i for i, gradient in enumerate(gradients) if gradient is not None)
            tail.append(present.to_bytes((len(gradients) + 7) // 8, "little"))
        if self.credit != 1 or self.create_graph:
            flags |= _MORE
            tail.append(pickle.dumps((pack_credit(self.credit), self.history), 5))
        head = _HEAD.pack(
            self.context_id,
            self.pass_id,
            self.message_id,
            flags,
            len(reports),
            len(gradients),
        )
        return Packet(b"".join((head, *tail)), tensors)

    @classmethod
    def unpack(cls, packet: Packet) -> GradientMessage:
        """Takes the tensors out of the packet, so that no other reference to them remains.

        Raises:
            ProtocolError: it is damaged.
        """
        head = packet.head
        tensors: list[torch.Tensor | None] = [*packet.tensors]
        packet.tensors.clear()
        try:
            context_id, pass_id, message_id, flags, n_reports, size = _HEAD.unpack_from(head)
            reports, position = _reports_at(head, _HEAD.size, n_reports)
            if flags & _SOME_ABSENT:
                end = position + (size + 7) // 8
                present = int.from_bytes(head[position:end], "little")
                position = end
                given = iter(tensors)
                tensors = [next(given) if present >> i & 1 else None for i in range(size)]
                if next(given, None) is not None:
                    raise ValueError("more gradients than it says")
            elif len(tensors) != size:
                raise ValueError("not as many gradients as it says")
            credit: Credit = 1
            history: tuple[int, tuple[int, ...]] = (-1, ())
            if flags & _MORE:
                parts, history = loads_data(head[position:])
                credit = unpack_credit(parts)
        except _DAMAGES as error:
            raise ProtocolError(f"damaged gradient message: {error!r}") from error
        return cls(
            context_id,
            pass_id,
            message_id,
            bool(flags & _RETAIN),
            bool(flags & _CREATE),
            credit,
            reports,
            tensors,
            history,
        )

    @staticmethod
    def pass_of(payload: bytes | memoryview) -> tuple[int, int]:
        """The ids of the context and the pass in a message that cannot be decoded as a whole.

        Raises:
            ProtocolError: even these cannot be read.
        """
        head = head_of_packet(payload)
        if len(head) < _HEAD.size:
            raise ProtocolError("damaged gradient message: it is shorter than its head")
        context_id, pass_id, *_ = _HEAD.unpack_from(head)
        return context_id, pass_id


@dataclass(frozen=True)
class Failure:
    """Why a pass ended, on its way to the caller of `backward`.

    Attributes:
        kind: "raised", "lost" or "released".
        worker: where it happened.
        lost: the name of a lost worker.
    """

    kind: str
    worker: int
    text: str
    traceback: str = ""
    lost: str = ""

    @classmethod
    def raised(cls, worker: int, error: BaseException) -> Failure:
        if issubclass(type(error), WorkerLost):  # `__class__` may be a property that raises
            return cls("lost", worker, str(error), lost=error.worker)  # type: ignore[attr-defined]
        return cls("raised", worker, text_of(error) or type(error).__name__, traceback_of(error))

    def pack(self) -> tuple[str, int, str, str, str]:
        return (self.kind, self.worker, self.text, self.traceback, self.lost)

    def error(self) -> TelegradError:
        if self.kind == "lost":
            return WorkerLost(
                f"Error on Node {self.worker}: {self.text}",
                worker=self.lost,
                reason=self.text,
            )
        if self.kind == "released":
            return ContextError(self.text)
        return BackwardError(
            f"Error on Node {self.worker}: {self.text}\n\nThere:\n{self.traceback}",
            worker=self.worker,
            traceback=self.traceback,
        )


def pack_credit(credit: Credit) -> tuple[int, int]:
    return (credit.numerator, credit.denominator)


def unpack_credit(packed: tuple[int, int]) -> Credit:
    numerator, denominator = packed
    return numerator if denominator == 1 else Fraction(numerator, denominator)


def pack_reports(reports: Reports) -> dict[int, tuple[int, int]]:
    return {worker: (n, int(standing)) for worker, (n, standing) in reports.items()}


def unpack_reports(packed: Mapping[int, tuple[int, int]]) -> Reports:
    return {worker: (n, Standing(standing)) for worker, (n, standing) in packed.items()}


def _reports_at(data: bytes | memoryview, position: int, count: int) -> tuple[Reports, int]:
    """Reads so many reports; returns them and the position of their end."""
    reports: Reports = {}
    for _ in range(count):
        worker, n, standing = _REPORT.unpack_from(data, position)
        reports[worker] = (n, _STANDINGS[standing])
        position += _REPORT.size
    return reports, position
