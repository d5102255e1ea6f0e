"""How workers come together, join, and leave. Real processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import pytest
import torch

from lined_processes import PATIENCE, lined_process, said
from namespaces import two_hosts
from telegrad import rpc
from telegrad.errors import RpcTimeout, TelegradError, WorkerLost
from telegrad.rpc.group import current
from telegrad.rpc.group import directory as directory_module
from telegrad.rpc.group import store as store_module
from telegrad.rpc.group.directory import Directory
from telegrad.rpc.group.store import Part
from telegrad.testing.cluster import cluster


def add(a, b):
    return a + b


def whoami():
    return rpc.get_worker_info().name


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


# -- open groups


def leave():
    """Leaves the group soon: the reply to this call goes first."""
    threading.Thread(target=rpc.shutdown).start()


def names():
    return [member.name for member in current.current().agent.network.members.infos()]


def test_workers_join_a_running_group_and_leave_it():
    with cluster(2, open_group=True, graceful=False) as group:
        assert rpc.rpc_sync("worker1", whoami) == "worker1"
        with pytest.raises(TelegradError, match="could not find destination 'late'"):
            rpc.rpc_sync("late", whoami)
        group.start("late", 7)
        group.wait_until_ready("late")
        # it is known to those who were there, and knows them
        assert rpc.rpc_sync("late", whoami) == "late"
        assert rpc.get_worker_info("late").id == 7
        assert rpc.rpc_sync(7, rpc.rpc_sync, ("worker0", whoami)) == "worker0"
        assert rpc.rpc_sync("late", rpc.rpc_sync, ("worker1", whoami)) == "worker1"
        assert rpc.rpc_sync("worker1", rpc.rpc_sync, ("late", whoami)) == "late"
        assert sorted(rpc.rpc_sync("late", names)) == ["late", "worker0", "worker1"]
        large = torch.arange(1 << 18)
        assert torch.equal(rpc.rpc_sync("late", add, (large, 1)), large + 1)
        # one leaves, the others go on
        rpc.rpc_sync("worker1", leave)
        until(lambda: names() == ["worker0", "late"])
        until(lambda: rpc.rpc_sync("late", names) == ["worker0", "late"])
        with pytest.raises(TelegradError, match="could not find destination 'worker1'"):
            rpc.rpc_sync("worker1", whoami)
        assert rpc.rpc_sync("late", whoami) == "late"
        # its name and its rank are free again
        group.start("worker1", 1)
        group.wait_until_ready("worker1")
        assert rpc.rpc_sync("worker1", whoami) == "worker1"
        assert rpc.rpc_sync("late", rpc.rpc_sync, ("worker1", whoami)) == "worker1"


def test_one_that_leaves_does_not_wait_for_others_to_let_go_of_its_values():
    with cluster(2, open_group=True, graceful=False):
        rref = rpc.remote("worker1", add, (1, 2))
        info = rref.owner()
        assert rref.to_here() == 3
        rpc.rpc_sync("worker1", leave)
        until(lambda: names() == ["worker0"])
        # who it was is still known
        assert (rref.owner_name(), rref.owner()) == ("worker1", info)
        # References hear of it a moment later than the list of members.
        with pytest.raises(WorkerLost, match=r"its owner worker1 was lost|'worker1' .* has left"):
            rref.to_here()
        with pytest.raises(WorkerLost, match="worker 'worker1' cannot be called: it has left"):
            rpc.rpc_sync(info, whoami)


def come_back(options, name):
    """Leaves the group soon, and joins it again."""

    def go():
        rpc.shutdown()
        rpc.init_rpc(name, rank=1, rpc_backend_options=options)

    threading.Thread(target=go).start()


def answers_as(name):
    try:
        return rpc.rpc_sync(name, whoami) == name
    except TelegradError:
        return False


def test_one_that_has_left_can_come_back():
    with cluster(2, open_group=True, graceful=False) as group:
        for name in ("again1", "again2"):
            assert rpc.rpc_sync(1, names) == names()
            rpc.rpc_sync(1, come_back, (group.options, name))
            until(lambda name=name: answers_as(name))
            assert rpc.rpc_sync(name, ask, ("worker0",)) == "worker0"
            assert names() == ["worker0", name]


def busy_until_the_end():
    """Keeps its worker from leaving gracefully; ends when its process does."""
    threading.Event().wait()


def leave_in_a_hurry():
    threading.Thread(target=hurry).start()


def hurry():
    with contextlib.suppress(RpcTimeout):
        rpc.shutdown(timeout=0.1)


def test_one_whose_time_to_leave_is_over_leaves_all_the_same():
    with cluster(2, open_group=True, graceful=False) as group:
        busy = rpc.rpc_async("worker1", busy_until_the_end)
        rpc.rpc_sync("worker1", leave_in_a_hurry)
        until(lambda: names() == ["worker0"])
        with pytest.raises(WorkerLost):
            busy.wait()
        group.start("worker1", 5)  # its name is free
        group.wait_until_ready("worker1")
        assert rpc.rpc_sync("worker1", whoami) == "worker1"


def test_one_that_leaves_fails_no_call_of_the_others():
    with cluster(3, open_group=True, graceful=False):
        stop = threading.Event()
        failures = []

        def call():
            while not stop.is_set():
                try:
                    assert rpc.rpc_sync("worker2", add, (1, 1)) == 2
                except Exception as error:
                    failures.append(error)
                    return

        thread = threading.Thread(target=call)
        thread.start()
        rpc.rpc_sync("worker1", leave)
        until(lambda: "worker1" not in names())
        stop.set()
        thread.join()
        assert not failures


def test_a_name_is_given_once_in_an_open_group():
    with cluster(2, open_group=True, graceful=False) as group:
        group.start("worker1:again", 5)
        group.wait_until_ready("worker1:again")
        answer = answer_of_one("worker1", 6, group.options)
        assert "RPC worker name 'worker1' is not unique" in answer
        assert rpc.rpc_sync("worker1", whoami) == "worker1"
        assert rpc.rpc_sync("worker1:again", whoami) == "worker1:again"


def test_the_name_of_a_dead_worker_is_free_in_an_open_group():
    with cluster(3, open_group=True, graceful=False) as group:
        rpc.rpc_sync("worker1", whoami)
        group.kill("worker1")
        group.start("worker1", 7)
        group.wait_until_ready("worker1")
        until(lambda: rpc.get_worker_info("worker1").id == 7)
        assert rpc.rpc_sync("worker1", whoami) == "worker1"
        assert rpc.rpc_sync("worker2", ask, ("worker1",)) == "worker1"
        assert rpc.rpc_sync("worker1", ask, ("worker1",)) == "worker1"
        group.start("late", 8)
        group.wait_until_ready("late")
        assert rpc.rpc_sync("late", ask, ("worker1",)) == "worker1"


def ask(name):
    return rpc.rpc_sync(name, whoami)


def try_to_join(name, rank, options, size, line):
    try:
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
        line.send("joined")
        rpc.shutdown()
    except Exception as error:
        line.send(f"{type(error).__name__}: {error}")


def answer_of_one(name, rank, options, size=None):
    """What `try_to_join` says, in a process of its own: torch's stores leave things behind."""
    with lined_process(try_to_join, name, rank, options, size) as (process, line):
        answer = said(line)
        process.join(PATIENCE)
    return answer


