"""Exceptions that raise when they are looked at: whoever waits hears of them all the same."""

from __future__ import annotations

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.errors import BackwardError, RemoteError, TelegradError, WorkerLost
from telegrad.rpc.calls.outcome import (
    as_exception,
    pack_failure,
    rebuild_failure,
    text_of,
    traceback_of,
)
from telegrad.rpc.group import current
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.testing.cluster import cluster
from telegrad.wire.codec import Codec


class Speechless(Exception):
    def __str__(self):
        raise AttributeError("its message needs what is not there")


class Interrupting(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    def __reduce__(self):
        raise SystemExit


class Classless(Exception):
    @property
    def __class__(self):
        raise RuntimeError("no class")


class Exiting(BaseException):
    def __str__(self):
        raise SystemExit


KINDS = [Speechless, Interrupting, Classless, Exiting]
HERE = WorkerInfo("here", 0)


def throw(kind):
    raise kind


class Thrower(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kind):
        ctx.kind = kind
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.kind


def throwing_backward(x, number):
    return Thrower.apply(x, KINDS[number])


def fail_without_an_answer():
    def fail(*parts):
        raise MemoryError

    current.current().agent.service.answer_failure = fail
    raise ValueError


@pytest.fixture(scope="module")
def group():
    with cluster(2, rpc_timeout=0) as running:  # what is not answered is waited for for ever
        yield running


def raised(kind):
    try:
        throw(kind)
    except BaseException as error:
        return error


@pytest.mark.parametrize("kind", KINDS)
def test_each_can_be_described_and_packed(kind):
    error = raised(kind)
    assert text_of(error) in ("<its message could not be made>", "")
    shown = traceback_of(error)
    assert "in raised" in shown
    assert kind.__name__ in shown.splitlines()[-1]
    codec = Codec()
    failure = codec.decode(pack_failure(codec, error, HERE).payload)
    assert failure.type_name.endswith(kind.__name__)
    assert type(rebuild_failure(codec, failure)) in (RemoteError, Speechless)
    kept = as_exception(error)
    assert kept is error if kind in (Speechless, Interrupting) else kind.__name__ in str(kept)


def test_what_cannot_be_packed_at_all_is_named():
    class Codec2(Codec):
        is_first = True

        def encode(self, *args, **options):
            if self.is_first:
                self.is_first = False
                raise MemoryError
            return super().encode(*args, **options)

    class Unnamed(torch.jit.Error):
        pass

    codec = Codec2()
    failure = codec.decode(pack_failure(codec, Unnamed("words"), HERE).payload)
    assert failure.type_name.endswith("Unnamed")
    assert failure.text == "<it cannot be described: MemoryError>"


def test_a_call_that_cannot_even_be_answered_ends():  # before there is a group for the others
    for call in (rpc.rpc_sync, lambda to, function: rpc.rpc_async(to, function).wait()):
        with cluster(2, graceful=False, rpc_timeout=0):
            with pytest.raises(WorkerLost):
                call("worker1", fail_without_an_answer)


@pytest.mark.parametrize("kind", KINDS)
def test_callers_hear_of_it(group, kind):
    for call in (
        lambda: rpc.rpc_sync("worker1", throw, (kind,)),
        lambda: rpc.rpc_async("worker1", throw, (kind,)).wait(),
        lambda: rpc.remote("worker1", throw, (kind,)).to_here(),
    ):
        with pytest.raises((TelegradError, Speechless)):
            call()
    assert rpc.rpc_sync("worker1", torch.add, (torch.ones(1), 1)).item() == 2


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_a_pass_ends_by_it(group, number):
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", throwing_backward, (x, number)).sum()
        with pytest.raises(BackwardError, match="Error on Node 1: "):
            autograd.backward(context_id, [loss])
    assert rpc.rpc_sync("worker1", autograd._get_debug_info)["num_current_backward_passes"] == 0
