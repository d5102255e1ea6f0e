"""Reading the tensor table: untrusted bytes become tensors over received memory."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from telegrad.errors import ProtocolError, SerializationError
from telegrad.wire.tensor_table.layout import (
    ALIGNED,
    COALESCED,
    COMPRESSED,
    COMPRESSED_LAYOUTS,
    CONJ,
    CONTIGUOUS,
    COO,
    DTYPE_NAMES,
    DTYPES,
    GRAD,
    HEADER,
    ITEM_SIZES,
    MAGIC,
    NEG,
    PART,
    RAW,
    RECORD,
    SHARED,
    SIZES,
    STORAGE,
    STRIDED,
    UNUSUAL,
    VERSION,
    VIEW,
)

__all__ = ["Attach", "end_of_table", "give_grad", "unpack"]

Attach = Callable[[list[Tensor]], Sequence[Tensor]]
"""Gets the tensors that required grad on the sender, and returns those that take their places."""

_LARGEST: Final = 2**62
_DAMAGES: Final = (
    struct.error,
    ValueError,
    TypeError,
    RuntimeError,
    IndexError,
    OverflowError,
    BufferError,
)
_frombuffer = torch.frombuffer


@dataclass(slots=True)
class _Source:
    """A span as it arrived: `size` bytes at `offset` of `memory`."""

    memory: Any
    offset: int
    size: int
    whole: Tensor | None = None
    """All its bytes, with the version counter that all tensors on it share."""

    def raw(self) -> Any:
        if self.size == 0:
            return bytearray()
        # By numpy, because a memoryview casts and slices only simple buffers.
        return np.frombuffer(self.memory, dtype=np.uint8, count=self.size, offset=self.offset)

    def bytes_shared(self) -> Tensor:
        if self.whole is None:
            self.whole = _frombuffer(
                self.memory, dtype=torch.uint8, count=self.size, offset=self.offset
            )
        return self.whole


def unpack(
    payload: memoryview,
    buffers: Sequence[Any],
    attach: Attach | None,
) -> tuple[list[Any], int]:
    """Rebuild a table's entries over `buffers`, without copying those.

    Returns:
        The entries that the pickle stream asks for, in its order, and where the stream begins.

    Raises:
        ProtocolError: the table is damaged.
        SerializationError: the buffers were not received.
    """
    try:
        records, need_grad, views, parts, position = _read(payload, buffers)
    except (ProtocolError, SerializationError):
        raise
    except _DAMAGES as error:
        raise ProtocolError(f"damaged tensor table: {error}") from error
    if need_grad:
        give_grad(records, need_grad, attach)
    if views:
        try:
            for index, view in views.items():
                is_recorded = attach is not None or view.root not in parts
                records[index] = view.of(records[view.root], is_recorded)
        except _DAMAGES as error:
            raise ProtocolError(f"damaged tensor table: {error}") from error
    if parts:
        records = [record for index, record in enumerate(records) if index not in parts]
    return records, position


def end_of_table(payload: memoryview) -> int:
    """Where the stream behind a table begins, without reading the table."""
    _, _, _, span_count, record_count, inlined = HEADER.unpack_from(payload)
    position: int = HEADER.size + 8 * span_count + inlined
    for _ in range(record_count):
        _, _, flags, ndim, _, _ = RECORD.unpack_from(payload, position)
        position += 16 + 8 * ndim * (1 if flags & CONTIGUOUS else 2)
    return position


def give_grad(values: list[Any], need_grad: Sequence[int], attach: Attach | None) -> None:
    """Makes the values of these numbers require grad, as they did on the sender."""
    if attach is None:
        for index in need_grad:
            values[index].requires_grad_()
        return
    replacements = attach([values[index] for index in need_grad])
    for index, replacement in zip(need_grad, replacements, strict=True):
        values[index] = replacement


def _read(
    payload: memoryview, buffers: Sequence[Any]
) -> tuple[list[Any], list[int], dict[int, _View], set[int], int]:
    """What the records describe, without the views; which of them need grad; the views; which are
    only parts of others; and where the records end."""
    magic, version, zero, span_count, record_count, inlined = HEADER.unpack_from(payload)
    if magic != MAGIC or version != VERSION or zero:
        raise ProtocolError("damaged tensor table: not a table of this protocol version")
    position = HEADER.size + 8 * span_count
    if position + inlined + RECORD.size * record_count > len(payload):
        raise ProtocolError("damaged tensor table: it is longer than its message")
    sizes = _unpack_all(payload, HEADER.size, span_count)
    sources = _sources(sizes, payload[position : position + inlined], buffers)
    position += inlined

    built: list[Any] = []
    need_grad: list[int] = []
    views: dict[int, _View] = {}
    parts: set[int] = set()
    for index in range(record_count):
        kind, code, flags, ndim, span, offset = RECORD.unpack_from(payload, position)
        position += 16
        shape = _unpack_all(payload, position, ndim)
        position += 8 * ndim
        strides = None
        if not flags & CONTIGUOUS:
            strides = _unpack_all(payload, position, ndim)
            position += 8 * ndim

        value: Any
        if kind == STRIDED:
            dtype = DTYPES[code]
            if dtype is None:
                raise ProtocolError(f"this build of torch has no {DTYPE_NAMES[code]}")
            count = math.prod(shape)
            if strides is None and count > 0 and not flags & UNUSUAL:
                source = sources[span]
                if offset or count * ITEM_SIZES[code] > source.size:
                    raise ProtocolError("damaged tensor table: a tensor is larger than its span")
                value = _frombuffer(source.memory, dtype=dtype, count=count, offset=source.offset)
                if ndim != 1:
                    # In place, so that it is not a view. The number of elements is the same; torch
                    # refuses two negative sizes.
                    value.resize_(shape)
            elif flags & VIEW:
                strides = _contiguous_strides(shape) if strides is None else strides
                views[index] = _View(span, dtype, flags, offset, shape, strides)
                built.append(None)
                continue
            else:
                value = _strided(sources, dtype, flags, span, offset, shape, strides)
        elif kind == RAW:
            value = sources[span].raw()
        elif kind == STORAGE:
            value = _storage(sources, span, offset, shape)
        elif kind in (COO, COMPRESSED):
            value = _sparse(built, kind, code, flags, span, shape)
        else:
            raise ProtocolError(f"damaged tensor table: unknown kind {kind}")
        built.append(value)
        if flags & PART:
            parts.add(index)
        if flags & GRAD:
            if not isinstance(value, Tensor):
                raise ProtocolError("damaged tensor table: only tensors have gradients")
            if not value.is_floating_point() and not value.is_complex():
                raise ProtocolError(f"damaged tensor table: {value.dtype} has no gradients")
            need_grad.append(index)
    return built, need_grad, views, parts, position


def _unpack_all(payload: memoryview, position: int, count: int) -> tuple[int, ...]:
    if position + 8 * count > len(payload):
        raise ProtocolError("damaged tensor table: it is longer than its message")
    if count < 17:
        return SIZES[count].unpack_from(payload, position)
    return struct.unpack_from(f"<{count}q", payload, position)


def _sources(sizes: tuple[int, ...], inline: memoryview, buffers: Sequence[Any]) -> list[_Source]:
    sources = []
    # One copy for all small spans; their tensors share and own it.
    riding = bytearray(inline)
    offset = 0
    taken = 0
    for word in sizes:
        size = word >> 1
        if size < 0:
            raise ProtocolError("damaged tensor table: a span of negative size")
        if word & 1:
            if offset + size > len(riding):
                raise ProtocolError("damaged tensor table: a span lies beyond the payload")
            sources.append(_Source(riding, offset, size))
            offset += size + (-size & ALIGNED)
        else:
            if taken == len(buffers):
                raise ProtocolError("damaged tensor table: more spans than buffers")
            memory = buffers[taken]
            taken += 1
            if memoryview(memory).nbytes < size:
                raise ProtocolError("damaged tensor table: a span is larger than its buffer")
            sources.append(_Source(memory, 0, size))
    return sources


def _strided(
    sources: list[_Source],
    dtype: torch.dtype,
    flags: int,
    span: int,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
) -> Tensor:
    """A tensor that has holes, shares its span, has no elements, or a lazy bit set."""
    count = math.prod(shape)
    if strides is None:
        strides = _contiguous_strides(shape)
    if min(shape, default=0) < 0 or min(strides, default=0) < 0 or offset < 0 or count > _LARGEST:
        raise ProtocolError("damaged tensor table: negative or too large sizes")
    if count == 0:
        value = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    else:
        source = sources[span]
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if offset % dtype.itemsize or offset + (last + 1) * dtype.itemsize > source.size:
            raise ProtocolError("damaged tensor table: a tensor lies outside of its span")
        if flags & SHARED:
            with torch.no_grad():
                typed = _flat(source.bytes_shared(), dtype)
                # Detached, it is not a view, and keeps the version counter of the span.
                value = typed.as_strided(shape, strides, offset // dtype.itemsize).detach()
        else:
            value = _frombuffer(
                source.memory, dtype=dtype, count=last + 1, offset=source.offset + offset
            )
            value.as_strided_(shape, strides)
    if flags & (CONJ | NEG):
        with torch.no_grad():
            if flags & CONJ:
                value = torch._conj(value)
            if flags & NEG:
                value = torch._neg_view(value)
            value = value.detach()
    return value


def _flat(whole: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes as elements of a type, as many as fit."""
    return whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype)


