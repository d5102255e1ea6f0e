"""The short cut for small tensors.

Most messages of a training step hold one or two small tensors and little else. Their cost is in
steps, not in bytes, so they have a table of their own, which is written and read in one loop::

    head     count, length of the records, length of the data
    records  for each tensor: number of dimensions, dtype, whether it requires grad, sizes
    data     the tensors' bytes, each padded to 16

It holds dense CPU tensors of less than 16 KiB that share no memory. A message with any other tensor
uses the table of `layout`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from telegrad.errors import ProtocolError
from telegrad.wire.tensor_table.layout import (
    ALIGNED,
    CODES,
    DTYPE_NAMES,
    DTYPES,
    INLINE_LIMIT,
    is_leaf,
)

__all__ = ["bytes_at", "pack_small", "unpack_small"]

_HEAD: Final = struct.Struct("<HII")
_RECORDS: Final = tuple(struct.Struct(f"<BBB{n}H") for n in range(9))
_MOST: Final = 0xFFFF
_MOST_KNOWN: Final = 1024
_LONGEST_KNOWN: Final = 256  # bytes of records
_DAMAGES: Final = (
    struct.error,
    ValueError,
    TypeError,
    RuntimeError,
    IndexError,
    OverflowError,
)
_LIKE: Final = tuple(getattr(np, name, None) and np.dtype(name) for name in DTYPE_NAMES)
"""The dtypes that numpy has, too."""
_strided = torch.strided
_ndarray = np.ndarray
_from_numpy = torch.from_numpy
_frombuffer = torch.frombuffer

_bytes_from = ctypes.pythonapi.PyBytes_FromStringAndSize
bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ctypes.cast(_bytes_from, ctypes.c_void_p).value or 0
)
"""`ctypes.string_at`, but faster: a copy of so many bytes at an address."""


class _Description(NamedTuple):
    """How a tensor of some dtype and shape lies in a table."""

    size: int
    padding: bytes
    keeps_grad: bool
    record: bytes
    alone: bytes
    """The table of one such tensor, up to the data."""


class _Layout(NamedTuple):
    """What the records of a table say."""

    tensors: Sequence[tuple[Any, torch.dtype, tuple[int, ...], int, int]]
    """For each: the dtype of numpy if numpy makes it, the dtype, the sizes, the number of elements,
    and where its data begins."""
    need_grad: Sequence[int]
    held: int
    """How many bytes their data takes."""


# A training loop sends tensors of the same few shapes.
_descriptions: dict[tuple[torch.dtype, torch.Size, bool], _Description] = {}
_layouts: dict[bytes, _Layout] = {}


def pack_small(
    tensors: Sequence[object], *, may_overlap: bool = False
) -> tuple[bytes, list[Tensor]] | None:
    """The table of `tensors`, and those of them that require grad; None if they do not fit.

    Args:
        may_overlap: tensors that share memory, or whose elements do, may become separate ones.
    """
    if forward_ad._current_level >= 0:  # there may be dual tensors, which must be refused
        return None
    count = len(tensors)
    if count == 1:
        found = _look_at(tensors[0], may_overlap)
        if found is None:
            return None
        (_, padding, keeps_grad, _, alone), data, _ = found
        return alone + data + padding, [*tensors] if keeps_grad else []  # type: ignore[list-item]
    if count > _MOST:
        return None
    records: list[bytes] = []
    pieces: list[bytes] = []
    grads: list[Any] = []
    regions: list[tuple[int, int]] = []
    for tensor in tensors:
        found = _look_at(tensor, may_overlap)
        if found is None:
            return None
        (size, padding, keeps_grad, record, _), data, address = found
        if keeps_grad:
            grads.append(tensor)
        records.append(record)
        pieces.append(data)
        if padding:
            pieces.append(padding)
        if not may_overlap:
            regions.append((address, address + size))
    if not _are_separate(regions):
        return None
    described, held = b"".join(records), b"".join(pieces)
    return _HEAD.pack(count, len(described), len(held)) + described + held, grads


def _look_at(tensor: object, may_overlap: bool) -> tuple[_Description, bytes, int] | None:
    """How a tensor lies in a table, its bytes, and their address; None if it does not fit."""
    if (
        type(tensor) is not Tensor
        or tensor.layout is not _strided
        or not tensor.is_cpu
        or tensor.is_nested
    ):
        return None
    keeps_grad = tensor.requires_grad and (is_grad_enabled() or is_leaf(tensor))
    key = tensor.dtype, tensor.shape, keeps_grad
    description = _descriptions.get(key) or _describe(key)
    if description is None:
        return None
    is_one_number = False
    if not tensor.is_contiguous():
        if not may_overlap:
            return None
        if any(tensor.stride()):
            tensor = tensor.contiguous()
        else:
            is_one_number = True  # expanded, like the gradient of a sum
    if tensor.__dict__:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # inside a transform of torch.func, say: `pack` reports it
        return None
    if not address or tensor.is_neg() or tensor.is_conj():
        return None
    if is_one_number:
        data = bytes_at(address, tensor.dtype.itemsize) * tensor.numel()
    else:
        data = bytes_at(address, description.size)
    return description, data, address


def _describe(key: tuple[torch.dtype, torch.Size, bool]) -> _Description | None:
    """How such a tensor lies in a table; None if it does not fit."""
    dtype, shape, keeps_grad = key
    size = dtype.itemsize * prod(shape)
    code = CODES.get(dtype)
    if not 0 < size < INLINE_LIMIT or code is None or len(shape) >= len(_RECORDS):
        return None
    padding = bytes(-size & ALIGNED)
    record = _RECORDS[len(shape)].pack(len(shape), code, keeps_grad, *shape)
    alone = _HEAD.pack(1, len(record), size + len(padding)) + record
    description = _Description(size, padding, keeps_grad, record, alone)
    _remember(_descriptions, key, description)
    return description


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[key] = value


def _are_separate(regions: list[tuple[int, int]]) -> bool:
    regions.sort()
    end = 0
    for first, after in regions:
        if first < end:
            return False
        end = after
    return True


def unpack_small(payload: memoryview, position: int) -> tuple[list[Any], Sequence[int], int]:
    """Reads a table.

    Returns:
        The tensors, the numbers of those that required grad on the sender (they do not require it
        yet), and where the table ends.

    Raises:
        ProtocolError: the table is damaged.
    """
    tensors: list[Any] = []
    try:
        count, described, held = _HEAD.unpack_from(payload, position)
        position += _HEAD.size
        start = position + described
        end = start + held
        records = bytes(payload[position:start])
        layout = _layouts.get(records) or _layout_of(records)
        if end > len(payload) or len(layout.tensors) != count or layout.held != held:
            raise ProtocolError("damaged tensor table: its lengths are wrong")
        # One copy; the tensors share and own it.
        data = bytearray(payload[start:end])
        for like, dtype, shape, numel, offset in layout.tensors:
            if like is not None:
                tensors.append(_from_numpy(_ndarray(shape, like, data, offset)))
            else:
                tensor = _frombuffer(data, dtype=dtype, count=numel, offset=offset)
                if len(shape) != 1:
                    tensor.resize_(shape)  # in place, so that it is not a view
                tensors.append(tensor)
    except _DAMAGES as error:
        raise ProtocolError(f"damaged tensor table: {error}") from error
    return tensors, layout.need_grad, end


def _layout_of(records: bytes) -> _Layout:
    tensors: list[tuple[Any, torch.dtype, tuple[int, ...], int, int]] = []
    need_grad: list[int] = []
    position = held = 0
    while position < len(records):
        ndim, code, requires_grad, *shape = _RECORDS[records[position]].unpack_from(
            records, position
        )
        position += 3 + 2 * ndim
        dtype = DTYPES[code]
        if dtype is None:
            raise ProtocolError(f"this build of torch has no {DTYPE_NAMES[code]}")
        if requires_grad:
            if not (dtype.is_floating_point or dtype.is_complex):
                raise ProtocolError(f"damaged tensor table: {dtype} has no gradients")
            need_grad.append(len(tensors))
        numel = prod(shape)
        # Numpy is slower for one dimension, and twice as fast for others.
        like = None if ndim == 1 else _LIKE[code]
        tensors.append((like, dtype, tuple(shape), numel, held))
        size = dtype.itemsize * numel
        held += size + (-size & ALIGNED)
    layout = _Layout(tuple(tensors), tuple(need_grad), held)
    if len(records) <= _LONGEST_KNOWN:
        _remember(_layouts, records, layout)
    return layout
