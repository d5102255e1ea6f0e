"""Which timeouts can be given, and where."""

from __future__ import annotations

import time

import pytest

from telegrad import rpc
from telegrad.compat.rpc.options import TensorPipeRpcBackendOptions
from telegrad.errors import RpcTimeout
from telegrad.testing.cluster import cluster


def sleep(seconds):
    time.sleep(seconds)
    return seconds


class Counter:
    def __init__(self):
        self.value = 0

    def grow(self, by):
        self.value += by
        return self.value


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(2) as running:
        yield running


CALLS_WITH_A_TIMEOUT = {
    "rpc_sync": lambda to, t: rpc.rpc_sync(to, sleep, (0.01,), timeout=t),
    "rpc_async": lambda to, t: rpc.rpc_async(to, sleep, (0.01,), timeout=t).wait(),
    "remote": lambda to, t: rpc.remote(to, sleep, (0.01,), timeout=t).to_here(),
    "to_here": lambda to, t: rpc.remote(to, sleep, (0.01,)).to_here(timeout=t),
    "rref.rpc_sync": lambda to, t: rpc.remote(to, Counter).rpc_sync(t).grow(0.01),
    "rref.rpc_async": lambda to, t: rpc.remote(to, Counter).rpc_async(t).grow(0.01).wait(),
    "rref.remote": lambda to, t: rpc.remote(to, Counter).remote(t).grow(0.01).to_here(),
}


@pytest.mark.parametrize("timeout", [float("inf"), 1e20, 1e10, 3e6, 10**400, 2_000_000, 60])
@pytest.mark.parametrize("to", ["worker1", "worker0"])
@pytest.mark.parametrize("call", CALLS_WITH_A_TIMEOUT)
def test_a_timeout_may_be_as_long_as_one_likes(call, to, timeout):
    assert CALLS_WITH_A_TIMEOUT[call](to, timeout) == 0.01


@pytest.mark.parametrize("timeout", [None, "3", True, [1], float("nan")])
@pytest.mark.parametrize("call", CALLS_WITH_A_TIMEOUT)
def test_a_timeout_that_is_no_number_is_refused_at_once(call, timeout):
    kind = ValueError if isinstance(timeout, float) else TypeError
    with pytest.raises(kind, match=r"^timeout must be a number of seconds, with 0 for no limit"):
        CALLS_WITH_A_TIMEOUT[call]("worker1", timeout)
    with pytest.raises(kind, match=r"^rpc_timeout must be a number of seconds"):
        rpc.RpcOptions(rpc_timeout=timeout)


@pytest.mark.parametrize("timeout", [-5, -0.001, float("-inf")])
@pytest.mark.parametrize("call", CALLS_WITH_A_TIMEOUT)
def test_a_negative_timeout_is_refused_at_once(call, timeout):
    with pytest.raises(ValueError, match=r"^timeout must not be negative"):
        CALLS_WITH_A_TIMEOUT[call]("worker1", timeout)
    for options in (rpc.RpcOptions, TensorPipeRpcBackendOptions):
        with pytest.raises(ValueError, match=r"^rpc_timeout must not be negative"):
            options(rpc_timeout=timeout)


def test_endless_timeouts_of_options_are_zero():
    for seconds in (float("inf"), 1e20, 10**400):
        assert rpc.RpcOptions(rpc_timeout=seconds).rpc_timeout == 0
    assert rpc.RpcOptions(rpc_timeout=3).rpc_timeout == 3
    rpc._set_rpc_timeout(float("inf"))
    try:
        assert rpc.get_rpc_timeout() == 0
        assert rpc.rpc_sync("worker1", sleep, (0.01,)) == 0.01
    finally:
        rpc._set_rpc_timeout(60)


class Slow:
    def work(self, seconds):
        time.sleep(seconds)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_method_that_takes_too_long_is_named(mode):
    rref = rpc.remote("worker1", Slow)
    rref.rpc_sync().work(0)
    with pytest.raises(RpcTimeout, match=r"worker1.*method 'work' of a remote value"):
        if mode == "sync":
            rref.rpc_sync(timeout=0.05).work(0.5)
        else:
            rref.rpc_async(timeout=0.05).work(0.5).wait()
