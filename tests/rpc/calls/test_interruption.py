"""Ends of waits in a conversation: by what is waited for, by another thread, by Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import threading

import torch

from interrupting import CtrlC
from telegrad.errors import WorkerLost
from telegrad.rpc.connections.conversation import Conversation, Interruption
from telegrad.transport.base import ConnectionClosed
from telegrad.wire.codec import Codec
from telegrad.wire.frames import Frame, Kind

PATIENCE = 20.0


@contextlib.contextmanager
def pipe():
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def descriptors():
    return set(os.listdir("/proc/self/fd"))


def test_a_wait_ends_when_there_is_something_to_read():
    with pipe() as (reader, writer), contextlib.closing(Interruption()) as interruption:
        os.write(writer, b"x")
        assert interruption.wait_for(reader)
        assert interruption.wait_for(reader)


def test_an_interruption_ends_a_wait_before_it_begins_and_meanwhile():
    for interrupts_before in (True, False):
        with pipe() as (reader, _), contextlib.closing(Interruption()) as interruption:
            helper = threading.Timer(0.0 if interrupts_before else 0.05, interruption.interrupt)
            helper.start()
            if interrupts_before:
                helper.join(PATIENCE)
            assert not interruption.wait_for(reader)
            helper.join(PATIENCE)


def test_after_the_end_an_interruption_does_nothing():
    interruption = Interruption()
    with pipe() as (reader, writer):
        os.write(writer, b"x")
        interruption.wait_for(reader)
        interruption.close()
        interruption.interrupt()
        interruption.close()


def test_ctrl_c_at_any_step_loses_no_descriptor():
    step = interrupted = 0
    before = descriptors()
    with pipe() as (reader, writer):
        os.write(writer, b"x")
        with_pipe = descriptors()
        while step == interrupted:
            step += 1
            interruption = Interruption()
            with CtrlC({Interruption.wait_for.__code__: None}, step):
                try:
                    interruption.wait_for(reader)
                except KeyboardInterrupt:
                    interrupted += 1
            interruption.close()
            assert descriptors() == with_pipe, step
    assert interrupted >= 10
    assert descriptors() == before


def test_what_was_taken_along_is_posted_if_the_lane_is_broken():
    posted = []

    def send(*_):
        raise ConnectionClosed("broken")

    def post(kind, payload):
        posted.append((kind, payload))

    request = Frame(Kind.GRADIENTS, 0, 7, -1, -1, b"")
    conversation = Conversation(1, request, send, post)
    message = Codec().encode("gradients")
    large = Codec().encode(torch.zeros(1 << 16))
    assert large.buffers
    assert conversation.take(Kind.GRADIENTS, message)
    assert not conversation.take(Kind.GRADIENTS, large)  # it travels by itself
    conversation.end()
    assert posted == [(Kind.GRADIENTS, message.payload)]
    assert not conversation.take(Kind.GRADIENTS, message)  # it is over
    conversation.end()
    assert len(posted) == 1


def test_a_conversation_with_a_worker_that_is_lost_ends_quietly():
    """Whoever ends it may have work of others in hand."""
    tried = []

    def send(*_):
        raise ConnectionClosed("broken")

    def post(kind, payload):
        tried.append(kind)
        raise WorkerLost("it is gone", worker="worker1", reason="killed")

    conversation = Conversation(1, Frame(Kind.GRADIENTS, 0, 7, -1, -1, b""), send, post)
    for _ in range(2):
        assert conversation.take(Kind.GRADIENTS, Codec().encode("gradients"))
    conversation.end()
    assert tried == [Kind.GRADIENTS]