def test_a_killed_worker_of_an_open_group_can_be_replaced():
    with cluster(2, open_group=True, graceful=False) as group:
        assert rpc.rpc_sync("worker1", whoami) == "worker1"
        group.kill("worker1")
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("worker1", whoami)
        group.start("worker1", 1)
        group.wait_until_ready("worker1")
        assert rpc.rpc_sync("worker1", whoami) == "worker1"


def test_a_received_tensor_outlives_its_sender():
    with cluster(2) as group:
        small = rpc.rpc_sync("worker1", torch.full, ((10,), 3.0))
        large = rpc.rpc_sync("worker1", torch.full, ((1 << 20,), 5.0))
        group.kill("worker1")
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("worker1", whoami)
        assert bool((large == 5.0).all())
        assert bool((small == 3.0).all())
        large.fill_(6.0)


# -- groups of known size


def run_group(size, init_method, rank, environment, name, line):
    os.environ.update(environment)
    options = rpc.RpcOptions(init_method=init_method, rpc_timeout=10.0)
    explicit = {} if "RANK" in environment else {"rank": rank, "world_size": size}
    try:
        rpc.init_rpc(name or f"w{rank}", rpc_backend_options=options, **explicit)
        other = f"w{(rank + 1) % size}"
        line.send(rpc.rpc_sync(other, add, (torch.ones(2), rank)).tolist())
        rpc.shutdown()
        line.send("ended")
    except Exception as error:
        line.send(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def group_of(size, init_method, environment=lambda rank: {}, name=lambda rank: None):
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                lined_process(run_group, size, init_method, rank, environment(rank), name(rank))
            )
            for rank in range(size)
        ]
        yield [line for _, line in workers]
        for process, _ in workers:
            process.join(PATIENCE)
            assert process.exitcode == 0


