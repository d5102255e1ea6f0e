"""`telegrad.workers`: processes on this machine that start, print, fail and end as one expects."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import textwrap
import threading
from functools import partial

import pytest
import torch
from torch import nn

import telegrad
from scripts import is_alive, run, running, until
from telegrad import rpc
from telegrad.errors import LaunchError, NotInitialized, RpcTimeout, TelegradError, WorkerLost
from telegrad.launch import workers


def call(worker, func, *args):
    return rpc.rpc_sync(worker, func, args=args)


def process_of(worker):
    return call(worker, os.getpid)


# -- in this process


def test_the_workers_are_there_when_the_call_returns():
    group = telegrad.workers("a", "b")
    try:
        assert telegrad.name() == "driver"
        assert [call(worker, telegrad.name) for worker in group] == ["a", "b"]
        assert group.names == ("a", "b")
        assert len({os.getpid(), *map(process_of, group)}) == 3
        assert repr(group) == "<telegrad.workers('a', 'b')>"
    finally:
        group.close()
    group.close()
    assert repr(group) == "<telegrad.workers('a', 'b'), closed>"
    assert not rpc.is_initialized()


def test_a_number_makes_numbered_names():
    with telegrad.workers(2) as group:
        assert list(group) == ["worker1", "worker2"]
        assert call("worker2", telegrad.name) == "worker2"


def is_of_this_module(func):
    return func is is_of_this_module


def test_what_the_workers_had_is_gone_after_the_end_and_says_so():
    with telegrad.workers("a"):
        layer = telegrad.module("a", torch.nn.Linear, 2, 2)
        future = telegrad.submit("a", telegrad.name)
    with pytest.raises(NotInitialized, match=r"worker 'a'.*has been closed. Save what is needed"):
        layer(torch.ones(1, 2))
    with pytest.raises(NotInitialized, match=r"worker 'a' is gone.*Ask for results before"):
        future.result()
    with pytest.raises(NotInitialized, match="has shut down"):
        telegrad.call("a", telegrad.name)


def test_functions_of_a_test_module_are_imported_by_the_workers():
    with telegrad.workers("a"):
        assert call("a", is_of_this_module, is_of_this_module)


def ask(worker, func):
    return rpc.rpc_sync(worker, func)


def test_workers_call_each_other_and_the_driver():
    with telegrad.workers("a", "b"):
        assert call("a", ask, "b", telegrad.name) == "b"
        assert call("b", ask, "driver", os.getpid) == os.getpid()


def test_a_gradient_comes_back_from_a_worker():
    with telegrad.workers("a"), telegrad.autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        telegrad.autograd.backward(context, [call("a", torch.mul, x, 3.0).sum()])
        assert telegrad.autograd.get_gradients(context)[x].tolist() == [3.0, 3.0]


permitted = threading.Event()  # of the worker


def permit():
    permitted.set()


class Waiting(nn.Module):
    def forward(self, x):
        permitted.wait(60.0)
        return x


@pytest.mark.parametrize("how", ["call", "submit", "object", "module"])
def test_rpc_timeout_limits_every_call(how):
    with telegrad.workers("a", rpc_timeout=0.5):
        if how == "call":
            waits = partial(telegrad.call, "a", Waiting())
        elif how == "submit":
            waits = telegrad.module("a", Waiting).submit(torch.ones(1)).result
        elif how == "object":
            waits = telegrad.object("a", Waiting).forward
        else:
            waits = telegrad.module("a", Waiting)
        with pytest.raises(RpcTimeout, match=r"worker 'a' did not answer .* within 0\.5 s"):
            waits(*() if how == "submit" else (torch.ones(1),))
        telegrad.call("a", permit)


def test_the_cores_are_shared_out_between_the_workers(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    with telegrad.workers(2):
        assert call("worker1", torch.get_num_threads) == max(1, cores // 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with telegrad.workers("a"):
        assert call("a", torch.get_num_threads) == 3


def draws():
    return torch.rand(3).tolist()


def test_the_default_dtype_is_that_of_the_driver():
    torch.set_default_dtype(torch.float64)
    try:
        with telegrad.workers("a"):
            assert telegrad.call("a", torch.ones, 2).dtype is torch.float64
            assert telegrad.module("a", torch.nn.Linear, 2, 2).weight.dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_seed_gives_each_process_its_own_numbers_in_each_run():
    drawn = []
    for _ in range(2):
        with telegrad.workers("a", "b"):
            telegrad.manual_seed(7)
            drawn.append([draws(), call("a", draws), call("b", draws)])
    torch.manual_seed(7)
    assert drawn[0] == drawn[1]
    assert drawn[0][0] == draws()
    assert len({tuple(numbers) for numbers in drawn[0]}) == 3


def test_a_seed_without_a_group_is_that_of_torch():
    assert telegrad.manual_seed(5).initial_seed() == 5


@pytest.mark.parametrize(
    ("names", "options", "kind", "message"),
    [
        ((), {}, ValueError, "name the workers, or say how many"),
        ((0,), {}, ValueError, "must be 1 or more, got 0"),
        (("a", "a"), {}, ValueError, "two workers are named 'a'"),
        (("driver",), {}, ValueError, "is the name of this process"),
        (("a",), {"allow": ["__main__.f"]}, ValueError, "part of the script"),
        (("a",), {"allow": [sys.modules["__main__"]]}, ValueError, "part of the script"),
        (("a b",), {}, ValueError, "letters, digits"),
        (("",), {}, ValueError, "must be non-empty"),
        (("a", 2), {}, TypeError, "must be a string, got 2"),
        ((True,), {}, TypeError, "must be a string, got True"),
        (("a",), {"timeout": 0}, ValueError, "timeout must be positive"),
        (("a",), {"threads": "2"}, TypeError, "threads must be a number"),
        (("a",), {"colour": "red"}, TypeError, "has no option 'colour'"),
        (("a",), {"init_method": "env://"}, TypeError, "sets init_method itself"),
        (("a",), {"wrap_transport": lambda t: t}, ValueError, "options cannot be sent"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_starts(names, options, kind, message):
    with pytest.raises(kind, match=message):
        telegrad.workers(*names, **options)
    assert not rpc.is_initialized()


def test_a_second_call_at_the_top_level_starts_anew(capsys):
    first = telegrad.workers("a", "b")
    former = process_of("a")
    second = telegrad.workers("a")
    with second:
        assert repr(first) == "<telegrad.workers('a', 'b'), closed>"
        assert "telegrad: closing <telegrad.workers('a', 'b')>" in capsys.readouterr().err
        assert not is_alive(former)
        assert call("a", telegrad.name) == "a"


def test_a_module_of_former_workers_says_that_it_has_to_be_made_again(capsys):
    workers = telegrad.workers("a")
    layer = telegrad.module("a", torch.nn.Linear, 2, 2)
    workers.close()
    with pytest.raises(NotInitialized, match=r"has been closed.*make modules again"):
        layer(torch.ones(1, 2))
    telegrad.workers("a")
    layer = telegrad.module("a", torch.nn.Linear, 2, 2)
    with telegrad.workers("a"):
        with pytest.raises(NotInitialized, match=r"has been closed.*make modules again"):
            layer(torch.ones(1, 2))
        layer = telegrad.module("a", torch.nn.Linear, 2, 2)
        assert layer(torch.ones(1, 2)).shape == (1, 2)


def test_a_second_call_inside_of_the_block_is_refused():
    with telegrad.workers("a"):
        with pytest.raises(LaunchError, match="in use by a `with` block"):
            telegrad.workers("b")
        assert call("a", telegrad.name) == "a"


def start_more():
    telegrad.workers("c")


def test_a_worker_cannot_start_workers():
    with telegrad.workers("a"):
        with pytest.raises(TelegradError, match="this process is worker 'a' of a group"):
            call("a", start_more)


def test_a_closed_group_cannot_be_entered():
    group = telegrad.workers("a")
    group.close()
    with pytest.raises(LaunchError, match="start new ones"):
        group.__enter__()


def talk():
    print("to stdout")
    print("to stderr", file=sys.stderr)
    print("unfinished", end="")


def test_output_carries_the_name_of_the_worker(capsys):
    with telegrad.workers("a"):
        call("a", talk)
    out, err = capsys.readouterr()
    assert out == "[a] to stdout\n[a] unfinished\n"
    assert err == "[a] to stderr\n"


def die(number):
    print("the last words")
    sys.stdout.write("without an end")
    os.kill(os.getpid(), number)


def test_a_worker_that_dies_fails_its_calls_and_is_reported(capsys):
    with telegrad.workers("a", "b"):
        with pytest.raises(WorkerLost, match="'a'"):
            call("a", die, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="'a'"):
            call("a", talk)
        assert call("b", telegrad.name) == "b"
    out, err = capsys.readouterr()
    assert out == "[a] the last words\n[a] without an end\n"
    assert "telegrad: worker 'a' was killed by SIGKILL" in err


def refuse_to_end():
    atexit.register(signal.pause)


def test_a_worker_that_does_not_end_is_killed(capsys):
    with telegrad.workers("a"):
        worker = process_of("a")
        call("a", refuse_to_end)
    assert not is_alive(worker)
    assert capsys.readouterr().err == (
        "telegrad: worker 'a' did not end within 5 s and was killed\n"
    )


@pytest.mark.parametrize("is_lost_before", [True, False])
def test_the_end_does_not_wait_for_a_worker_that_is_lost(capsys, monkeypatch, is_lost_before):
    """A worker that is stopped cannot leave the group, and does not end when it is asked to."""
    monkeypatch.setattr(workers, "GRACE", 60.0)  # it must not come to that, nor to a connection
    group = telegrad.workers(
        "a", "b", heartbeat_interval=0.1, heartbeat_timeout=1.0, connect_timeout=60.0
    )
    with group:
        kept = telegrad.object("a", list)  # the end waits until it is gone
        worker = process_of("a")
        os.kill(worker, signal.SIGSTOP)
        if is_lost_before:
            with pytest.raises(WorkerLost, match="'a'"):
                call("a", talk)
    del kept
    assert not is_alive(worker)
    assert capsys.readouterr().err == "telegrad: worker 'a' was lost and has been killed\n"


def test_a_process_forked_from_the_driver_leaves_the_workers_alone():
    with telegrad.workers("a"):
        process = os.fork()
        if process == 0:
            os._exit(int(rpc.is_initialized()))
        assert os.waitpid(process, 0)[1] == 0
        assert call("a", telegrad.name) == "a"


def test_an_unfinished_call_is_waited_for_at_a_normal_end(tmp_path):
    with telegrad.workers("a"):
        rpc.rpc_async("a", write_late, args=(str(tmp_path / "file"),))
    assert (tmp_path / "file").read_text() == "written"


def write_late(path):
    for _ in range(1000):
        torch.ones(100).sum()
    with open(path, "w") as file:
        file.write("written")


# -- as a script


def test_a_script_needs_no_guard_and_runs_once(tmp_path):
    (tmp_path / "beside.py").write_text("def twice(x):\n    return 2 * x\n")
    done = run(
        tmp_path,
        """
        import os, telegrad, beside
        from telegrad import rpc

        print("the script runs")
        def here():
            return os.getcwd()

        with telegrad.workers("a"):
            print(rpc.rpc_sync("a", beside.twice, args=(21,)), rpc.rpc_sync("a", here))
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"the script runs\n42 {tmp_path}\n"
    assert done.stderr == ""