@dataclass(slots=True)
class _View:
    """A view, which is made after its root has got its history."""

    root: int  # number of its record
    dtype: torch.dtype
    flags: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, root: Any, is_recorded: bool) -> Tensor:
        """
        Args:
            is_recorded: tensors that require grad have a history, or are views of a value.
                Otherwise the view becomes a leaf with memory of its own.
        """
        itemsize = self.dtype.itemsize
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        if (
            not isinstance(root, Tensor)
            or math.prod(self.shape) not in range(1, _LARGEST)
            or min(self.shape, default=1) < 1
            or min(self.strides, default=0) < 0
            or self.offset < 0
            or self.offset % itemsize
            or self.offset + (last + 1) * itemsize > root.untyped_storage().nbytes()
        ):
            raise ProtocolError("damaged tensor table: a view lies outside of its span")
        has_grad = bool(self.flags & GRAD)
        # A view without gradients of a root that has some is as if made under `no_grad`.
        with torch.set_grad_enabled(has_grad or not root.requires_grad):
            if self.dtype is not root.dtype:
                root = _as_type(root, self.dtype)
            value: Tensor = root.as_strided(self.shape, self.strides, self.offset // itemsize)
            if self.flags & CONJ:
                value = torch._conj(value)
            if self.flags & NEG:
                value = torch._neg_view(value)
        if has_grad and not is_recorded:
            value = value.detach().clone().requires_grad_()
        return value


def _as_type(root: Tensor, dtype: torch.dtype) -> Tensor:
    """A view of a root as elements of another type, as many as fit."""
    flat = root.as_strided((root.numel(),), (1,))
    if root.is_complex() and dtype is root.dtype.to_real():
        return torch.view_as_real(flat).flatten()
    is_pair = dtype.is_complex and dtype.to_real() is root.dtype
    if not is_pair:
        flat = flat.view(torch.uint8)
    step = dtype.itemsize // flat.itemsize
    first = -flat.storage_offset() % step
    flat = flat[first : first + (len(flat) - first) // step * step]
    return torch.view_as_complex(flat.view(-1, 2)) if is_pair else flat.view(dtype)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _storage(
    sources: list[_Source], span: int, offset: int, shape: tuple[int, ...]
) -> torch.UntypedStorage:
    (size,) = shape
    if size == 0:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    source = sources[span]
    if size < 0 or offset < 0 or offset + size > source.size:
        raise ProtocolError("damaged tensor table: a storage lies outside of its span")
    if size == source.size:
        return source.bytes_shared().untyped_storage()
    raw = _frombuffer(source.memory, dtype=torch.uint8, count=size, offset=source.offset + offset)
    return raw.untyped_storage()


def _sparse(
    built: list[Any], kind: int, code: int, flags: int, first: int, shape: tuple[int, ...]
) -> Tensor:
    parts = built[first : first + (2 if kind == COO else 3)]
    if not all(isinstance(part, Tensor) for part in parts):
        raise ProtocolError("damaged tensor table: a sparse tensor of something else")
    # Indices out of range would access memory out of bounds later: torch checks them here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "support is in beta state", said once a process
        if kind == COO:
            indices, values = parts
            return torch.sparse_coo_tensor(
                indices,
                values,
                shape,
                check_invariants=True,
                is_coalesced=bool(flags & COALESCED),
            )
        compressed, plain, values = parts
        return torch.sparse_compressed_tensor(
            compressed,
            plain,
            values,
            shape,
            layout=COMPRESSED_LAYOUTS[code],
            check_invariants=True,
        )