def test_options_that_were_changed_are_checked_when_they_are_used(tmp_path):
    options = rpc.RpcOptions(init_method=f"file://{tmp_path}/store")
    options.rpc_timeout = "long"
    with pytest.raises(TypeError, match=r"rpc_timeout must be a number of seconds.*'long'"):
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_workers_meet_without_a_limit(scheme, tmp_path):
    method = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/store"
    options = rpc.RpcOptions(init_method=method, rpc_timeout=float("inf"))
    assert answer_of_one("worker0", 0, options, 1) == "joined"


@pytest.mark.parametrize("scheme", ["file", "tcp", "env"])
def test_every_meeting_place_works(scheme, tmp_path):
    port = str(free_port())
    init_method = {
        "file": f"file://{tmp_path}/store",
        "tcp": f"tcp://127.0.0.1:{port}",
        "env": "env://",
    }[scheme]

    def environment(rank):
        if scheme != "env":
            return {}
        return {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }

    with group_of(3, init_method, environment) as lines:
        for rank, line in enumerate(lines):
            assert line.recv() == [1.0 + rank] * 2
        for line in lines:
            assert line.recv() == "ended"


def test_a_name_that_is_not_unique_is_told_to_every_worker(tmp_path):
    with group_of(3, f"file://{tmp_path}/store", name=lambda rank: "w0" if rank else "w1") as lines:
        for line in lines:
            text = line.recv()
            assert "RPC worker name 'w0' is not unique: workers 1 and 2 both have it" in text


def test_torchrun_starts_a_group(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            import torch
            from telegrad import rpc

            rank = int(os.environ["RANK"])
            rpc.init_rpc(f"worker{rank}")
            other = f"worker{1 - rank}"
            assert rpc.rpc_sync(other, torch.add, (torch.ones(2), rank)).sum() == 2 + 2 * rank
            assert rpc.get_worker_info().id == rank
            rpc.shutdown()
            rpc.init_rpc(f"again{rank}")  # and once more in the same place
            assert rpc.rpc_sync(f"again{1 - rank}", torch.add, (torch.ones(2), 1)).sum() == 4
            rpc.shutdown()
            """
        )
    )
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-port", str(free_port()), str(script)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("rank", "size", "complaint"),
    [
        (2, 2, "rank 2 is not within a group of 2 workers"),
        (0, 0, "world_size must be positive, got 0"),
        (0, -3, "world_size must be positive, got -3"),
        (1 << 16, None, "rank must be at most"),
    ],
)
def test_ranks_and_sizes_that_cannot_be_are_refused(rank, size, complaint, tmp_path):
    options = rpc.RpcOptions(init_method=f"file://{tmp_path}/store")
    with pytest.raises(ValueError, match=complaint):
        rpc.init_rpc("worker0", rank=rank, world_size=size, rpc_backend_options=options)
    assert not rpc.is_initialized()


@pytest.mark.parametrize(
    ("name", "rank", "size", "complaint"),
    [
        (5, 0, 1, "a worker's name must be a string, got 5"),
        (None, 0, 1, "a worker's name must be a string, got None"),
        ("worker0", "0", 1, "rank must be an integer, got '0'"),
        ("worker0", 0, 1.5, "world_size must be an integer, got 1.5"),
    ],
)
def test_what_is_no_name_rank_or_size_is_refused(name, rank, size, complaint, tmp_path):
    options = rpc.RpcOptions(init_method=f"file://{tmp_path}/store")
    with pytest.raises(TypeError, match=complaint):
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    assert not list(tmp_path.iterdir())  # nobody was met


def test_a_meeting_place_of_another_kind_is_refused():
    options = rpc.RpcOptions(init_method="http://127.0.0.1")
    with pytest.raises(ValueError, match="must begin with env://, tcp:// or file://"):
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)


@pytest.mark.parametrize("scheme", ["tcp", "env"])
@pytest.mark.parametrize("size", [2, None])
def test_a_meeting_place_where_nobody_is_ends_at_the_timeout(scheme, size, monkeypatch):
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    method = "env://" if scheme == "env" else f"tcp://127.0.0.1:{port}"
    options = rpc.RpcOptions(init_method=method, rpc_timeout=0.2)
    with pytest.raises(TelegradError, match=f"127.0.0.1:{port} could not be opened.*rank 0"):
        rpc.init_rpc("worker1", rank=1, world_size=size, rpc_backend_options=options)
    assert not rpc.is_initialized()


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_a_worker_that_does_not_come_is_named_at_the_timeout(scheme, tmp_path):
    method = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/store"
    options = rpc.RpcOptions(init_method=method, rpc_timeout=0.2)
    answer = answer_of_one("worker0", 0, options, 2)
    assert "rank 1 of 2 did not join within" in answer


STORE = """
import os, signal
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
store.wait(["telegrad/0/host/1"])  # afterwards it waits for the other one
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_meeting_place_that_falls_silent_is_not_waited_for_any_longer():
    command = (sys.executable, "-c", STORE)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as keeper:
        try:
            port = int(keeper.stdout.readline())
            options = rpc.RpcOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=3.0)
            answer = answer_of_one("worker1", 1, options, 2)
        finally:
            keeper.kill()
    assert "meeting place was lost while waiting for worker 0 of 2" in answer
    assert "the store has not answered" in answer


