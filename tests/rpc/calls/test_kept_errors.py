"""Failures that are kept in futures and references: they keep nothing else alive."""

from __future__ import annotations

import gc
import sys
import time
import types
import weakref

import pytest
import torch
from torch.futures import Future

from telegrad import rpc
from telegrad.compat.futures import collect_all
from telegrad.errors import RpcTimeout, SerializationError
from telegrad.rpc.calls.outcome import again, fail, take_origin, without_frames
from telegrad.testing.cluster import cluster


class Odd(Exception):
    """It cannot be copied: its constructor wants more than it keeps."""

    def __init__(self, first, second):
        super().__init__(first)
        self.second = second


class Thing:
    """What a function keeps in a variable, and cares for."""


def raised(error, keep=None):
    """The error as it is after a function has raised it that keeps something."""

    def inner(kept):
        raise error

    try:
        inner(keep)
    except Exception as caught:
        return caught


ERRORS = [
    ValueError("no"),
    KeyError("a", 1),
    OSError(2, "No such file", "name"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
    Odd("first", "second"),
    RpcTimeout("late", worker="worker1", seconds=3.0),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_future_raises_the_same_each_time(error):
    cause = LookupError("because")
    error.__cause__ = cause
    future = Future()
    fail(future, raised(error))
    for ask in (future.wait, future.value, future.wait):
        with pytest.raises(type(error)) as caught:
            ask()
        assert caught.value is not error
        assert (str(caught.value), caught.value.args) == (str(error), error.args)
        assert caught.value.__dict__ == error.__dict__
        assert caught.value.__cause__ is cause


def test_it_tells_where_it_was_raised_first():
    text = take_origin(again(without_frames(raised(ValueError("no")))))
    assert "in inner" in text
    assert "raise error" in text
    assert "ValueError: no" in text


def test_variables_of_those_who_wait_live_no_longer():
    def ask(future):
        mine = Thing()
        try:
            future.wait()
        except ValueError:
            return weakref.ref(mine)

    future = Future()
    fail(future, ValueError("no"))
    assert ask(future)() is None
    died = weakref.ref(future)
    del future
    assert died() is None


@pytest.mark.parametrize("chain", ["itself", "cause", "context"])
def test_variables_of_those_who_raised_it_live_no_longer(chain):
    """Nor those of whoever called them: a frame keeps the one that it was called from."""
    thing = Thing()
    seen = weakref.ref(thing)
    error = raised(ValueError("no"), thing)
    if chain == "cause":
        error = raised_from(error)
    elif chain == "context":
        outer = KeyError("later")
        outer.__context__ = error
        error = outer
    del thing
    assert seen() is not None
    without_frames(error)
    assert seen() is None


def raised_from(cause):
    try:
        raise LookupError("later") from cause
    except LookupError as error:
        return error


def test_an_error_that_leads_to_itself():
    error = ValueError("no")
    error.__context__ = KeyError("before")
    error.__context__.__context__ = error
    assert without_frames(error) is error


def test_all_together_too():
    thing = Thing()
    seen = weakref.ref(thing)
    future = Future()
    fail(future, raised(ValueError("no"), thing))
    del thing
    with pytest.raises(ValueError, match="no"):
        collect_all([future]).wait()
    assert seen() is None


@pytest.fixture(scope="module")
def workers():
    with cluster(2) as running:
        yield running


def refuse(size=0):
    kept = torch.ones(size)
    raise ValueError(f"not {kept.numel()}")


@rpc.functions.async_execution
def refuse_later():
    future = Future()
    future.set_exception(ValueError("no"))
    return future


def living(size):
    gc.collect()
    return sum(type(o) is torch.Tensor and o.numel() == size for o in gc.get_objects())


def by_async(to):
    rpc.rpc_async(to, refuse).wait()


def by_async_function(to):
    rpc.rpc_async(to, refuse_later).wait()


def by_timeout(to):
    rpc.rpc_async(to, time.sleep, args=(0.3,), timeout=0.01).wait()


def by_reference(to):
    rpc.remote(to, refuse).to_here()


def by_method(to):
    rpc.remote(to, refuse).rpc_async().anything().wait()


def by_missing_method(to):
    rpc.remote(to, torch.ones, args=(2,)).rpc_async().nothing_of_that_name().wait()


WAYS = [by_async, by_async_function, by_timeout, by_reference, by_method, by_missing_method]


@pytest.mark.parametrize("to", ["worker0", "worker1"])
@pytest.mark.parametrize("way", WAYS)
def test_a_caller_may_forget_its_failed_calls(workers, way, to):
    def call():
        kept = torch.ones(4321)
        with pytest.raises((ValueError, RpcTimeout, AttributeError)):
            way(to)
        assert kept.numel() == 4321

    for _ in range(3):
        call()
    assert living(4321) == 0


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_an_owner_keeps_no_variables_of_a_value_that_failed(workers, to):
    rref = rpc.remote(to, refuse, args=(54321,))
    for _ in range(3):
        with pytest.raises(ValueError, match="not 54321") as caught:
            rref.to_here()
    assert rpc.rpc_sync(to, living, args=(54321,)) == 0
    if to != "worker0":
        assert "in refuse" in str(caught.value.__cause__)


def test_a_result_of_a_call_to_oneself_lives_no_longer_than_its_future(workers):
    for value in (
        rpc.rpc_sync("worker0", torch.ones, args=(7654,)),
        rpc.rpc_async("worker0", torch.ones, args=(7654,)).wait(),
        rpc.remote("worker0", torch.ones, args=(7654,), timeout=60).to_here(),
    ):
        assert value.numel() == 7654
    del value
    end = time.monotonic() + 5  # what was a reference's ends a moment later
    while living(7654) and time.monotonic() < end:
        time.sleep(0.01)
    assert living(7654) == 0


def test_a_future_that_the_program_completes_costs_nobody_else(workers, caplog):
    others = rpc.rpc_async("worker1", time.sleep, args=(0.3,))
    mine = rpc.rpc_async("worker1", time.sleep, args=(0.1,))
    rref = rpc.remote("worker1", torch.ones, args=(2,))
    mine.set_result("early")
    others.wait()
    assert mine.wait() == "early"
    assert rref.to_here().tolist() == [1, 1]
    assert "time.sleep" in caplog.text


def made_by(name):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec("class Value: pass", module.__dict__)
    module.Value.__module__ = name
    return module.Value()


@pytest.mark.parametrize("way", ["sync", "async", "reference"])
def test_a_result_whose_module_exits_when_it_is_imported(workers, tmp_path, monkeypatch, way):
    (tmp_path / "exits.py").write_text("raise SystemExit('usage: exits --now')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    call = {
        "sync": lambda: rpc.rpc_sync("worker1", made_by, args=("exits",), timeout=20),
        "async": lambda: rpc.rpc_async("worker1", made_by, args=("exits",), timeout=20).wait(),
        "reference": lambda: rpc.remote("worker1", made_by, args=("exits",)).to_here(20),
    }
    with pytest.raises(SerializationError, match="usage: exits --now"):
        call[way]()
