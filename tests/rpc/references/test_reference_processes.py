"""References between real processes."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from telegrad import rpc
from telegrad.errors import SerializationError
from telegrad.testing.cluster import cluster

never = threading.Event()
kept = []


class Value:
    def same(self, argument):
        return argument

    def pass_a_lock_on(self, to):
        rpc.rpc_sync(to, print, (1, 2, threading.Lock()))


class Slow:
    """Takes its time to be unpacked."""

    def __reduce__(self):
        return _unpack_slowly, ()


def _unpack_slowly():
    never.wait(0.3)
    return "unpacked"


def drop_early(owner, mode):
    """The caller lets go of the reference while the owner still unpacks the call."""
    return getattr(rpc.remote(owner, Value), mode)().same(Slow())


def test_a_method_that_runs_through_a_reference_keeps_its_value():
    with cluster(2):
        for owner in ("worker0", "worker1"):
            result = drop_early(owner, "remote")
            result._get_future().wait()
            assert result.to_here() == "unpacked"
            assert drop_early(owner, "rpc_async").wait() == "unpacked"
            assert drop_early(owner, "rpc_sync") == "unpacked"


class WithLock:
    def __init__(self):
        self.lock = threading.Lock()

    def is_locked(self):
        return self.lock.locked()


module = torch.nn.Linear(2, 1)


def get_module():
    return module


@rpc.functions.async_execution
def get_module_later():
    future = torch.futures.Future()
    future.set_result(module)
    return future


def refuse():
    raise LookupError("there is none")


def test_a_value_is_what_the_function_returned_also_where_it_was_asked_for():
    """It is not packed: it may be something that cannot be, and a module is the one that was meant
    and no copy."""
    with cluster(2):
        for owner in ("worker0", "worker1"):
            assert rpc.remote(owner, WithLock).rpc_sync().is_locked() is False
            assert rpc.remote(owner, WithLock, timeout=60).remote().is_locked().to_here() is False
        for function in (get_module, get_module_later):
            value = rpc.remote("worker0", function)
            assert value.to_here() is module
            assert value.local_value() is module
        value = rpc.remote("worker0", get_module)
        rpc.rpc_sync("worker1", fill, (value, 3.0))
        assert module.weight.tolist() == [[3.0, 3.0]]
        with pytest.raises(LookupError, match="there is none"):
            rpc.remote("worker0", refuse).to_here()


def fill(rref, number):
    """As a trainer changes what it has a reference to."""
    rref.rpc_sync().load_state_dict({"weight": torch.full((1, 2), number), "bias": torch.zeros(1)})


def keep(rref):
    kept.append(rref)


def test_references_that_others_still_hold_are_reported_at_shutdown(caplog):
    caplog.set_level(logging.INFO, logger="telegrad.rpc")
    with cluster(2):
        value = rpc.RRef(7)
        rpc.rpc_sync("worker1", keep, (value,))
    (report,) = [record.message for record in caplog.records if "still held" in record.message]
    assert report.startswith("1 references to values of worker0")
    assert "Leaking RRef GloballyUniqueId(created_on=0" in report


def test_an_argument_of_a_method_that_cannot_be_sent_is_named_as_it_was_passed():
    with cluster(2):
        for owner in ("worker0", "worker1"):
            value = rpc.remote(owner, Value)
            value.rpc_sync().same(1)  # its type is known from now on
            for mode in ("rpc_sync", "rpc_async", "remote"):
                for args, kwargs, path in (
                    ((threading.Lock(),), {}, "args[0]"),
                    ((1, {"a": [threading.Lock()]}), {}, "args[1]['a'][0]"),
                    ((), {"argument": threading.Lock()}, "kwargs['argument']"),
                ):
                    with pytest.raises(SerializationError, match="lock") as caught:
                        getattr(value, mode)().same(*args, **kwargs)
                    assert caught.value.path == path
                    assert str(caught.value).startswith(f"{path} (")


def test_an_argument_of_a_call_within_a_method_keeps_its_name():
    with cluster(2):
        value = rpc.remote("worker1", Value)
        with pytest.raises(SerializationError, match="lock") as caught:
            value.rpc_sync().pass_a_lock_on("worker0")
        assert caught.value.path == "args[2]"
