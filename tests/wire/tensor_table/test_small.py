"""The short way for a few small tensors: which messages take it, and what a damaged one does."""

from __future__ import annotations

import operator
import pickle
import random
from typing import Any

import pytest
import torch

from telegrad.errors import ProtocolError, SerializationError, TelegradError
from telegrad.wire.codec import Codec, Packet
from telegrad.wire.tensor_table import small
from telegrad.wire.tensor_table.layout import CODES, INLINE_LIMIT
from telegrad.wire.tensor_table.small import pack_small, unpack_small

LABELS = ("args", "kwargs")


def arguments(*args: Any, **kwargs: Any) -> Any:
    codec = Codec()
    encoded = codec.encode((args, kwargs or None), labels=LABELS)
    return encoded, codec.decode(encoded.payload, [bytearray(b) for b in encoded.buffers])


SHAPES = [(), (1,), (5,), (2, 3), (2, 1, 3), (1, 2, 1, 2, 1, 2, 1, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.complex64])
def test_small_tensors_travel_without_a_pickle(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
    encoded, (args, kwargs) = arguments(tensor, tensor.clone())
    assert encoded.payload[:1] == b"A"
    assert kwargs is None
    assert type(args) is tuple
    for arrived in args:
        assert arrived.dtype == dtype
        assert torch.equal(arrived, tensor)
        assert arrived.is_contiguous()
        assert not arrived._is_view()
    single = Codec().encode(tensor)
    assert single.payload[:1] == b"V"
    assert torch.equal(Codec().decode(single.payload), tensor)


@pytest.mark.parametrize("dtype", list(CODES), ids=str)
def test_every_dtype_fits(dtype: torch.dtype) -> None:
    tensor = torch.arange(48, dtype=torch.uint8).view(dtype)
    packed = pack_small([tensor])
    assert packed is not None
    (arrived,), need_grad, end = unpack_small(memoryview(packed[0]), 0)
    assert arrived.dtype == dtype
    assert end == len(packed[0])
    assert not need_grad
    assert bytes(arrived.view(torch.uint8).tolist()) == bytes(range(48))


def test_tensors_are_their_own_and_can_be_changed() -> None:
    _, ((first, second), _) = arguments(torch.zeros(3), torch.ones(5))
    first += 7
    assert torch.equal(second, torch.ones(5))
    assert second.data_ptr() % 16 == 0


def test_what_requires_grad_is_told() -> None:
    leaf = torch.ones(2, requires_grad=True)
    encoded, ((first, second), _) = arguments(leaf, torch.ones(3))
    assert encoded.tensors[0] is leaf
    assert first.requires_grad
    assert first.is_leaf
    assert not second.requires_grad


BASE = torch.arange(12.0)
OTHERS = {
    "the same twice": (BASE, BASE),
    "overlapping": (BASE[:6], BASE[3:9]),
    "with holes": (BASE[::2],),
    "empty": (torch.empty(0),),
    "large": (torch.zeros(INLINE_LIMIT),),
    "a parameter": (torch.nn.Parameter(torch.ones(2)),),
    "sparse": (torch.eye(2).to_sparse(),),
    "many dimensions": (torch.ones([1] * 9),),
    "conjugated": (torch.ones(2, dtype=torch.complex64).conj(),),
    "negated": (torch._neg_view(torch.ones(2)),),
    "lazily zero": (torch._efficientzerotensor((3,)),),
    "something else": (torch.ones(2), [3]),
    "of a type of its own": (torch.ones(2), torch.float64),
    "too many": torch.ones(0x10000).split(1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_takes_the_long_way(name: str) -> None:
    args = OTHERS[name]
    encoded, (arrived, kwargs) = arguments(*args)
    assert encoded.payload[:1] not in (b"A", b"M")
    assert kwargs is None
    assert len(arrived) == len(args)
    for there, here in zip(arrived, args, strict=True):
        if isinstance(here, torch.Tensor):
            assert torch.equal(there.to_dense(), here.to_dense())
        else:
            assert there == here
    if name == "the same twice":
        assert arrived[0] is arrived[1]


MIXED = {
    "a number first": (3, torch.arange(2.0)),
    "a number last": (torch.arange(2.0), 3),
    "of every type": (None, True, 2, 2.5, "text", b"bytes", torch.arange(2.0), 1 << 100),
    "no tensor": (1, "two"),
    "nothing twice": (None, None),
    "gradients": (torch.arange(2.0, requires_grad=True), 1, torch.arange(3)),
}


@pytest.mark.parametrize("name", MIXED)
def test_simple_values_travel_between_small_tensors(name: str) -> None:
    args = MIXED[name]
    encoded, (arrived, kwargs) = arguments(*args)
    assert encoded.payload[:1] == b"M"
    assert kwargs is None
    assert type(arrived) is tuple
    for there, here in zip(arrived, args, strict=True):
        assert type(there) is type(here)
        if isinstance(here, torch.Tensor):
            assert torch.equal(there, here)
            assert there.requires_grad == here.requires_grad
        else:
            assert there == here
    wanted = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    assert len(encoded.tensors) == len(wanted)
    assert all(map(operator.is_, encoded.tensors, wanted))


def test_tensors_without_a_place_are_refused() -> None:
    payload = arguments(1, torch.ones(2))[0].payload
    without = arguments(1, 2)[0].payload
    table = len(without) - len(pickle.dumps([(1,), (2,)], 5))
    stream = without[table:]
    with pytest.raises(ProtocolError, match="more tensors than places"):
        Codec().decode(payload[: -len(pickle.dumps([(1,), None], 5))] + stream)


def test_tensors_with_attributes_keep_them() -> None:
    tensor = torch.ones(2)
    tensor.note = "mine"  # type: ignore[attr-defined]
    _, ((arrived,), _) = arguments(tensor)
    assert arrived.note == "mine"


def test_gradients_that_share_memory_become_separate() -> None:
    codec = Codec()
    encoded = codec.encode(Packet(b"head", [BASE, BASE]))
    assert encoded.payload[9:10] == b"L"
    first, second = codec.decode(encoded.payload).tensors
    assert torch.equal(first, second)
    first += 1
    assert torch.equal(second, BASE)


def test_bytes_travel_as_they_are() -> None:
    codec = Codec()
    for value in (b"", b"some", bytes(100_000)):
        encoded = codec.encode(value)
        assert len(encoded.payload) == len(value) + 1
        assert codec.decode(encoded.payload) == value


def test_values_around_small_tensors() -> None:
    codec = Codec()
    tensor = torch.arange(3.0)
    encoded = codec.encode({"a": [tensor, 2], "b": (tensor, None)})
    assert encoded.payload[:1] == b"S"
    value = codec.decode(encoded.payload)
    assert torch.equal(value["a"][0], tensor)
    assert value["a"][0] is value["b"][0]


def messages() -> list[bytes]:
    codec = Codec()
    tensors = (torch.arange(3.0, requires_grad=True), torch.arange(6).reshape(2, 3))
    return [
        codec.encode((tensors, None), labels=LABELS).payload,
        codec.encode(((7, *tensors), None), labels=LABELS).payload,
        codec.encode(tensors[0]).payload,
        codec.encode([*tensors, 5]).payload,
        codec.encode(Packet(b"head", list(tensors))).payload,
    ]


def test_cut_off_messages_are_refused() -> None:
    codec = Codec()
    for payload in messages():
        for end in range(1, len(payload)):
            with pytest.raises(TelegradError):
                codec.decode(payload[:end])


def test_damaged_messages_are_refused_or_harmless() -> None:
    codec = Codec()
    dice = random.Random(3)
    refused = 0
    for payload in messages():
        table = 1 if payload[:1] != b"P" else 10
        end = unpack_small(memoryview(payload), table)[2]  # a pickle behind it is trusted
        for _ in range(3000):
            damaged = bytearray(payload)
            for _ in range(dice.randint(1, 3)):
                damaged[dice.randrange(table, end)] = dice.randrange(256)
            try:
                codec.decode(damaged)
            except TelegradError:
                refused += 1
    assert refused > 3000


def test_trailing_bytes_are_refused() -> None:
    codec = Codec()
    for payload in messages():
        if payload[:1] not in (b"S", b"M"):  # a pickle ends where it says
            with pytest.raises(ProtocolError):
                codec.decode(payload + b"x")


def test_bytes_between_the_tensors_and_the_end_are_refused() -> None:
    packed = pack_small([torch.ones(4)])
    assert packed is not None
    damaged = bytearray(packed[0] + bytes(16))
    damaged[6] += 16  # the length of the data
    with pytest.raises(ProtocolError, match="lengths are wrong"):
        unpack_small(memoryview(damaged), 0)


def test_an_integer_that_wants_a_gradient_is_refused() -> None:
    packed = pack_small([torch.ones(2, dtype=torch.int64)])
    assert packed is not None
    damaged = bytearray(packed[0])
    damaged[12] = 1
    with pytest.raises(ProtocolError, match="has no gradients"):
        unpack_small(memoryview(damaged), 0)


def test_a_tensor_inside_of_a_transform_is_refused_by_its_place() -> None:
    def send(tensor: torch.Tensor) -> torch.Tensor:
        Codec().encode(((1, tensor), None), labels=LABELS)
        return tensor.sum()

    with pytest.raises(SerializationError, match=r"args\[1\]"):
        torch.func.grad(send)(torch.ones(3))


def test_tables_of_more_shapes_than_are_remembered() -> None:
    for rows in range(1, 1500):
        tensor = torch.full((rows, 1), float(rows), requires_grad=bool(rows & 1))
        packed = pack_small([tensor])
        assert packed is not None
        (arrived,), need_grad, _ = unpack_small(memoryview(packed[0]), 0)
        assert torch.equal(arrived, tensor)
        assert bool(need_grad) == tensor.requires_grad
    assert len(small._descriptions) <= small._MOST_KNOWN
    assert len(small._layouts) <= small._MOST_KNOWN


@pytest.mark.parametrize("length", [1, 15, 16, 1023, 1024, 1025, 16383])
def test_every_byte_comes_as_it_went(length: int) -> None:
    tensor = (torch.arange(length) * 7 % 251).to(torch.uint8)
    codec = Codec()
    for value in (tensor, [tensor, tensor.flip(0)]):
        encoded = codec.encode(value)
        came = codec.decode(encoded.payload, encoded.buffers)
        if isinstance(value, list):
            assert all(map(torch.equal, came, value))
        else:
            assert torch.equal(came, value)