@pytest.fixture
def store():
    store = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    return store


def test_workers_that_were_told_different_sizes_are_told_so(store):
    first = Directory(store, 0, 2)
    first.declare()
    with pytest.raises(TelegradError, match=r"is of 2 workers.*rank 1.*told that it is of 3"):
        Directory(store, 1, 3).declare()
    with pytest.raises(TelegradError, match=r"rank 1 of 2 did.*Rank 1 is .*told of 3 workers"):
        first.all_on_one_host("here")


def test_a_rank_that_two_workers_were_given_is_told(store, monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr(
        directory_module, "_this_process", lambda: f"process {next(numbers)} on here"
    )
    group = [Directory(store, rank, 3) for rank in (0, 1, 1)]
    for directory in group:
        directory.declare()
    for directory in group:
        with pytest.raises(TelegradError, match=r"of 3 did not join.*Rank 1 was taken more than"):
            directory.all_on_one_host("here")


def test_one_that_tries_again_counts_once(store):
    first, second = Directory(store, 0, 2), Directory(store, 1, 2)
    first.declare()
    with pytest.raises(TelegradError, match="is of 2 workers"):
        Directory(store, 1, 3).declare()
    second.declare()
    with pytest.raises(TelegradError, match="rank 1 of 2 did not join") as caught:
        first.all_on_one_host("here")
    assert "Rank 1" not in str(caught.value)


def start(rank, seconds, interrupts_after, line):
    """Tries to start as a worker of two whenever it is told where, and says what came of it."""
    while (method := line.recv()) is not None:
        options = rpc.RpcOptions(init_method=method, rpc_timeout=seconds)
        timer = threading.Timer(
            interrupts_after, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        )
        if interrupts_after:
            timer.start()
        try:
            rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
            timer.cancel()
            line.send("joined")
            rpc.shutdown()
        except (TelegradError, KeyboardInterrupt) as error:
            line.send(f"{type(error).__name__}: {error}")
        seconds, interrupts_after = PATIENCE, 0.0


@pytest.mark.parametrize("scheme", ["file", "tcp"])
@pytest.mark.parametrize("mistake", ["too early", "interrupted"])
def test_one_that_did_not_join_can_try_again(scheme, mistake, tmp_path):
    method = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/store"
    first_try = (0.5, 0.0) if mistake == "too early" else (PATIENCE, 0.5)
    with (
        lined_process(start, 0, *first_try) as (first, early),
        lined_process(start, 1, PATIENCE, 0.0) as (second, late),
    ):
        early.send(method)
        assert said(early).startswith(
            "TelegradError: rank 1 of 2 did not join" if mistake == "too early" else "Keyboard"
        )
        for line in (early, late):
            line.send(method)
        for line in (early, late):
            assert said(line) == "joined"
            line.send(None)
        for process in (first, second):
            process.join(PATIENCE)
            assert process.exitcode == 0


def test_starts_are_counted_when_others_can_see_them(store):
    def number(part):
        part.set("key", "value")
        return [n for n in range(9) if store.check([f"telegrad/{n}/key"])][-1]

    def part(rank, *, is_open=False):
        return Part(store, place, rank, is_open=is_open)

    place = "a place that no other test uses"
    try:
        assert number(part(0)) == 0
        assert number(part(0)) == 0  # it had failed before it was seen
        for expected in (0, 1, 2):
            again = part(0)
            assert number(again) == expected
            again.use_up()
        del store_module._starts[place]  # another process takes the place of that one
        successor = part(0)
        successor.set("here", "it is")
        assert store.check(["telegrad/2/here"])
        successor.use_up()
        assert number(part(0)) == 3  # in step with the others
        part(0, is_open=True).use_up()
        assert number(part(0, is_open=True)) == 3  # others may still be there
        assert number(part(0)) == 4
    finally:
        store_module._starts.pop(place, None)
        store_module._open_groups.pop(place, None)


def test_a_port_that_is_taken_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        method = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        answer = answer_of_one("worker0", 0, rpc.RpcOptions(init_method=method), 1)
    assert f"{method} could not be opened" in answer
    assert "no other process uses the port" in answer


def test_a_directory_that_does_not_exist_is_told_at_once(tmp_path):
    options = rpc.RpcOptions(init_method=f"file://{tmp_path}/missing/store")
    with pytest.raises(ValueError, match=f"no directory '{tmp_path}/missing'"):
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    assert not rpc.is_initialized()


def test_a_rank_of_the_environment_that_cannot_be_is_refused(monkeypatch):
    for key, value in {**ENVIRONMENT, "RANK": "1"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match="rank 1 is not within a group of 1 workers"):
        rpc.init_rpc("worker1")


ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize("missing", ENVIRONMENT)
def test_what_the_environment_lacks_is_named(missing, monkeypatch):
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=r"rank|is not set") as caught:
        rpc.init_rpc("worker0")
    assert missing in str(caught.value) or missing == "WORLD_SIZE"
    assert not rpc.is_initialized()


