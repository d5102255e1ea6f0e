"""Copies, here, of tensors that are on a worker.

Each fetch waits for a message and its answer. A program that saves a state dict asks for hundreds
of tensors one after the other, so those of a state dict are marked as belonging together: asking
for one brings those behind it, too. They are handed out once, and only while nothing has been sent
to the worker in between that may have changed them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from telegrad.tensors.table import fetch_values

if TYPE_CHECKING:
    from telegrad.tensors.remote_tensor import RemoteTensor

__all__ = ["Together", "fetch", "fetch_one"]

_MOST_BYTES = 64 << 20  # of tensors that nobody has asked for yet


def fetch(tensors: Sequence[RemoteTensor]) -> list[Tensor]:
    """Copies of tensors of one worker, in one message."""
    if not tensors:
        return []
    stream = tensors[0].handle.stream
    values: list[Tensor] = stream.ask(fetch_values, [tensor.handle.id for tensor in tensors])
    # What has come in a message may share its memory with what else was in it.
    return [value.detach().clone() for value in values]


def fetch_one(tensor: RemoteTensor) -> Tensor:
    """A copy of a tensor; see above."""
    return fetch([tensor])[0] if tensor.together is None else tensor.together.value_of(tensor)


class Together:
    """Tensors of one worker, in the order in which they are likely to be asked for."""

    def __init__(self, tensors: Sequence[RemoteTensor]) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._places = {id(tensor): place for place, tensor in enumerate(tensors)}
        self._next = 0  # those before it have been brought
        self._version = -1  # of the stream, when they were
        self._values: dict[int, Tensor] = {}  # by place
        for tensor in tensors:
            tensor.together = self

    def value_of(self, tensor: RemoteTensor) -> Tensor:
        place = self._places[id(tensor)]
        stream = tensor.handle.stream
        if self._version != stream.version:
            self._values, self._next = {}, place
        if place in self._values:
            return self._values.pop(place)
        if place < self._next:  # it has been handed out before
            return fetch([tensor])[0]
        wanted: list[tuple[int, RemoteTensor]] = []
        size = 0
        while self._next < len(self._tensors) and size < _MOST_BYTES:
            each = self._tensors[self._next]()
            if each is not None:
                wanted.append((self._next, each))
                size += each.numel() * each.element_size()
            self._next += 1
        values = fetch([each for _, each in wanted])
        self._version = stream.version
        self._values = {at: value for (at, _), value in zip(wanted, values, strict=True)}
        return self._values.pop(place)
