"""What calls say to those who have made a mistake: what was wrong, where, and what to do."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from telegrad import drop_in, rpc
from telegrad.errors import (
    NotInitialized,
    RemoteError,
    RpcTimeout,
    RRefError,
    SerializationError,
    TelegradError,
)
from telegrad.rpc.group.rendezvous import meet
from telegrad.testing.cluster import cluster
from telegrad.wire.frames import Limits


@pytest.fixture(scope="module", autouse=True)
def group():
    with cluster(2) as group:
        yield group


def add(a, b=0):
    return a + b


def one(a):
    return a


CALLERS = [rpc.rpc_sync, rpc.rpc_async, rpc.remote]


@pytest.mark.parametrize("call", CALLERS)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"args": "ab"}, r"args must be a tuple, got 'ab'; write args=\(x,\)"),
        ({"args": ""}, r"args must be a tuple, got ''"),
        ({"args": torch.tensor([5.0])}, r"args must be a tuple, got a Tensor; write args=\(x,\)"),
        ({"args": torch.tensor(0.0)}, r"args must be a tuple, got a Tensor"),
        ({"args": torch.ones(2)}, r"args must be a tuple, got a Tensor"),
        ({"args": {1, 2}}, r"args must be a tuple, got a set"),
        ({"args": {"a": 1}}, r"args must be a tuple, got a dict"),
        ({"args": 1}, r"args must be a tuple, got 1"),
        ({"args": 1, "kwargs": 2}, r"args must be a tuple, got 1; write args=\(1, 2\)"),
        ({"kwargs": [1]}, r"kwargs must be a mapping from names to values, got a list"),
        ({"kwargs": {1: 2}}, r"keys of kwargs must be strings, got 1"),
        ({"b": 3}, r"unexpected keyword argument 'b'; .*kwargs=\{'b': 3\}"),
    ],
)
def test_arguments_are_checked_before_anything_is_sent(call, arguments, text):
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\).*{text}"):
        call("worker1", add, **arguments)


@pytest.mark.parametrize("call", CALLERS)
def test_what_is_called_must_be_callable(call):
    with pytest.raises(TypeError, match=r"func must be callable, got 3: pass the function itself"):
        call("worker1", add(1, 2))


def test_lists_tuples_and_mappings_are_arguments():
    class Names(dict):
        pass

    assert rpc.rpc_sync("worker1", add, [1, 2]) == 3
    assert rpc.rpc_sync("worker1", add, torch.Size([1, 2])) == 3
    assert rpc.rpc_sync("worker1", add, (1,), Names(b=4)) == 5
    assert rpc.rpc_sync("worker1", list) == []
    assert rpc.rpc_async("worker1", add, [1, 2]).wait() == 3
    assert rpc.remote("worker1", add, [1, 2]).to_here() == 3


class Counter:
    def __init__(self):
        self.count = 0

    def forward(self, x):
        return x


def test_a_reference_is_not_its_value():
    rref = rpc.remote("worker1", Counter)
    with pytest.raises(AttributeError, match=r"'forward'; .*rref\.rpc_sync\(\)\.forward\(\.\.\.\)"):
        rref.forward(1)
    for call in (rref, rref.rpc_sync()):
        with pytest.raises(TypeError, match=r"name a method, rref\.rpc_sync\(\)\.forward"):
            call(1)
    with pytest.raises(TypeError, match=r"name a method, rref\.rpc_async\(\)\.forward"):
        rref.rpc_async()(1)
    with pytest.raises(RRefError, match=r"only on the owner, worker 'worker1'.*to_here\(\)"):
        rref.local_value()
    with pytest.raises(
        AttributeError, match=r"Counter has no attribute 'typo' on worker 'worker1'"
    ):
        rref.rpc_sync().typo()
    with pytest.raises(AttributeError, match="call a function that takes the reference"):
        rref.rpc_sync().count()
    assert repr(rref.rpc_sync().count) == "<method 'count' of a value on worker 'worker1': call it>"
    assert not hasattr(rref, "_no_such_thing")


def test_a_call_that_takes_too_long_says_what_may_go_on():
    with pytest.raises(
        RpcTimeout,
        match=r"worker 'worker1' did not answer the call of .*sleep within 0\.05 s; it may still "
        r"be running there \(timeout=, or RpcOptions\.rpc_timeout, sets the limit\)$",
    ):
        rpc.rpc_sync("worker1", time.sleep, (0.5,), timeout=0.05)


def test_sys_exit_in_a_function_is_explained():
    with pytest.raises(RemoteError, match=r"SystemExit: 3 \(sys\.exit in a called function does"):
        rpc.rpc_sync("worker1", sys.exit, (3,))


def test_a_future_has_the_words_of_pythons_own():
    assert rpc.rpc_async("worker1", add, (1, 2)).result() == 3

    async def main():
        return await rpc.rpc_async("worker1", add, (1, 2)) + await rpc.rpc_async(
            "worker1", add, (3,)
        )

    assert asyncio.run(main()) == 6

    async def fail():
        await rpc.rpc_async("worker1", add, (1, "2"))

    with pytest.raises(TypeError, match="unsupported operand"):
        asyncio.run(fail())


def test_a_coroutine_that_gives_up_leaves_the_call_alone():
    async def main():
        future = rpc.rpc_async("worker1", time.sleep, (0.2,))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(future), 0.01)
        return future

    assert asyncio.run(main()).wait() is None


async def _awaited(future):
    return await future


def test_what_the_other_worker_does_not_have_is_named_with_the_worker(monkeypatch):
    def only_here():
        return 1

    only_here.__qualname__ = "only_here"
    monkeypatch.setattr(sys.modules[__name__], "only_here", only_here, raising=False)
    text = rf"on worker 'worker1': .*has no 'only_here' in {__name__}.*top level of a file.*lambda$"
    with pytest.raises(SerializationError, match=text):
        rpc.rpc_sync("worker1", only_here)
    monkeypatch.setattr(drop_in, "_is_drop_in", True)
    assert drop_in.torch_phrase("as torch says") == " (as torch says)"


class Odd(Exception):
    def __init__(self, code, place):
        super().__init__(f"failed with {code}")
        self.code = code
        self.place = place


class Doubled(Exception):
    def __init__(self, code):
        super().__init__(f"failed with {code}")


def fail(kind):
    if kind == "odd":
        raise Odd(3, "there")
    raise Doubled(4)


def test_an_exception_with_a_constructor_of_its_own_keeps_its_type():
    with pytest.raises(Odd, match=r"^failed with 3$") as caught:
        rpc.rpc_sync("worker1", fail, ("odd",))
    assert (caught.value.code, caught.value.place) == (3, "there")
    assert isinstance(caught.value.__cause__, RemoteError)
    with pytest.raises(Doubled, match=r"^failed with 4$"):
        rpc.rpc_sync("worker1", fail, ("doubled",))


def test_a_drop_in_gives_a_runtime_error_for_it_as_torch_does(monkeypatch):
    monkeypatch.setattr(drop_in, "_is_drop_in", True)
    with pytest.raises(RemoteError, match="Odd: failed with 3"):
        rpc.rpc_sync("worker1", fail, ("odd",))


def open_file():
    return open(os.devnull)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_open_file_is_refused():
    with open(os.devnull) as file:
        with pytest.raises(SerializationError, match=r"args\[0\].*open file cannot be sent"):
            rpc.rpc_sync("worker1", one, (file,))
    with pytest.raises(SerializationError, match=r"worker1.*result.*open file cannot be sent"):
        rpc.rpc_sync("worker1", open_file)
    assert rpc.rpc_sync("worker1", one, (io.StringIO("text"),)).read() == "text"


INTERACTIVE = """
    import torch
    from torch import nn
    from telegrad import rpc
    from telegrad.testing.cluster import cluster

    with cluster(2):
        factor = 3

        def scale(x):
            return x * factor

        class Net(nn.Module):
            def forward(self, x):
                return scale(x) + 1

        assert rpc.rpc_sync("worker1", scale, args=(torch.ones(2),)).tolist() == [3, 3]
        net = rpc.remote("worker1", Net)
        assert net.rpc_sync().forward(torch.ones(2)).tolist() == [4, 4]
        assert type(rpc.rpc_sync("worker1", Net)) is Net
    print("done")
