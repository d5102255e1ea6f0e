"""References in messages that nobody unpacks, or not as a whole: they end all the same."""

from __future__ import annotations

import gc
import sys
import time
import types

import pytest
import torch

import telegrad
from interrupting import CtrlC
from telegrad import rpc
from telegrad.autograd.plain import engine_here
from telegrad.errors import RpcTimeout, SerializationError
from telegrad.rpc.api import _rref_context_get_debug_info
from telegrad.testing.cluster import cluster
from telegrad.transport.stream import SocketConnection

WORKERS = ("worker0", "worker1", "worker2")


def open_references():
    gc.collect()
    info = _rref_context_get_debug_info()
    return int(info["num_owner_rrefs"]) + int(info["num_forks"])


def wait_until_none_is_open(workers=WORKERS):
    end = time.monotonic() + 10
    while any(counts := [rpc.rpc_sync(w, open_references) for w in workers]):
        assert time.monotonic() < end, counts
        time.sleep(0.02)


@pytest.fixture(scope="module")
def group():
    with cluster(3) as running:
        yield running


@pytest.fixture(autouse=True)
def only_here(monkeypatch):
    """A module that the other workers do not have."""
    module = types.ModuleType("only_here")
    exec("def function(*args): pass\nclass Value: pass", module.__dict__)
    for thing in (module.function, module.Value):
        thing.__module__ = "only_here"
    monkeypatch.setitem(sys.modules, "only_here", module)
    return module


class Bomb:
    def __reduce__(self):
        return explode, ()


def explode():
    raise ValueError("not on this worker")


def first_of(*args):
    return args[0]


def with_bomb(rref):
    return [Bomb(), rref]


def late(rref, seconds):
    time.sleep(seconds)
    return rref


def owned():
    return rpc.RRef(torch.zeros(10))


def user():
    return rpc.remote("worker2", torch.zeros, args=(10,))


def by_sync(to, func, args):
    return rpc.rpc_sync(to, func, args=args)


def by_async(to, func, args):
    return rpc.rpc_async(to, func, args=args).wait()


def by_remote(to, func, args):
    return rpc.remote(to, func, args=args).to_here()


def failure(call, to, function, args):
    """How the call fails; what its frames have kept is let go of."""
    try:
        call(to, function, args())
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("make", [owned, user])
@pytest.mark.parametrize("call", [by_sync, by_async, by_remote])
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_a_request_or_reply_that_cannot_be_unpacked(group, only_here, make, call, to):
    calls = [
        (first_of, lambda: (make(), Bomb())),
        (first_of, lambda: (Bomb(), make())),
        (first_of, lambda: ({"a": [Bomb(), {"b": make()}]}, make())),
    ]
    if to != "worker0" or call is not by_remote:  # a value that stays here is not packed
        calls.append((with_bomb, lambda: (make(),)))
    if to != "worker0":
        calls.append((only_here.function, lambda: (make(),)))
        calls.append((first_of, lambda: (only_here.Value(), make())))
    for function, args in calls:
        assert failure(call, to, function, args) in (SerializationError, ValueError)
    wait_until_none_is_open()


@pytest.mark.parametrize("make", [owned, user])
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_a_reply_that_comes_too_late(group, make, to):
    def by_sync(to, func, args):
        return rpc.rpc_sync(to, func, args=args, timeout=0.1)

    def by_async(to, func, args):
        return rpc.rpc_async(to, func, args=args, timeout=0.1).wait()

    for call in (by_sync, by_async):
        assert failure(call, to, late, lambda: (make(), 0.3)) is RpcTimeout
    wait_until_none_is_open()


def test_a_lane_with_a_late_reply_is_used_again(group):
    rpc.rpc_sync("worker2", torch.ones, args=(2,))
    with pytest.raises(RpcTimeout):
        rpc.rpc_sync("worker2", late, args=(1, 0.3), timeout=0.05)
    for number in range(200):
        assert rpc.rpc_sync("worker2", late, args=(number, 0.003)) == number


READING = (
    SocketConnection.send,
    SocketConnection.receive,
    SocketConnection._read_frame,
    SocketConnection._take,
    SocketConnection._fill,
)


@pytest.mark.parametrize("call", [rpc.rpc_sync, telegrad.call], ids=["rpc_sync", "call"])
def test_a_reply_that_ctrl_c_leaves_unread_wherever_it_comes(group, call):
    """Also when the request has just left, and when the reply is half read."""
    lines = {function.__code__: None for function in READING}
    step = interrupted = 0
    while step == interrupted:
        step += 1
        with CtrlC(lines, step):
            try:
                call("worker1", owned)
            except KeyboardInterrupt:
                interrupted += 1
    assert interrupted > 10
    wait_until_none_is_open()


def owned_late():
    time.sleep(0.2)
    return owned()


def test_a_reply_to_a_plain_call_that_comes_after_its_timeout(group):
    with pytest.raises(RpcTimeout):
        engine_here().call(1, owned_late, timeout=0.02)
    wait_until_none_is_open()
