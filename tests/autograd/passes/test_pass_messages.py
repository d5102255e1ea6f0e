"""Gradients on the wire: every field comes as it went, and damage is an error."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad.autograd.passes.messages import GradientMessage
from telegrad.autograd.passes.protocol import Standing
from telegrad.errors import ProtocolError
from telegrad.wire.codec import Codec, Packet

IDS = st.integers(0, 2**64 - 1)
CREDITS = st.one_of(st.just(1), st.fractions(0, 1).filter(bool))
REPORTS = st.dictionaries(
    st.integers(0, 2**16 - 1),
    st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(Standing)),
    max_size=5,
)
MESSAGES = st.builds(
    GradientMessage,
    context_id=IDS,
    pass_id=IDS,
    message_id=IDS,
    retain_graph=st.booleans(),
    create_graph=st.booleans(),
    credit=CREDITS,
    reports=REPORTS,
    gradients=st.lists(
        st.one_of(st.none(), st.integers(1, 4).map(torch.ones)), min_size=1, max_size=20
    ),
    history=st.tuples(IDS, st.lists(st.integers(0, 5)).map(tuple)),
)


def sent(packet):
    codec = Codec()
    return codec.decode(codec.encode(packet).payload)


@given(message=MESSAGES)
def test_every_field_comes_as_it_went(message):
    came = GradientMessage.unpack(sent(message.pack()))
    if not message.create_graph and message.credit == 1:
        message.history = (-1, ())  # needs no place then
    for field in GradientMessage.__dataclass_fields__.keys() - {"gradients"}:
        assert getattr(came, field) == getattr(message, field), field
    assert len(came.gradients) == len(message.gradients)
    for got, wanted in zip(came.gradients, message.gradients, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or torch.equal(got, wanted)


@given(message=MESSAGES)
def test_its_pass_is_known_though_its_tensors_cannot_be_read(message):
    payload = Codec().encode(message.pack()).payload
    assert GradientMessage.pass_of(payload[:-1]) == (message.context_id, message.pass_id)


def an_example():
    return GradientMessage(
        1, 2, 3, False, True, Fraction(1, 3), {0: (1, Standing.OPEN)}, [None, torch.ones(2)]
    ).pack()


def test_a_head_that_is_cut_anywhere_is_an_error():
    whole = bytes(an_example().head)
    for end in range(len(whole)):
        with pytest.raises(ProtocolError, match="damaged gradient message"):
            GradientMessage.unpack(Packet(whole[:end], [torch.ones(2)]))


@pytest.mark.parametrize("tensors", [0, 2])
def test_so_is_a_wrong_number_of_tensors(tensors):
    with pytest.raises(ProtocolError, match="damaged gradient message"):
        GradientMessage.unpack(Packet(an_example().head, [torch.ones(2)] * tensors))
    plain = GradientMessage(1, 2, 3, False, False, 1, {}, [torch.ones(2)]).pack()
    with pytest.raises(ProtocolError, match="damaged gradient message"):
        GradientMessage.unpack(Packet(plain.head, [torch.ones(2)] * tensors))


def test_there_may_be_many_tensors_and_many_workers():
    reports = dict.fromkeys(range(1000), (1, Standing.OPEN))
    gradients = [torch.ones(1)] * 70_000
    message = GradientMessage(1, 2, 3, False, False, 1, reports, list(gradients))
    came = GradientMessage.unpack(message.pack())
    assert came.reports == reports
    assert len(came.gradients) == 70_000