"""


def test_functions_and_classes_of_an_interactive_session_can_be_called():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INTERACTIVE)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def run_outside(program):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_whoever_has_not_joined_is_told_so_and_whoever_has_left_is_told_that(tmp_path):
    out = run_outside(f"""
        import torch
        from telegrad import autograd, rpc

        def attempt(use):
            try:
                use()
            except RuntimeError as error:
                print(type(error).__name__, error)

        def enter():
            with autograd.context():
                pass

        def all_attempts():
            attempt(lambda: rpc.rpc_sync("worker1", torch.add))
            attempt(lambda: rpc.RRef(1))
            attempt(enter)

        all_attempts()
        rpc.init_rpc("a", rank=0, world_size=1,
            rpc_backend_options=rpc.RpcOptions(init_method="file://{tmp_path}/store"))
        rpc.shutdown()
        all_attempts()
    """)
    before = (
        "NotInitialized this process has not joined a group: call telegrad.workers(...), "
        "telegrad.join() or rpc.init_rpc(name) first"
    )
    after = (
        "NotInitialized this worker has shut down: calls are possible only while "
        "telegrad.workers(...) runs, or between init_rpc and shutdown"
    )
    assert out.splitlines() == [before] * 3 + [after] * 3
    assert issubclass(NotInitialized, RuntimeError)


def test_options_in_the_wrong_place_are_told_where_they_belong():
    with pytest.raises(TypeError, match=r"rpc_backend_options=RpcOptions"):
        rpc.init_rpc("a", rpc.RpcOptions())
    with pytest.raises(TypeError, match=r"got a dict: write RpcOptions.*telegrad\.install\(\)"):
        rpc.init_rpc("a", rpc_backend_options={})


def test_what_is_too_large_says_how_large_in_words():
    from telegrad.wire.codec import Codec

    codec = Codec()
    codec.limits = Limits(max_body=1_500_000)
    with pytest.raises(
        SerializationError,
        match=r"the arguments are too large to send: 2 MB, and the limit is 1\.5 MB "
        r"\(Limits\.max_body\)\. .*RpcOptions\(limits=\.\.\.\) on all workers",
    ):
        codec.encode(((b"x" * 2_000_000,), None), labels=("args", "kwargs"))


@pytest.mark.parametrize(
    ("option", "kind", "text"),
    [
        ({"host": 5}, TypeError, "host must be a string, got 5"),
        ({"init_method": 5}, TypeError, "init_method must be a string, got 5"),
        ({"shared_memory": "yes"}, TypeError, "shared_memory must be a bool, got 'yes'"),
        ({"busy_wait": -1}, ValueError, "busy_wait must be 0 or more seconds, got -1"),
        ({"busy_wait": True}, TypeError, "busy_wait must be a number of seconds, got True"),
        ({"connect_timeout": "x"}, TypeError, "connect_timeout must be a number of seconds"),
        ({"connect_timeout": 0}, ValueError, "connect_timeout must be positive, got 0"),
        ({"heartbeat_timeout": None}, TypeError, "heartbeat_timeout must be a number of seconds"),
        ({"num_worker_threads": 1.5}, TypeError, "num_worker_threads must be a whole number"),
        ({"limits": 5}, TypeError, "limits must be a Limits, got 5"),
        ({"secret": 5}, TypeError, "secret must be a string or bytes"),
        ({"wrap_transport": 5}, TypeError, "wrap_transport must be a function, got 5"),
    ],
)
def test_options_are_checked(option, kind, text):
    with pytest.raises(kind, match=text):
        rpc.RpcOptions(**option)


@pytest.mark.parametrize(
    ("variables", "rank", "text"),
    [
        ({"RANK": "zero"}, -1, "environment variable RANK must be a whole number, got 'zero'"),
        ({"WORLD_SIZE": "two"}, -1, "variable WORLD_SIZE must be a whole number, got 'two'"),
        ({"MASTER_PORT": "abc"}, -1, "variable MASTER_PORT must be a whole number, got 'abc'"),
        ({}, -3, "rank must be 0 or more, got -3"),
        ({"MASTER_ADDR": None}, -1, "MASTER_ADDR is not set: start the program by telegrad run or"),
        ({"RANK": None, "WORLD_SIZE": None}, -1, "RANK is not set: start the program by telegrad"),
        ({"WORLD_SIZE": None}, -1, "WORLD_SIZE is not set: start the program by telegrad run or"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, -1, "'no.such.host.invalid' cannot be resolved"),
    ],
)
def test_the_environment_of_a_worker_is_checked(variables, rank, text, monkeypatch):
    usual = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**usual, **variables}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    size = None if rank == -1 else 2
    with pytest.raises((ValueError, TelegradError), match=text):
        meet(rpc.RpcOptions(rpc_timeout=1), rank, size)


def test_a_group_without_the_guard_of_the_main_module_fails_at_once(tmp_path):
    (tmp_path / "program.py").write_text(
        "from telegrad.testing.cluster import cluster\nwith cluster(2):\n    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: worker1 ended with exit code 1 before it had joined")
    assert "if __name__ == '__main__':" in last


def test_ctrl_c_does_not_end_the_workers_of_a_notebook(group):
    os.kill(group.pid("worker1"), signal.SIGINT)
    assert rpc.rpc_sync("worker1", add, (1, 2)) == 3


def test_a_worker_that_shuts_down_is_not_called_lost():
    out = run_outside("""
        import logging
        logging.basicConfig(level="INFO", format="%(message)s")
        from telegrad.testing.cluster import cluster
        if __name__ == "__main__":
            logging.getLogger().handlers[0].setStream(__import__("sys").stdout)
            with cluster(3):
                pass
    """)
    assert "is lost" not in out
    assert "worker worker1 has shut down" in out