def test_a_module_that_is_run_by_its_name(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "beside.py").write_text("def twice(x):\n    return 2 * x\n")
    (package / "train.py").write_text(
        textwrap.dedent("""
        import telegrad
        from telegrad import rpc
        from . import beside

        def use(x):
            from .beside import twice
            return beside.twice(x) == twice(x)

        with telegrad.workers("a"):
            print(rpc.rpc_sync("a", use, args=(21,)))
        """)
    )
    done = run(tmp_path, "", "-m", "package.train")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


SLEEPER = """
    import os, time, telegrad
    from telegrad import rpc

    def sleep(path):
        open(path, "w").close()
        time.sleep(1000)

    def process():
        return os.getpid()
"""


def test_ctrl_c_ends_the_call_and_not_the_workers(tmp_path):
    program = f"""{SLEEPER}
    with telegrad.workers("a", "b"):
        before = rpc.rpc_sync("a", process)
        try:
            rpc.rpc_sync("a", sleep, args=("begun",))
        except KeyboardInterrupt:
            print("interrupted", rpc.rpc_sync("a", process) == before)
        rpc.rpc_sync("b", sleep, args=("begun again",))
    """
    with running(tmp_path, program) as process:
        until((tmp_path / "begun").exists)
        os.killpg(process.pid, signal.SIGINT)
        until((tmp_path / "begun again").exists)
        os.killpg(process.pid, signal.SIGINT)  # ends the block while both workers sleep
        out, err = process.communicate(timeout=30)
    assert out == "interrupted True\n"
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert "still running" not in err
    assert process.returncode == -signal.SIGINT