def test_an_open_group_names_what_its_environment_lacks(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        rpc.init_rpc("worker0", rank=0)
    assert not rpc.is_initialized()


# -- two hosts


@pytest.fixture(name="two_hosts")
def fixture_two_hosts():
    with two_hosts() as names:
        yield names


PROGRAM = """
import sys
import torch
from telegrad import rpc
from telegrad.rpc.group import current

rank, size, secret = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
options = rpc.RpcOptions(init_method="tcp://10.99.7.1:29777", secret=secret)
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
large = torch.arange(1 << 20)
for other in range(size):
    assert torch.equal(rpc.rpc_sync(f"worker{other}", torch.add, (large, rank)), large + rank)
    assert rpc.rpc_async(f"worker{other}", torch.add, (large[:3], 1)).wait().sum() == 6
    assert rpc.remote(f"worker{other}", torch.ones, (2,)).to_here().sum() == 2
network = current.current().agent.network
print(sorted(address.rpartition(":")[0] for address in network._acceptor.addresses))
print({peer.info.name: peer.memory is not None for peer in network.members.peers()})
rpc.shutdown()
"""


def test_workers_of_two_hosts_reach_each_other(two_hosts, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    spaces = [two_hosts[0], two_hosts[0], two_hosts[1]]
    running = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", space, sys.executable, "-W", "error"),
                *(str(program), str(rank), "3", "shared"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, space in enumerate(spaces)
    ]
    outputs = []
    try:
        for process in running:
            output, errors = process.communicate(timeout=100)
            assert process.returncode == 0, errors
            outputs.append(output)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    # nobody listens at more than the address that the meeting place is reached from
    assert "tcp:10.99.7.1" in outputs[0]
    assert "tcp:10.99.7.2" in outputs[2]
    assert all("0.0.0.0" not in output for output in outputs)
    # Unix sockets and shared memory within a host, TCP between them
    assert "{'worker1': True, 'worker2': False}" in outputs[0]
    assert "{'worker0': False, 'worker1': False}" in outputs[2]
