"""Ctrl-C while a call is packed, connects or is sent: references in it end. Real processes."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time

import pytest
import torch

from interrupting import CtrlC
from telegrad import rpc
from telegrad.errors import RRefError
from telegrad.locks import Turns
from telegrad.rpc.calls.agent import Agent
from telegrad.rpc.calls.async_call import AsyncCalls
from telegrad.rpc.connections.requests import Requests
from telegrad.rpc.group import current
from telegrad.rpc.references.fetch import RemoteReferences
from telegrad.rpc.references.in_messages import PackedReferences, ReferenceCodec
from telegrad.rpc.references.steps import Steps
from telegrad.rpc.references.table import RRefTable
from telegrad.testing.cluster import cluster
from telegrad.wire.codec import Codec

PATIENCE = 20.0


@pytest.fixture
def group():
    with cluster(2) as running:
        yield running


def first_of(*args):
    return 1


CALLS = {
    "rpc_sync": rpc.rpc_sync,
    "rpc_async": rpc.rpc_async,
    "remote": rpc.remote,
}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


class Interrupts:
    """Something whose packing the user interrupts."""

    def __reduce__(self):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")


@contextlib.contextmanager
def interrupted_soon():
    """Ctrl-C a while after the block has begun, which must be in the middle of waiting."""
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        timer.cancel()
        timer.join()


def wait_until_none_is_open():
    table = current.current().references.table
    end = time.monotonic() + PATIENCE
    while True:
        gc.collect()
        open_ones = {name: int(count) for name, count in table.debug_info().items()}
        if not any(open_ones.values()):
            return
        assert time.monotonic() < end, open_ones
        time.sleep(0.02)


def test_while_it_is_packed(group, call):
    value = rpc.RRef(torch.ones(2))
    with pytest.raises(KeyboardInterrupt):
        call("worker1", first_of, (value, Interrupts()))
    del value
    wait_until_none_is_open()
    assert rpc.rpc_sync("worker1", first_of) == 1


def test_at_any_step_of_making_a_reference(group):
    steps = {RRefTable.new_user.__code__: None, Steps.apply_soon.__code__: None}
    table = current.current().references.table
    interrupted = 0
    while True:
        try:
            with CtrlC(steps, interrupted + 1):
                _, fork, rref = table.new_user(1)
            break
        except KeyboardInterrupt:
            interrupted += 1
            wait_until_none_is_open()
    assert interrupted >= 10
    table.creation_failed(fork, RRefError("that was all"))
    del rref
    wait_until_none_is_open()


def test_while_it_connects(group, call):
    value = rpc.RRef(torch.ones(2))
    group.pause("worker1")
    with interrupted_soon():
        call("worker1", first_of, (value,))
    group.resume("worker1")
    del value
    wait_until_none_is_open()
    assert rpc.rpc_sync("worker1", first_of) == 1


def test_while_it_is_sent(call):
    # By a socket: shared memory would take it all at once.
    with cluster(2, shared_memory=False) as group:
        value = rpc.RRef(torch.ones(2))
        assert rpc.rpc_sync("worker1", first_of) == 1
        rpc.rpc_async("worker1", first_of).wait()
        group.pause("worker1")
        with interrupted_soon():
            call("worker1", first_of, (torch.zeros(1 << 24), value))
        group.resume("worker1")
        del value
        wait_until_none_is_open()
        assert rpc.rpc_sync("worker1", first_of) == 1


STEPS_OF_A_CALL = {
    function.__code__: None
    for function in (
        ReferenceCodec._reduce,
        RRefTable.fork,
        RRefTable.reduce,
        Steps.apply_soon,
        Turns.leave,
        PackedReferences.__init__,
        PackedReferences.leave,
        PackedReferences.abandon,
        ReferenceCodec._encode_any,
        ReferenceCodec.packed.fget,
        Codec._encode_any,
        Agent.call,
        Agent.call_async,
        AsyncCalls.send,
        Agent.pack_call,
        Agent.take_back_if_unread,
        Requests.exchange,
        RemoteReferences.remote,
        RemoteReferences._send,
    )
}


# A connection that was just opened or taken stays with nobody, and Python complains at the end.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_at_any_step_of_a_call_that_passes_a_reference(group, call):
    """The reference can be used afterwards, and none is left at the end."""
    own, other = rpc.RRef(torch.ones(2)), rpc.remote("worker1", torch.ones, (2,))
    interrupted = 0
    while True:
        try:
            with CtrlC(STEPS_OF_A_CALL, interrupted + 1):
                call("worker1", first_of, (own, other))
            break
        except KeyboardInterrupt:
            interrupted += 1
        if interrupted % 10 == 0:
            assert rpc.rpc_sync("worker1", first_of, (own, other)) == 1
    assert interrupted >= 50
    assert other.to_here().tolist() == [1, 1]
    del own, other
    wait_until_none_is_open()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_an_interrupted_call_was_about_to_pass_does_not_delay_the_end():
    """Though the program keeps the KeyboardInterrupt, and with it the call."""
    with cluster(2):
        other = rpc.remote("worker1", torch.ones, (2,))
        assert other.to_here().tolist() == [1, 1]
        lines = {Agent.call.__code__: None}
        kept = []
        for step in range(1, 30):
            try:
                with CtrlC(lines, step):
                    rpc.rpc_sync("worker1", first_of, (other,))
            except KeyboardInterrupt as error:
                kept.append(error)
        assert len(kept) >= 5
        begun_at = time.monotonic()
    assert time.monotonic() - begun_at < PATIENCE


@pytest.mark.parametrize("shared_memory", [True, False])
def test_while_the_worker_has_not_read_it(shared_memory):
    """It has to arrive all the same: only whoever unpacks a reference can end it."""
    with cluster(2, shared_memory=shared_memory) as group:
        value = rpc.RRef(torch.ones(2))
        for _ in range(5):
            assert rpc.rpc_sync("worker1", first_of) == 1
            group.pause("worker1")
            with interrupted_soon():
                rpc.rpc_sync("worker1", first_of, (value,))
            group.resume("worker1")
        del value
        wait_until_none_is_open()
        assert rpc.rpc_sync("worker1", first_of) == 1