def test_no_worker_outlives_a_killed_driver(tmp_path):
    program = f"""{SLEEPER}
    telegrad.workers("a", "b")
    for name in "ab":
        print(rpc.rpc_sync(name, process))
    rpc.rpc_sync("a", sleep, args=("begun",))
    """
    with running(tmp_path, program) as process:
        workers = [int(process.stdout.readline()) for _ in range(2)]
        until((tmp_path / "begun").exists)
        assert all(map(is_alive, workers))
        process.kill()
        until(lambda: not any(map(is_alive, workers)))


def test_no_worker_outlives_a_killed_starter(tmp_path):
    program = f"""{SLEEPER}
    import signal
    from telegrad.errors import WorkerLost

    def parent():
        return os.getppid()

    with telegrad.workers("a"):
        starter = rpc.rpc_sync("a", parent)
        print(rpc.rpc_sync("a", process))
        os.kill(starter, signal.SIGKILL)
        try:
            rpc.rpc_sync("a", sleep, args=("begun",))
        except WorkerLost:
            print("lost")
    """
    done = run(tmp_path, program)
    assert done.returncode == 0, done.stderr
    worker, word = done.stdout.split()
    assert word == "lost"
    assert done.stderr == "telegrad: the process that starts the workers has died\n"
    assert not is_alive(int(worker))


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("raise SystemExit(3)", 3), ("raise ValueError", 1)]
)
def test_a_program_may_end_without_closing_them(tmp_path, end, code):
    program = f"""{SLEEPER}
    workers = telegrad.workers("a")
    print(rpc.rpc_sync("a", process))
    rpc.rpc_async("a", sleep, args=("begun",))
    {end}
    """
    done = run(tmp_path, program)
    assert done.returncode == code, done.stderr
    assert not is_alive(int(done.stdout))


