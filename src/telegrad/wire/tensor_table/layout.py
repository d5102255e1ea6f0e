"""The tensor table: how tensors travel beside the pickle stream.

A payload with tensors is::

    header | span sizes | bytes of the small spans | records | pickle stream

A *span* is a stretch of memory that is sent once, however many tensors lie in it (`aliases`). Small
spans travel in the payload itself; each of the others is a buffer of the message, sent from the
sender's memory and read into memory that the new tensors then use. A *record* describes one tensor:
its dtype, sizes and strides, its span and the offset in it. The record of a sparse tensor refers to
the records of its parts, and that of a view to the record of its root.

A table comes from the network. Each number in it is checked against the bytes that were received
before memory is accessed or allocated, and a wrong one is a `ProtocolError`. Both ends must be
little-endian, as all platforms of torch are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

INLINE_LIMIT: Final = 16 * 1024
"""Spans of fewer bytes travel in the payload.

A buffer beside the payload costs 7 µs (encoding, one more read, decoding), a span in the payload
two more copies of its bytes. Both take the same time at 64 KiB. The limit is well below that,
because all such spans of a message are one allocation, which the last of their tensors keeps.
"""

MAGIC: Final = 0x54  # "T"; a payload without tensors is a bare pickle, which begins with 0x80
VERSION: Final = 2
HEADER: Final = struct.Struct("<BBHIII")  # magic, version, 0, spans, records, inline bytes
RECORD: Final = struct.Struct("<BBBBIq")  # kind, code, flags, ndim, span/part/root, offset
RECORDS: Final = tuple(struct.Struct(f"<BBBBIq{n}q") for n in range(9))
SIZES: Final = tuple(struct.Struct(f"<{n}q") for n in range(17))

STRIDED, RAW, STORAGE, COO, COMPRESSED = range(5)

CONTIGUOUS = 1  # no strides follow the sizes
GRAD = 2  # required grad on the sender
SHARED = 4  # other records use the same span
CONJ = 8
NEG = 16
PART = 32  # belongs to another record, and is not a value
COALESCED = 64
VIEW = 128  # of another record, whose span it uses
UNUSUAL = SHARED | CONJ | NEG | VIEW

NO_SPAN: Final = 0xFFFFFFFF
ALIGNED: Final = 15

# The position is the code on the wire: append only. Names, because some builds lack some dtypes.
# fmt: off
DTYPE_NAMES: Final = (
    "float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64",
    "complex32", "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e5m2",
    "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "uint1", "uint2", "uint3", "uint4", "uint5",
    "uint6", "uint7", "int1", "int2", "int3", "int4", "int5", "int6", "int7", "bcomplex32",
)
# fmt: on
DTYPES: Final = tuple(getattr(torch, name, None) for name in DTYPE_NAMES)
CODES: Final[dict[torch.dtype, int]] = {d: i for i, d in enumerate(DTYPES) if d is not None}
ITEM_SIZES: Final = tuple(0 if dtype is None else dtype.itemsize for dtype in DTYPES)
COMPRESSED_LAYOUTS: Final = (
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)


def keeps_grad(tensor: Tensor) -> bool:
    """Whether a tensor requires grad on arrival: if it does here, unless gradients are off and it
    has a history."""
    return tensor.requires_grad and (torch.is_grad_enabled() or is_leaf(tensor))


def is_leaf(tensor: Tensor) -> bool:
    """`tensor.is_leaf` for a tensor that requires grad. For a view torch's own would take a mutex,
    which is not safe under the interpreter lock (see `message_nodes`)."""
    base = tensor._base if tensor._is_view() else None
    return (base is not None and not base.requires_grad) or tensor.is_leaf


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor can be an entry of the table unchanged."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.__dict__
        and tensor.dtype in CODES
        and not tensor.is_nested
        and not has_tangent(tensor)
    )


def has_tangent(tensor: Tensor) -> bool:
    """Whether the tensor is a dual tensor of forward-mode differentiation."""
    if forward_ad._current_level < 0:
        return False
    tangent: Tensor | None = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent is not None


@dataclass(slots=True)
class Part:
    """A tensor that is a part of a sparse one."""

    tensor: Tensor


@dataclass(slots=True)
class Sparse:
    """A sparse tensor, whose parts are the entries just before this one."""

    tensor: Tensor


@dataclass(slots=True)
class Whole:
    """A storage that is a value, as its bytes."""

    tensor: Tensor


Entry = Tensor | Part | Sparse | Whole | PickleBuffer
