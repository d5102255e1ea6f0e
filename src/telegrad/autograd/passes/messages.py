"""What a pass sends most, on the wire.

Two messages with gradients travel for every call that a pass goes back through, and one with credit
wherever it ends, so they are written by hand: a fixed head, a report for each worker that has one
to make, and the tensors as they are. What is seldom there (a part of the credit, the history of
gradients that are to be differentiated again) follows as a pickle.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from fractions import Fraction

import torch

from telegrad.autograd.passes.protocol import Credit, Reports, Standing
from telegrad.errors import ProtocolError
from telegrad.wire.allowed.allow_list import loads_data
from telegrad.wire.codec import Packet, head_of_packet

__all__ = ["CreditMessage", "GradientMessage"]

_HEAD = struct.Struct("<QQQBHI")  # context, pass, message, flags, reports, gradients
_CREDIT_HEAD = struct.Struct("<QQBH")  # context, pass, flags, reports
_REPORT = struct.Struct("<HIB")  # worker, how many it has made, standing
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
    """The gradients of the tensors of a message, on their way back to who sent it.

    Attributes:
        message_id: of the message whose tensors they belong to.
        credit, reports: see `pass_protocol`.
        gradients: one for each of those tensors that required grad, or None where there is none.
        history: with `create_graph`, the id under which these gradients were recorded, and which of
            them were.
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
            credit = (self.credit.numerator, self.credit.denominator)
            tail.append(pickle.dumps((credit, self.history), 5))
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
        """Takes the tensors out of the packet, so that nobody else refers to them.

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
                credit = _credit_of(*parts)
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
        """The ids of context and pass in a message that cannot be decoded as a whole.

        Raises:
            ProtocolError: not even these can be read.
        """
        head = head_of_packet(payload)
        if len(head) < _HEAD.size:
            raise ProtocolError("damaged gradient message: it is shorter than its head")
        context_id, pass_id, *_ = _HEAD.unpack_from(head)
        return context_id, pass_id


@dataclass(slots=True)
class CreditMessage:
    """The credit that comes home where a pass ends, with what it has gathered on its way."""

    context_id: int
    pass_id: int
    credit: Credit
    reports: Reports

    def pack(self) -> bytes:
        tail = [_REPORT.pack(worker, *report) for worker, report in self.reports.items()]
        flags = 0
        if self.credit != 1:
            flags = _MORE
            tail.append(pickle.dumps((self.credit.numerator, self.credit.denominator), 5))
        head = _CREDIT_HEAD.pack(self.context_id, self.pass_id, flags, len(self.reports))
        return b"".join((head, *tail))

    @classmethod
    def unpack(cls, body: bytes) -> CreditMessage:
        """
        Raises:
            ProtocolError: it is damaged.
        """
        try:
            context_id, pass_id, flags, n_reports = _CREDIT_HEAD.unpack_from(body)
            reports, position = _reports_at(body, _CREDIT_HEAD.size, n_reports)
            credit: Credit = 1
            if flags & _MORE:
                credit = _credit_of(*loads_data(body[position:]))
        except _DAMAGES as error:
            raise ProtocolError(f"damaged credit message: {error!r}") from error
        return cls(context_id, pass_id, credit, reports)


def _reports_at(data: bytes | memoryview, position: int, count: int) -> tuple[Reports, int]:
    """So many reports, and where they end."""
    reports: Reports = {}
    for _ in range(count):
        worker, n, standing = _REPORT.unpack_from(data, position)
        reports[worker] = (n, _STANDINGS[standing])
        position += _REPORT.size
    return reports, position


def _credit_of(numerator: int, denominator: int) -> Credit:
    return numerator if denominator == 1 else Fraction(numerator, denominator)
