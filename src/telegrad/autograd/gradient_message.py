"""Gradients on the wire.

Two of these travel for every call that a pass goes back through, so they are written by hand: a
fixed head, a report for each worker that has one to make, and the tensors as they are. What is
seldom there (a part of the credit, the history of gradients that are to be differentiated again)
follows as a pickle.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from fractions import Fraction

import torch

from telegrad.autograd.pass_protocol import Credit, Reports, Standing
from telegrad.errors import ProtocolError
from telegrad.wire.codec import Packet, head_of_packet

__all__ = ["GradientMessage"]

_HEAD = struct.Struct("<QQQBBH")  # context, pass, message, flags, reports, gradients
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
        tail: list[bytes] = []
        for worker, (n, standing) in self.reports.items():
            tail.append(_REPORT.pack(worker, n, standing))
        gradients = self.gradients
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
            len(self.reports),
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
            position = _HEAD.size
            reports: Reports = {}
            for _ in range(n_reports):
                worker, n, standing = _REPORT.unpack_from(head, position)
                reports[worker] = (n, _STANDINGS[standing])
                position += _REPORT.size
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
                (numerator, denominator), history = pickle.loads(head[position:])
                credit = numerator if denominator == 1 else Fraction(numerator, denominator)
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
