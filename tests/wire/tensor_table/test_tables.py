"""A tensor table that lies gets an error: no crash, no foreign memory, no large allocation."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.errors import ProtocolError, SerializationError
from telegrad.wire.codec import Codec
from telegrad.wire.tensor_table.layout import (
    CODES,
    COMPRESSED,
    CONTIGUOUS,
    COO,
    GRAD,
    HEADER,
    MAGIC,
    PART,
    RAW,
    RECORD,
    SHARED,
    STORAGE,
    STRIDED,
    VERSION,
)
from telegrad.wire.tensor_table.unpack import unpack

codec = Codec()
FLOAT = CODES[torch.float32]
INT64 = CODES[torch.int64]


def table(*records: bytes, spans: tuple[int, ...] = (64,), inline: int = 64) -> memoryview:
    words = [size << 1 | 1 for size in spans]
    header = HEADER.pack(MAGIC, VERSION, 0, len(words), len(records), inline)
    return memoryview(
        header + struct.pack(f"<{len(words)}q", *words) + bytes(inline) + b"".join(records)
    )


def record(
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    *,
    kind: int = STRIDED,
    code: int = FLOAT,
    flags: int = 0,
    span: int = 0,
    offset: int = 0,
) -> bytes:
    if strides is None:
        flags |= CONTIGUOUS
    numbers = shape + (strides or ())
    head = RECORD.pack(kind, code, flags, len(shape), span, offset)
    return head + struct.pack(f"<{len(numbers)}q", *numbers)


def test_the_tables_made_here_are_good_ones() -> None:
    (tensor, view), position = unpack(
        table(record((4, 4)), record((2, 2), (1, 3), offset=16, flags=SHARED)), [], None
    )
    assert tensor.shape == (4, 4)
    assert view.stride() == (1, 3)
    assert position == 16 + 8 + 64 + 32 + 48


LIES = {
    "larger than its span": record((17,)),
    "two dimensions larger": record((4, 5)),
    "negative size": record((-1,)),
    "two negative sizes": record((-2, -2)),
    "negative size in a view": record((-2, -2), (1, 1)),
    "huge size": record((2**62,)),
    "sizes that overflow": record((2**33, 2**33)),
    "sizes that overflow to zero": record((2**32, 2**32)),
    "expanded to more than memory has": record((2**40, 2**40), (0, 0)),
    "huge but empty": record((0, 2**62, 2**62)),
    "stride beyond": record((2, 2), (16, 1)),
    "negative stride": record((2,), (-1,), offset=32),
    "huge stride": record((2, 2), (2**62, 2**62)),
    "offset beyond": record((4,), flags=SHARED, offset=52),
    "negative offset": record((4,), flags=SHARED, offset=-16),
    "offset of a dense tensor": record((4,), offset=16),
    "offset within an element": record((4,), flags=SHARED, offset=2),
    "unknown dtype": record((4,), code=250),
    "unknown kind": record((4,), kind=9),
    "no such span": record((4,), span=3),
    "integers that require grad": record((4,), code=INT64, flags=GRAD),
    "raw bytes that require grad": record((), kind=RAW, flags=GRAD),
    "a storage that requires grad": record((64,), kind=STORAGE, flags=GRAD),
    "storage beyond": record((65,), kind=STORAGE),
    "storage of two dimensions": record((2, 2), kind=STORAGE),
    "negative storage": record((-4,), kind=STORAGE),
    "sparse without parts": record((4,), kind=COO),
    "compressed without parts": record((4, 4), kind=COMPRESSED),
    "sparse of a storage": record((64,), kind=STORAGE) * 2 + record((4,), kind=COO),
    "strides missing": RECORD.pack(STRIDED, FLOAT, 0, 2, 0, 0) + struct.pack("<2q", 2, 2),
    "dimensions missing": RECORD.pack(STRIDED, FLOAT, 1, 255, 0, 0),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lying_record_is_a_protocol_error(lie: bytes) -> None:
    count = 3 if lie.startswith(record((64,), kind=STORAGE) * 2) else 1
    payload = bytearray(table(lie))
    struct.pack_into("<I", payload, 8, count)
    with pytest.raises(ProtocolError):
        unpack(memoryview(payload), [], None)


def test_sparse_indices_out_of_range_are_a_protocol_error() -> None:
    payload = bytearray(
        table(
            record((1, 2), code=INT64, flags=PART, span=0),
            record((2,), flags=PART, span=1),
            record((4,), kind=COO, span=0),
            spans=(16, 8),
            inline=32,
        )
    )
    unpack(memoryview(payload), [], None)
    struct.pack_into("<2q", payload, 32, 1, 10_000)
    with pytest.raises(ProtocolError, match="damaged tensor table"):
        unpack(memoryview(payload), [], None)


def test_lying_counts_and_spans_are_protocol_errors() -> None:
    good = bytes(table(record((4,))))
    for position, value in ((4, 2**32 - 1), (8, 2**32 - 1), (12, 2**32 - 1), (12, 32), (4, 9)):
        payload = bytearray(good)
        struct.pack_into("<I", payload, position, value)
        with pytest.raises(ProtocolError):
            unpack(memoryview(payload), [], None)
    for word in (-1, -2, 2**63 - 1, 66 << 1 | 1):
        payload = bytearray(good)
        struct.pack_into("<q", payload, 16, word)
        with pytest.raises(ProtocolError):
            unpack(memoryview(payload), [], None)
    with pytest.raises(ProtocolError, match="version"):
        unpack(memoryview(bytes([MAGIC, 99]) + good[2:]), [], None)


def test_buffers_missing_short_or_no_buffers_are_protocol_errors() -> None:
    message = codec.encode(torch.zeros(5000))
    for buffers in ([], [bytearray(100)], [bytearray()], [None]):
        with pytest.raises(ProtocolError):
            codec.decode(message.payload, buffers)
    assert codec.decode(message.payload, [bytearray(20_001)]).shape == (5000,)


def sample() -> bytes:
    base = torch.randn(3, 4)
    value: Any = [
        base,
        base.t(),
        base[1:, ::2],
        torch.ones(2, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.empty(0, 3),
        torch.arange(3).untyped_storage(),
    ]
    return codec.encode(value).payload


SAMPLE = sample()
_, TABLE_END = unpack(memoryview(SAMPLE), [], None)


def use(value: Any) -> None:
    """Touch all the memory that a decoded value claims to have."""
    for item in value:
        if isinstance(item, torch.UntypedStorage):
            bytes(item)
        elif isinstance(item, torch.Tensor) and item.numel() < 1_000_000:
            with contextlib.suppress(NotImplementedError):  # the odder dtypes know no operations
                item.detach().clone()


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_mutated_tables_give_errors_or_tensors_within_bounds(data: st.DataObject) -> None:
    payload = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(1, TABLE_END - 8))
        if data.draw(st.booleans()):
            payload[position] = data.draw(st.integers(0, 255))
        else:
            number = data.draw(st.integers(-(2**63), 2**63 - 1) | st.integers(-20, 200))
            struct.pack_into("<q", payload, max(position & ~7, 8), number)
    with contextlib.suppress(ProtocolError):
        values, _ = unpack(memoryview(payload), [], None)
        use(values)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(SAMPLE) - 1))
def test_cut_payloads_give_errors(length: int) -> None:
    with pytest.raises((ProtocolError, SerializationError)):
        codec.decode(SAMPLE[:length])


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_random_tables_give_errors_or_tensors_within_bounds(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        values, _ = unpack(memoryview(bytes([MAGIC, VERSION, 0, 0]) + data), [], None)
        use(values)