START_FAILURE = """
    import os, telegrad, failing

    os.environ["DRIVER"] = str(os.getpid())
    try:
        telegrad.workers("a", "b", timeout={timeout}, wrap_transport=failing.{how})
    except telegrad.errors.LaunchError as error:
        print(error)
    with telegrad.workers("a"):
        print("another try")
"""
FAILING = """
import os, signal, time

def raises(transport):
    if os.environ["DRIVER"] != str(os.getpid()):
        raise ValueError("the cause")
    return transport

def is_killed(transport):
    if os.environ["DRIVER"] != str(os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)
    return transport

def hangs(transport):
    if os.environ["DRIVER"] != str(os.getpid()):
        with open("hanging", "w") as file:
            file.write(str(os.getpid()))
        os.rename("hanging", "hangs")
        time.sleep(1000)
    return transport
"""


@pytest.mark.parametrize(
    ("how", "timeout", "shown"),
    [
        ("raises", 60, ["ended with exit code 1", "Traceback", "ValueError: the cause"]),
        ("is_killed", 60, ["was killed by SIGKILL"]),
        ("hangs", 0.5, ["workers 'a', 'b' did not start within 0.5 s"]),
    ],
)
def test_a_worker_that_cannot_start_says_why(tmp_path, how, timeout, shown):
    (tmp_path / "failing.py").write_text(FAILING)
    done = run(tmp_path, START_FAILURE.format(how=how, timeout=timeout))
    assert done.returncode == 0, done.stderr
    for text in ("worker", *shown):
        assert text in done.stdout
    assert done.stdout.endswith("another try\n")


def test_ctrl_c_while_they_start_leaves_nothing_behind(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    program = """
    import os, telegrad, failing

    os.environ["DRIVER"] = str(os.getpid())
    telegrad.workers("a", wrap_transport=failing.hangs)
    """
    with running(tmp_path, program) as process:
        until((tmp_path / "hangs").exists)
        worker = int((tmp_path / "hangs").read_text())
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert not is_alive(worker)


def test_a_torch_that_cannot_be_imported_there_is_shown(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('not this torch')")
    done = run(
        tmp_path,
        """
        import sys, telegrad
        sys.path.insert(0, "broken")
        try:
            telegrad.workers("a")
        except telegrad.errors.LaunchError as error:
            print(error)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "worker 'a' cannot be started" in done.stdout
    assert "ImportError: not this torch" in done.stdout


def test_a_cell_that_is_run_again_sends_the_new_definition(tmp_path):
    cells = """
        import telegrad
        from telegrad import rpc
        workers = telegrad.workers("a")
        def answer(): return offset + 1

        offset = 1
        print(rpc.rpc_sync("a", answer))
        def answer(): return offset + 100

        print(rpc.rpc_sync("a", answer))
        offset = 2
        print(rpc.rpc_sync("a", answer))
        workers = telegrad.workers("a")
        print(rpc.rpc_sync("a", answer))
        from torch import nn
        class Net(nn.Module):
            def forward(self, x): return x + 1

        old = telegrad.module("a", Net)
        class Net(nn.Module):
            def forward(self, x): return x + 100

        new = telegrad.module("a", Net)
        print(old(0), new(0))
        workers.close()
    """
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=textwrap.dedent(cells),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.split() == ["2", "101", "102", "102", "1", "100"], done.stderr
    assert done.stderr.count("closing <telegrad.workers('a')> to start new workers") == 1
    assert "Traceback" not in done.stderr
