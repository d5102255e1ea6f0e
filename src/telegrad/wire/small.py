"""A few small tensors, the short way.

Most messages of a training step hold one or two small tensors and little else. What counts there is
not bytes but steps, so these have a table of their own, which can say less and is written and read
in one loop::

    head     count, length of the records, length of the data
    records  for each tensor: number of dimensions, dtype, whether it requires grad, sizes
    data     the tensors' bytes, each padded to 16

It has room for dense CPU tensors that share no memory. Whatever else is in a message makes it use
the table of `tensors`; so does a tensor that is better sent from where it is.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from telegrad.errors import ProtocolError
from telegrad.wire.tensors import ALIGNED, CODES, DTYPE_NAMES, DTYPES, INLINE_LIMIT, is_leaf

__all__ = ["bytes_at", "pack_small", "unpack_small"]

_HEAD: Final = struct.Struct("<BHI")
_RECORDS: Final = tuple(struct.Struct(f"<BBB{n}H") for n in range(9))
_MOST: Final = 255
_DAMAGES: Final = (
    struct.error,
    ValueError,
    TypeError,
    RuntimeError,
    IndexError,
    OverflowError,
)
_LIKE: Final = tuple(getattr(np, name, None) and np.dtype(name) for name in DTYPE_NAMES)
"""Numpy's names of what it has too."""
_PADDING: Final = tuple(bytes(n) for n in range(ALIGNED + 1))
_strided = torch.strided
_ndarray = np.ndarray
_from_numpy = torch.from_numpy

_bytes_from = ctypes.pythonapi.PyBytes_FromStringAndSize
bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ctypes.cast(_bytes_from, ctypes.c_void_p).value or 0
)
"""A copy of so many bytes at an address. `ctypes.string_at`, without what that adds."""


def pack_small(
    tensors: Sequence[object], *, may_overlap: bool = False
) -> tuple[bytes, list[Tensor]] | None:
    """The table of `tensors`, and those of them that require grad; None if they do not fit.

    Args:
        may_overlap: those that share memory, also with themselves, may become separate ones.
    """
    if forward_ad._current_level >= 0:  # there may be dual tensors, which have to be refused
        return None
    records: list[bytes] = []
    data: list[bytes] = []
    grads: list[Tensor] = []
    regions: list[tuple[int, int]] = []
    for tensor in tensors:
        if (
            type(tensor) is not Tensor
            or tensor.layout is not _strided
            or not tensor.is_cpu
            or tensor.is_nested
        ):
            return None
        times = 1
        size = tensor.nbytes
        if not tensor.is_contiguous():
            if not may_overlap or size >= INLINE_LIMIT:
                return None
            if any(tensor.stride()):
                tensor = tensor.contiguous()
            else:
                times = tensor.numel()  # one number, expanded, as the gradient of a sum is
        code = CODES.get(tensor.dtype)
        if not 0 < size < INLINE_LIMIT or code is None or tensor.__dict__:
            return None
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # inside of a transform of torch.func, say: the long way tells of it
            return None
        shape = tensor.shape
        ndim = len(shape)
        if not address or ndim > 8 or tensor.is_neg() or tensor.is_conj():
            return None
        if tensor.requires_grad and (is_grad_enabled() or is_leaf(tensor)):  # `keeps_grad`
            grads.append(tensor)
            records.append(_RECORDS[ndim].pack(ndim, code, 1, *shape))
        else:
            records.append(_RECORDS[ndim].pack(ndim, code, 0, *shape))
        data.append(
            bytes_at(address, size) if times == 1 else bytes_at(address, size // times) * times
        )
        if size & ALIGNED:
            data.append(_PADDING[-size & ALIGNED])
        if not may_overlap:
            regions.append((address, address + size))
    count = len(records)
    if count > 1:
        if count > _MOST or not _are_separate(regions):
            return None
        described, held = b"".join(records), b"".join(data)
    elif count:
        described, held = records[0], b"".join(data)
    else:
        described = held = b""
    return _HEAD.pack(count, len(described), len(held)) + described + held, grads


def _are_separate(regions: list[tuple[int, int]]) -> bool:
    regions.sort()
    end = 0
    for first, after in regions:
        if first < end:
            return False
        end = after
    return True


def unpack_small(payload: memoryview, position: int) -> tuple[list[Any], list[int], int]:
    """Reads a table.

    Returns:
        The tensors, the numbers of those that required grad on the sender, which they do not yet,
        and where the table ends.

    Raises:
        ProtocolError: it is damaged.
    """
    tensors: list[Any] = []
    need_grad: list[int] = []
    try:
        count, described, held = _HEAD.unpack_from(payload, position)
        position += _HEAD.size
        start = position + described
        end = start + held
        if end > len(payload):
            raise ProtocolError("damaged tensor table: it is longer than its message")
        # One copy out of the payload; the tensors share and own it.
        data = bytearray(payload[start:end])
        offset = 0
        for number in range(count):
            ndim, code, requires_grad, *shape = _RECORDS[payload[position]].unpack_from(
                payload, position
            )
            position += 3 + 2 * ndim
            dtype = DTYPES[code]
            if dtype is None:
                raise ProtocolError(f"this build of torch has no {DTYPE_NAMES[code]}")
            like = _LIKE[code]
            if like is not None:  # by way of numpy it takes half as long, and is not a view either
                array = _ndarray(shape, like, data, offset)
                tensor = _from_numpy(array)
                size = array.nbytes
            else:
                tensor = torch.frombuffer(data, dtype=dtype, count=prod(shape), offset=offset)
                tensor.resize_(shape)  # in place, so that it is not a view
                size = tensor.nbytes
            offset += size + (-size & ALIGNED)
            if requires_grad:
                if not (dtype.is_floating_point or dtype.is_complex):
                    raise ProtocolError(f"damaged tensor table: {dtype} has no gradients")
                need_grad.append(number)
            tensors.append(tensor)
    except _DAMAGES as error:
        raise ProtocolError(f"damaged tensor table: {error}") from error
    if position != start or offset != held:
        raise ProtocolError("damaged tensor table: its lengths are wrong")
    return tensors, need_grad, end
