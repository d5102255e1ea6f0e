"""Calls between real processes."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import torch

from telegrad import rpc
from telegrad.errors import NotInitialized, RpcTimeout, SerializationError, TelegradError
from telegrad.rpc.group.current import current
from telegrad.testing.cluster import cluster


def add(a, b):
    return a + b


def whoami():
    return rpc.get_worker_info().name


def fail(text):
    raise ValueError(text, 42)


class Odd(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


def fail_oddly():
    raise Odd("cannot be sent")


def bounce(depth, here, there):
    """Calls back and forth, each call waiting for the next."""
    return 0 if depth == 0 else 1 + rpc.rpc_sync(there, bounce, (depth - 1, there, here))


def bounce_async(depth, here, there):
    if depth == 0:
        return 0
    return 1 + rpc.rpc_async(there, bounce_async, (depth - 1, there, here)).wait()


def circle(names, steps):
    if steps == 0:
        return []
    head, *rest = names
    return [whoami(), *rpc.rpc_sync(head, circle, ([*rest, head], steps - 1))]


class Counter:
    def __init__(self, start=0):
        self.value = start

    def grow(self, by):
        self.value += by
        return self.value

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def name(cls):
        return cls.__name__

    @staticmethod
    @rpc.functions.async_execution
    def relay(to, x):
        return rpc.rpc_async(to, add, (x, 1)).then(lambda f: f.wait() * 10)

    @classmethod
    @rpc.functions.async_execution
    def class_relay(cls, to, x):
        return rpc.rpc_async(to, add, (x, 1)).then(lambda f: (cls.__name__, f.wait()))

    @rpc.functions.async_execution
    def bound_relay(self, to, x):
        return rpc.rpc_async(to, add, (x, self.value))


@rpc.functions.async_execution
def relay(to, x):
    return rpc.rpc_async(to, add, (x, 1)).then(lambda f: f.wait() * 10)


@rpc.functions.async_execution
def no_future():
    return 3


@rpc.functions.async_execution
def failing_future():
    return rpc.rpc_async(rpc.get_worker_info(), fail, ("later",))


@torch.jit.script
def scripted_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def generate():
    yield 1


def sleep(seconds):
    time.sleep(seconds)
    return seconds


@pytest.fixture(scope="module")
def group():
    with cluster(3) as running:
        yield running


@pytest.fixture(autouse=True)
def _group(group):
    """Started before anything is counted as left over."""


@pytest.mark.parametrize("to", ["worker1", 1, "worker0", 0])
def test_a_call_runs_at_its_destination(to):
    info = rpc.get_worker_info(to)
    assert rpc.rpc_sync(to, whoami) == info.name
    assert rpc.rpc_async(info, whoami).wait() == info.name
    assert rpc.remote(info, whoami).to_here() == info.name


@pytest.mark.parametrize("to", ["worker0", "worker1"])
@pytest.mark.parametrize(
    ("func", "args", "kwargs", "want"),
    [
        (add, (2, 3), {}, 5),
        (add, (2,), {"b": 3}, 5),
        (add, [2, 3], None, 5),
        (torch.add, (torch.ones(2), torch.ones(2)), {"alpha": 2}, torch.full((2,), 3.0)),
        (torch.Tensor.add, (torch.ones(2), 1), {}, torch.full((2,), 2.0)),
        (torch.nn.functional.relu, (torch.tensor([-1.0, 1.0]),), {}, torch.tensor([0.0, 1.0])),
        (torch.ops.aten.mul.Tensor, (torch.ones(2), torch.ones(2)), {}, torch.ones(2)),
        (scripted_add, (torch.ones(2), torch.ones(2)), {}, torch.full((2,), 2.0)),
        (Counter.double, (4,), {}, 8),
        (Counter.name, (), {}, "Counter"),
        (Counter(5).grow, (2,), {}, 7),
        (functools.partial(add, 1), (2,), {}, 3),
        (lambda x: x + 1, (1,), {}, 2),
        (len, ([1, 2],), {}, 2),
        (relay, ("worker2", 1), {}, 20),
        (Counter.relay, ("worker2", 1), {}, 20),
        (Counter.class_relay, ("worker2", 1), {}, ("Counter", 2)),
    ],
)
def test_every_kind_of_function_can_be_called(to, func, args, kwargs, want):
    for got in (
        rpc.rpc_sync(to, func, args, kwargs),
        rpc.rpc_async(to, func, args, kwargs).wait(),
        rpc.remote(to, func, args, kwargs).to_here(),
    ):
        assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want


def test_closures_carry_what_they_close_over():
    factor = torch.full((2,), 3.0)
    assert torch.equal(rpc.rpc_sync("worker1", lambda x: x * factor, (2,)), factor * 2)


def test_a_class_is_constructed_remotely():
    counter = rpc.remote("worker1", Counter, (5,))
    assert counter.rpc_sync().grow(1) == 6
    assert counter.rpc_async().grow(by=2).wait() == 8
    assert counter.remote().grow(3).to_here() == 11
    assert counter.rpc_sync().bound_relay("worker2", 4) == 15


def test_a_script_module_can_be_called():
    module = torch.jit.script(torch.nn.Linear(2, 2))
    x = torch.ones(1, 2)
    assert torch.equal(rpc.rpc_sync("worker1", module, (x,)), module(x))


def test_nested_calls_go_as_deep_as_they_like():
    assert rpc.rpc_sync("worker1", bounce, (60, "worker1", "worker0")) == 60
    assert rpc.rpc_sync("worker1", bounce_async, (40, "worker1", "worker0")) == 40
    assert rpc.rpc_sync("worker1", bounce, (10, "worker1", "worker1")) == 10
    names = ["worker2", "worker0", "worker1"]
    assert rpc.rpc_sync("worker1", circle, (names, 6)) == ["worker1", *names, "worker2", "worker0"]


def test_more_calls_may_block_than_the_pool_has_threads():
    """All of them wait for each other: none may wait for a thread."""
    futures = [rpc.rpc_async("worker1", meet_in_the_middle, (40,)) for _ in range(40)]
    assert torch.futures.wait_all(futures) == [True] * 40


meeting = threading.Barrier(40)


def meet_in_the_middle(size):
    meeting.wait(60)
    return True


def test_an_exception_keeps_its_type_arguments_and_remote_traceback():
    for call in (
        lambda: rpc.rpc_sync("worker1", fail, ("no",)),
        lambda: rpc.rpc_async("worker1", fail, ("no",)).wait(),
        lambda: rpc.remote("worker1", fail, ("no",)).to_here(),
        lambda: rpc.rpc_sync("worker0", fail, ("no",)),
    ):
        with pytest.raises(ValueError, match="no") as caught:
            call()
        assert caught.value.args == ("no", 42)
        assert "in fail" in str(caught.value.__cause__)
        assert "worker" in str(caught.value.__cause__)


def test_an_exception_that_cannot_be_rebuilt_is_told_as_text():
    with pytest.raises(TelegradError, match=r"worker1.*Odd: cannot be sent"):
        rpc.rpc_sync("worker1", fail_oddly)


def test_sys_exit_in_a_function_ends_its_call_only():
    with pytest.raises(TelegradError, match="SystemExit"):
        rpc.rpc_sync("worker1", exit, (3,))
    assert rpc.rpc_sync("worker1", whoami) == "worker1"


class Unpackable:
    def __reduce__(self):
        raise SystemExit(3)


@rpc.functions.async_execution
def unpackable_future():
    future = torch.futures.Future()
    future.set_result(Unpackable())
    return future


@pytest.mark.parametrize("func", [Unpackable, unpackable_future])
def test_sys_exit_while_a_result_is_packed_ends_its_call_only(func):
    for call in (rpc.rpc_sync, lambda to, func: rpc.rpc_async(to, func).wait()):
        with pytest.raises(TelegradError, match="SystemExit"):
            call("worker1", func)
    # that it counts as ended is seen when the group ends gracefully


def test_async_execution_must_return_a_future():
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
        rpc.rpc_sync("worker1", no_future)
    with pytest.raises(ValueError, match="later"):
        rpc.rpc_sync("worker1", failing_future)


def test_generators_are_refused_by_name():
    with pytest.raises(SerializationError, match="generator"):
        rpc.rpc_sync("worker1", generate)


def test_an_argument_that_cannot_be_sent_is_named():
    with pytest.raises(SerializationError, match=r"args\[0\]\['lock'\]") as caught:
        rpc.rpc_sync("worker1", add, ({"lock": threading.Lock()}, 1))
    assert caught.value.path == "args[0]['lock']"
    with pytest.raises(SerializationError, match=r"kwargs\['b'\]"):
        rpc.rpc_async("worker1", add, (1,), {"b": threading.Lock()})


def test_a_result_that_cannot_be_sent_fails_its_call_only():
    with pytest.raises(SerializationError, match="result"):
        rpc.rpc_sync("worker1", threading.Lock)
    assert rpc.rpc_sync("worker1", whoami) == "worker1"


def test_a_function_that_the_worker_cannot_import_is_named():
    def ghost():
        pass

    ghost.__module__, ghost.__qualname__ = "no_such_module", "ghost"
    import sys
    import types

    module = types.ModuleType("no_such_module")
    module.ghost = ghost
    sys.modules["no_such_module"] = module
    try:
        with pytest.raises(SerializationError, match="no_such_module"):
            rpc.rpc_sync("worker1", ghost)
    finally:
        del sys.modules["no_such_module"]
    assert rpc.rpc_sync("worker1", whoami) == "worker1"


@pytest.mark.parametrize("to", ["worker1", "worker0"])
def test_a_call_that_takes_too_long_fails_in_time(to):
    for call in (
        lambda: rpc.rpc_sync(to, sleep, (1.0,), timeout=0.1),
        lambda: rpc.rpc_async(to, sleep, (1.0,), timeout=0.1).wait(),
    ):
        begun = time.monotonic()
        with pytest.raises(RpcTimeout, match=r"did not answer.* within 0\.1 s; it may still"):
            call()
        assert time.monotonic() - begun < 0.9
    assert rpc.rpc_sync(to, whoami, timeout=10) == to


def test_the_default_timeout_can_be_changed_and_zero_is_none():
    assert rpc.get_rpc_timeout() == 60
    rpc._set_rpc_timeout(0.1)
    try:
        with pytest.raises(RpcTimeout):
            rpc.rpc_sync("worker1", sleep, (1.0,))
        assert rpc.rpc_sync("worker1", sleep, (0.2,), timeout=0) == 0.2
    finally:
        rpc._set_rpc_timeout(60)


def test_futures_chain_and_collect():
    futures = [rpc.rpc_async("worker1", add, (i, 1)) for i in range(200)]
    assert torch.futures.wait_all(futures) == list(range(1, 201))
    chained = rpc.rpc_async("worker1", add, (1, 1)).then(lambda f: f.wait() + 1)
    assert chained.wait() == 3
    collected = torch.futures.collect_all([rpc.rpc_async("worker2", add, (i, i)) for i in (1, 2)])
    assert [f.wait() for f in collected.wait()] == [2, 4]


def test_a_callback_may_call_and_wait_on_the_same_worker():
    """The reply that it waits for comes on the connection whose reader runs the callback."""

    def again(future):
        return future.wait() + rpc.rpc_async("worker1", add, (1, 1)).wait()

    assert rpc.rpc_async("worker1", add, (1, 1)).then(again).wait() == 4
    both = torch.futures.collect_all([rpc.rpc_async("worker1", add, (1, 1))])
    assert both.then(lambda f: again(f.wait()[0])).wait() == 4


def test_wait_all_waits_for_what_was_called_within_it():
    with rpc._wait_all():
        futures = [rpc.rpc_async("worker1", sleep, (0.05,)) for _ in range(3)]
    assert all(future.done() for future in futures)
    with pytest.raises(ValueError, match="no"):
        with rpc._wait_all():
            rpc.rpc_async("worker1", fail, ("no",))


def test_many_threads_may_call_at_once():
    results = {}

    def call(i):
        results[i] = [rpc.rpc_sync("worker1", add, (torch.tensor(i), j)) for j in range(20)]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(int(results[i][j]) == i + j for i in range(8) for j in range(20))


def test_lanes_that_nobody_needs_any_more_are_closed():
    peer = current().agent.network.members.peer(1)
    gate = threading.Barrier(6)

    def call():
        gate.wait()
        rpc.rpc_sync("worker1", sleep, (0.05,))

    def lanes():
        return len(peer.requests.lanes._idle)

    end = time.monotonic() + 30
    while peer.requests.lanes.given_up_count:  # by earlier tests: their lanes come back
        assert time.monotonic() < end
        time.sleep(0.05)
    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    many = lanes()
    assert many > 2
    now = time.monotonic()
    peer.trim(now + 31)  # all of them were in use
    assert lanes() == many
    rpc.rpc_sync("worker1", add, (1, 1))
    peer.trim(now + 50)  # too early to tell
    assert lanes() == many
    peer.trim(now + 62)
    assert lanes() == 2
    assert rpc.rpc_sync("worker1", add, (1, 1)) == 2


def test_all_gather_and_barrier_bring_workers_together():
    others = [rpc.rpc_async(f"worker{i}", gather_here) for i in (1, 2)]
    mine = gather_here()
    assert mine == {"worker0": 0, "worker1": 1, "worker2": 2}
    assert torch.futures.wait_all(others) == [mine, mine]
    other = rpc.rpc_async("worker1", rpc._barrier, (["worker0", "worker1"],))
    rpc._barrier(["worker0", "worker1"])
    other.wait()
    with pytest.raises(RpcTimeout, match=r"timed out in _all_gather after 0\.10 seconds"):
        rpc._all_gather(None, ["worker0", "worker2"], timeout=0.1)


def gather_here():
    return rpc._all_gather(rpc.get_worker_info().id)


def test_unknown_workers_and_wrong_destinations_are_refused_at_once():
    for to in ("worker9", 9):
        with pytest.raises(TelegradError, match="could not find destination"):
            rpc.rpc_sync(to, whoami)
    with pytest.raises(ValueError, match="name, rank or WorkerInfo"):
        rpc.rpc_sync(1.5, whoami)


def test_init_twice_is_refused():
    with pytest.raises(TelegradError, match="is already initialized"):
        rpc.init_rpc("again", rank=0, world_size=1)


def test_worker_names_are_checked():
    for name, complaint in [
        ("", "must be non-empty"),
        ("a b", "must match"),
        ("x" * 128, "shorter than 128"),
    ]:
        with pytest.raises(RuntimeError, match=complaint):
            rpc.WorkerInfo(name, 0)


def test_nothing_works_without_init(monkeypatch):
    monkeypatch.setattr("telegrad.rpc.group.current.Here.worker", None)
    for call in (
        lambda: rpc.rpc_sync("worker1", whoami),
        lambda: rpc.rpc_async("worker1", whoami),
        lambda: rpc.remote("worker1", whoami),
        lambda: rpc.RRef(1),
        rpc.get_worker_info,
        rpc.shutdown,
    ):
        with pytest.raises(NotInitialized):
            call()


def leave_gradients_off():
    torch.set_grad_enabled(False)


@rpc.functions.async_execution
def leave_gradients_off_later():
    torch.set_grad_enabled(False)
    return rpc.rpc_async("worker1", add, (1, 1))


@pytest.mark.parametrize("func", [leave_gradients_off, leave_gradients_off_later])
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_a_function_that_leaves_gradients_off_does_so_for_itself(to, func):
    for _ in range(5):
        rpc.rpc_sync(to, func)
        rpc.rpc_async(to, func).wait()
        rpc.remote(to, func).to_here()
        assert rpc.rpc_sync(to, torch.is_grad_enabled)
        assert rpc.rpc_async(to, torch.is_grad_enabled).wait()
        assert rpc.remote(to, torch.is_grad_enabled).to_here()


def finished_future():
    future = torch.futures.Future()
    future.set_result(1)
    return future


def test_a_value_that_is_a_future_is_not_taken_for_what_it_holds():
    rref = rpc.remote("worker1", finished_future)
    for _ in range(2):
        with pytest.raises(SerializationError, match="Future"):
            rref.to_here()


def has_called_after(how, rref):
    if how == "sync":
        rpc.rpc_sync("worker0", add, (1, 1))
    elif how == "async":
        rpc.rpc_async("worker0", add, (1, 1)).wait()
    elif how == "fetch":
        rref.to_here()
    return current().agent.service.has_called()


def test_a_worker_knows_whether_a_function_has_called_others():
    rref = rpc.RRef(1)
    ways = ("sync", "nothing", "async", "fetch", "nothing")
    called = [rpc.rpc_sync("worker1", has_called_after, (how, rref)) for how in ways]
    assert called == [True, False, True, True, False]
