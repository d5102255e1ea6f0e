"""Packets: tensors behind a head of bytes, without a pickle if all of them are small."""

from __future__ import annotations

import pytest
import torch

from telegrad.errors import ProtocolError, SerializationError, TelegradError
from telegrad.wire.codec import Codec, Packet, head_of_packet
from telegrad.wire.frames import Limits


def sent(packet, codec=None):
    codec = codec or Codec()
    encoded = codec.encode(packet)
    return codec.decode(encoded.payload, [bytearray(buffer) for buffer in encoded.buffers])


TENSORS = {
    "none": [],
    "small": [torch.arange(3.0), torch.ones(2, 2, dtype=torch.float64)],
    "large": [torch.arange(10000.0), torch.arange(3)],
    "no numbers": [torch.empty(0, 3)],
    "a view": [torch.arange(12.0).view(3, 4).t()],
    "the same memory twice": [base := torch.arange(6.0), base[2:]],
}


@pytest.mark.parametrize("name", TENSORS)
def test_plain_tensors_come_as_they_are(name):
    came = sent(Packet(b"head", list(TENSORS[name])))
    assert bytes(came.head) == b"head"
    assert len(came.tensors) == len(TENSORS[name])
    for got, wanted in zip(came.tensors, TENSORS[name], strict=True):
        assert torch.equal(got, wanted)
        assert got.dtype == wanted.dtype


def test_small_tensors_need_no_pickle(monkeypatch):
    monkeypatch.setattr("telegrad.wire.codec._loads", None)
    for name in ("none", "small", "a view", "the same memory twice"):
        assert len(sent(Packet(b"head", list(TENSORS[name]))).tensors) == len(TENSORS[name])


def test_other_tensors_come_too():
    sparse = torch.eye(3).to_sparse()
    came = sent(Packet(b"", [sparse, torch.ones(2)]))
    assert came.tensors[0].layout is torch.sparse_coo
    assert torch.equal(came.tensors[0].to_dense(), torch.eye(3))
    assert torch.equal(came.tensors[1], torch.ones(2))


def test_one_that_is_too_large_is_refused():
    codec = Codec()
    codec.limits = Limits(max_body=1000)
    with pytest.raises(SerializationError, match="gradients are too large to send"):
        codec.encode(Packet(bytes(2000), [torch.ones(2)]))
    codec.limits = Limits(max_message=1000)
    with pytest.raises(SerializationError, match="gradients are too large to send"):
        codec.encode(Packet(b"", [torch.ones(10_000)]))


@pytest.mark.parametrize("tensors", [TENSORS["small"], [torch.eye(2).to_sparse()]])
def test_a_damaged_one_is_an_error_wherever_it_is_cut(tensors):
    codec = Codec()
    payload = codec.encode(Packet(b"a head", list(tensors))).payload
    for end in range(1, len(payload)):
        with pytest.raises(TelegradError):
            codec.decode(payload[:end])
    with pytest.raises(TelegradError):
        codec.decode(payload[:1] + b"\xff\xff\xff\xff" + payload[5:])


def test_nothing_may_follow_the_tensors():
    codec = Codec()
    with pytest.raises(ProtocolError, match="longer than its tensors"):
        codec.decode(codec.encode(Packet(b"", [torch.ones(1)])).payload + b"x")


def test_nothing_but_tensors_may_be_in_it():
    codec = Codec()
    start = codec.encode(Packet(b"", [])).payload[:5]
    for value in ([1], torch.ones(2), Packet(b"", [torch.ones(2)])):
        with pytest.raises(ProtocolError, match="something else"):
            codec.decode(start + codec.encode(value).payload)


def test_the_head_can_be_read_though_the_tensors_cannot():
    payload = Codec().encode(Packet(b"a head", [torch.ones(4)])).payload
    assert bytes(head_of_packet(payload[:20])) == b"a head"
    with pytest.raises(ProtocolError):
        head_of_packet(payload[:8])


def test_a_large_gradient_that_is_one_number_is_sent_as_one():
    expanded = torch.tensor(3.0).expand(1000, 5000)
    codec = Codec()
    encoded = codec.encode(Packet(b"head", [expanded]))
    assert not encoded.buffers
    assert len(encoded.payload) < 200
    (came,) = codec.decode(encoded.payload).tensors
    assert came.stride() == (0, 0)
    assert torch.equal(came, expanded)


def test_a_small_gradient_with_holes_takes_the_short_way():
    transposed = torch.arange(6.0).reshape(2, 3).t()
    codec = Codec()
    expanded = torch.arange(3.0).expand(2, 3)
    encoded = codec.encode(Packet(b"head", [transposed, transposed[:, :1], expanded]))
    assert encoded.payload[9:10] == b"L"
    first, second, third = codec.decode(encoded.payload).tensors
    assert torch.equal(first, transposed)
    assert torch.equal(second, transposed[:, :1])
    assert torch.equal(third, expanded)


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("beside", [[], [torch.eye(2).to_sparse()]], ids=["alone", "beside sparse"])
def test_what_shares_memory_arrives_apart(size, beside):
    whole = torch.zeros(size)
    came = sent(Packet(b"", [whole, whole.view(2, -1), whole[1:], *beside])).tensors
    came[0].fill_(1)
    assert not came[1].any()
    assert not came[2].any()
