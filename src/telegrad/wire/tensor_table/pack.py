"""Writing the tensor table: a list of tensors becomes records, spans and buffers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Final

import torch
from torch import Tensor

from telegrad.wire.tensor_table.aliases import (
    Region,
    Relations,
    bytes_spanned,
    memory_at,
    relate,
    shared_spans,
)
from telegrad.wire.tensor_table.layout import (
    ALIGNED,
    COALESCED,
    CODES,
    COMPRESSED,
    COMPRESSED_LAYOUTS,
    CONJ,
    CONTIGUOUS,
    COO,
    GRAD,
    HEADER,
    INLINE_LIMIT,
    MAGIC,
    NEG,
    NO_SPAN,
    PART,
    RAW,
    RECORD,
    RECORDS,
    SHARED,
    SIZES,
    STORAGE,
    STRIDED,
    VERSION,
    VIEW,
    Entry,
    Part,
    Sparse,
    Whole,
    keeps_grad,
)
from telegrad.wire.tensor_table.small import bytes_at

__all__ = ["Table", "pack"]

_PADDING: Final = tuple(bytes(n) for n in range(16))
_UNRELATED: Final = Relations()
_TOLERATED_HOLES: Final = 4096  # bytes: with smaller holes a view keeps its strides


@dataclass(slots=True)
class Table:
    """A packed table: the part in front of the pickle stream, and the buffers beside it."""

    pieces: list[bytes]
    buffers: list[memoryview]
    tensors: list[Tensor]


def pack(entries: Sequence[Entry], originals: dict[int, Tensor], *, apart: bool = False) -> Table:
    """Describe `entries`, in the order in which the pickle stream asks for them.

    Args:
        entries: what the stream refers to. Its plain tensors must be strided, on the CPU and of a
            known dtype.
        originals: by the id of an entry's tensor, the tensor that it stands for, if that is another
            one (of a subclass, say): its history counts.
        apart: tensors that share memory become separate ones.
    """
    return _Packer(originals).pack(entries, apart)


class _Packer:
    __slots__ = ("buffers", "inline", "inlined", "originals", "sizes", "tensors")

    def __init__(self, originals: dict[int, Tensor]) -> None:
        self.originals = originals
        self.sizes: list[int] = []
        self.inline: list[bytes] = []
        self.inlined = 0
        self.buffers: list[memoryview] = []
        self.tensors: list[Tensor] = []

    def pack(self, entries: Sequence[Entry], apart: bool) -> Table:
        # All regions first: only then is known which of them overlap.
        regions: list[Region] = []
        layouts: list[tuple[bool, int, int]] = []  # contiguous, address, size
        for index, entry in enumerate(entries):
            if type(entry) is Tensor:
                tensor = entry
            elif type(entry) is Part or type(entry) is Whole:
                tensor = entry.tensor
            else:
                layouts.append((True, 0, 0))
                continue
            contiguous = tensor.is_contiguous()
            size = tensor.nbytes
            if size == 0:
                layouts.append((contiguous, 0, 0))
                continue
            address = tensor.data_ptr()
            if not contiguous:
                size = bytes_spanned(tensor)
            layouts.append((contiguous, address, size))
            if address:
                regions.append((address, address + size, index, tensor))
        shared = shared_spans(regions) if len(regions) > 1 and not apart else {}
        relations = _UNRELATED
        if shared:
            relations = relate(entries, regions, shared, self._original)
            for index in relations.apart:
                del shared[index]
        root_of = relations.root_of
        spans: dict[int, int] = {}

        records: list[bytes] = []
        for index, entry in enumerate(entries):
            contiguous, address, size = layouts[index]
            if type(entry) is Tensor:
                kind, flags, tensor = STRIDED, 0, entry
            elif type(entry) is Part:
                kind, flags, tensor = STRIDED, PART, entry.tensor
            elif type(entry) is Whole:
                kind, flags, tensor = STORAGE, 0, entry.tensor
            elif type(entry) is Sparse:
                records.append(self._sparse(entry.tensor, index))
                continue
            elif isinstance(entry, PickleBuffer):
                records.append(self._raw(entry))
                continue
            else:  # a tensor of a subclass: the pickler reduces it
                raise TypeError(f"not an entry of the table: {type(entry).__name__}")

            if kind == STRIDED:
                original = self.originals.get(id(tensor), tensor) if self.originals else tensor
                if keeps_grad(original):
                    flags |= GRAD
                    if index not in root_of:
                        self.tensors.append(original)
                if tensor.is_conj():
                    flags |= CONJ
                if tensor.is_neg():
                    flags |= NEG
            offset = 0
            if size == 0:
                span = NO_SPAN
            elif index in shared:
                flags |= SHARED
                first, end, owner = shared[index]
                if first in spans:
                    span = spans[first]
                else:
                    span = spans[first] = self._span(first, end - first, owner)
                offset = address - first
                if index in root_of:
                    flags |= VIEW
                    span = root_of[index]
            else:
                holes = 0 if contiguous else size - tensor.nbytes
                if not address or holes > max(tensor.nbytes, _TOLERATED_HOLES):
                    # Without memory of its own (a lazy zero), or mostly holes: a dense copy.
                    tensor = _dense(tensor)
                    contiguous, address, size = True, tensor.data_ptr(), tensor.nbytes
                span = self._span(address, size, tensor)
            shape = tensor.shape
            ndim = len(shape)
            code = CODES[tensor.dtype]
            if contiguous:
                flags |= CONTIGUOUS
                if ndim < 9:
                    records.append(
                        RECORDS[ndim].pack(kind, code, flags, ndim, span, offset, *shape)
                    )
                    continue
                numbers: tuple[int, ...] = tuple(shape)
            else:
                numbers = (*shape, *tensor.stride())
            records.append(RECORD.pack(kind, code, flags, ndim, span, offset) + _pack_all(numbers))

        for root in relations.hidden:
            flags = CONTIGUOUS | SHARED | PART
            if root.tensor.requires_grad:
                flags |= GRAD
                self.tensors.append(root.tensor)
            code, span = CODES[root.tensor.dtype], spans[root.start]
            records.append(
                RECORDS[1].pack(STRIDED, code, flags, 1, span, root.offset, *root.tensor.shape)
            )

        sizes = self.sizes
        header = HEADER.pack(MAGIC, VERSION, 0, len(sizes), len(records), self.inlined)
        pieces = [header, _pack_all(sizes), *self.inline, *records]
        return Table(pieces, self.buffers, self.tensors)

    def _original(self, tensor: Tensor) -> Tensor:
        return self.originals.get(id(tensor), tensor)

    def _span(self, address: int, size: int, owner: Tensor) -> int:
        index = len(self.sizes)
        if size < INLINE_LIMIT:
            self.sizes.append(size << 1 | 1)
            self._ride(bytes_at(address, size))
        else:
            self.sizes.append(size << 1)
            self.buffers.append(memory_at(address, size, owner))
        return index

    def _ride(self, data: bytes) -> None:
        size = len(data)
        self.inline.append(data)
        padding = -size & ALIGNED
        if padding:
            self.inline.append(_PADDING[padding])
        self.inlined += size + padding

    def _raw(self, buffer: PickleBuffer) -> bytes:
        memory = buffer.raw()
        size = memory.nbytes
        span = len(self.sizes)
        if size < INLINE_LIMIT:
            self.sizes.append(size << 1 | 1)
            self._ride(bytes(memory))
        else:
            self.sizes.append(size << 1)
            self.buffers.append(memory)
        return RECORD.pack(RAW, 0, 0, 0, span, 0)

    def _sparse(self, tensor: Tensor, index: int) -> bytes:
        flags = CONTIGUOUS
        if tensor.layout is torch.sparse_coo:
            kind, code, parts = COO, 0, 2
            if tensor.is_coalesced():
                flags |= COALESCED
        else:
            kind, code, parts = COMPRESSED, COMPRESSED_LAYOUTS.index(tensor.layout), 3
        original = self.originals.get(id(tensor), tensor)
        if keeps_grad(original):
            flags |= GRAD
            self.tensors.append(original)
        ndim = tensor.dim()
        head = RECORD.pack(kind, code, flags, ndim, index - parts, 0)
        return head + _pack_all(tuple(tensor.shape))


def _pack_all(numbers: Sequence[int]) -> bytes:
    count = len(numbers)
    if count < 17:
        return SIZES[count].pack(*numbers)
    return struct.pack(f"<{count}q", *numbers)


def _dense(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        # The bits for conjugation and negation travel as flags, so the copy must not resolve them.
        if tensor.is_neg():
            tensor = torch._neg_view(tensor)
        if tensor.is_conj():
            tensor = torch._conj(tensor)
        return torch.clone(tensor, memory_format=torch.contiguous_format)
