"""A process that is forked from a worker has no worker, and its parent notices nothing of it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import telegrad.autograd as dist_autograd
from telegrad import rpc
from telegrad.errors import NotInitialized, WorkerLost
from telegrad.rpc import api
from telegrad.rpc.group import current
from telegrad.testing.cluster import cluster

# Newer Pythons warn of what this is about.
pytestmark = pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")

PATIENCE = 20
forking = multiprocessing.get_context("fork")
never = threading.Event()
held = {}


class Child:
    """Runs a function in a forked process."""

    def __init__(self, function, *args):
        self._line, there = forking.Pipe(duplex=False)
        self._process = forking.Process(target=self._run, args=(there, function, *args))
        self._process.start()
        there.close()

    @staticmethod
    def _run(line, function, *args):
        line.send(function(*args))

    def is_done(self):
        return self._line.poll(0)

    def result(self):
        try:
            assert self._line.poll(PATIENCE), "the child hangs"
            result = self._line.recv()
            self._process.join(PATIENCE)
            assert self._process.exitcode == 0
            return result
        finally:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._line.close()


def in_child(function, *args):
    return Child(function, *args).result()


def refusal(use):
    try:
        return f"not refused: {use()!r}"
    except NotInitialized as error:
        return str(error)


def refused(pid=None):
    return (
        f"this process was forked from worker 'worker0' (process {pid or os.getpid()}) and has no "
        "worker of its own: init_rpc can be called here"
    )


def same(value):
    return value


def call_often():
    told = {refusal(lambda: rpc.rpc_sync("worker1", same, ("child's",), timeout=2))}
    for _ in range(100):
        told.add(refusal(lambda: rpc.rpc_sync("worker1", same, ("child's",), timeout=2)))
        told.add(refusal(lambda: rpc.rpc_async("worker1", same, ("child's",), timeout=2).wait()))
    return told


def test_calls_of_a_child_are_refused_and_its_parents_are_answered():
    with cluster(2):
        rpc.rpc_sync("worker1", same, (0,))
        child, number = Child(call_often), 0
        while not child.is_done() or number < 1000:
            number += 1
            assert rpc.rpc_sync("worker1", same, (number,), timeout=PATIENCE) == number
        assert child.result() == {refused()}


def use_everything(user, owned, pending):
    agent = held["worker"].agent
    with contextlib.suppress(NotInitialized):
        held["worker"].shutdown(graceful=True, timeout=1)
    held["worker"].close()
    uses = (
        lambda: rpc.rpc_sync("worker1", same, (1,)),
        lambda: rpc.rpc_async("worker1", same, (1,)),
        lambda: rpc.rpc_async("worker0", same, (1,)),
        lambda: rpc.remote("worker1", same, (1,)),
        rpc.get_worker_info,
        lambda: rpc.get_worker_info("worker1"),
        rpc.get_rpc_timeout,
        rpc.shutdown,
        lambda: rpc.shutdown(graceful=False),
        lambda: dist_autograd.context().__enter__(),
        lambda: dist_autograd.backward(1, [torch.ones(())]),
        lambda: dist_autograd.get_gradients(1),
        lambda: rpc.RRef(1),
        user.to_here,
        user.owner,
        user._serialize,
        user._get_future,
        user._get_type,
        lambda: user.backward(1),
        lambda: user.rpc_sync().bit_length(),
        lambda: user.rpc_async().bit_length(),
        lambda: user.remote().bit_length(),
        lambda: owned.rpc_sync().bit_length(),
        pending.to_here,
        pending.local_value,
        lambda: pending.rpc_async().bit_length(),
        lambda: agent.call(1, same, (1,)),
        lambda: agent.call_async(0, same, (1,)),
    )
    return rpc.is_initialized(), {refusal(use) for use in uses}, owned.local_value()


def wait_for_ever():
    never.wait(PATIENCE)


def go_on():
    never.set()


@pytest.mark.parametrize("has_asked_for_the_type", [False, True])
def test_everything_is_refused_in_a_child_and_says_why(has_asked_for_the_type):
    with cluster(2):
        user = rpc.remote("worker1", wait_for_ever)
        if has_asked_for_the_type:
            user.rpc_async().bit_length()  # the answer comes to the parent
        held["worker"] = current.current()
        try:
            pending = rpc.remote("worker0", wait_for_ever)
            is_initialized, told, owned = in_child(use_everything, user, rpc.RRef(7), pending)
        finally:
            held.clear()
            go_on()
            rpc.rpc_sync("worker1", go_on)
        assert not is_initialized
        assert told == {refused()}
        assert owned == 7  # it is in the memory that the child has a copy of
        assert user.to_here() is None
        assert pending.to_here() is None
    never.clear()


def end_worker():
    told = refusal(lambda: rpc.shutdown(graceful=False))
    with contextlib.suppress(NotInitialized):
        held["worker"].close()
    return told


def test_a_shutdown_in_a_child_does_not_end_the_parents_worker():
    with cluster(2):
        open_call = rpc.rpc_async("worker1", wait_for_ever)
        reference = rpc.remote("worker1", same, (5,))
        held["worker"] = current.current()
        try:
            assert in_child(end_worker) == refused()
        finally:
            held.clear()
        rpc.rpc_sync("worker1", go_on)
        assert open_call.wait() is None
        assert rpc.rpc_sync("worker1", rpc.rpc_sync, ("worker0", same, (3,))) == 3
        assert reference.to_here() == 5


def forget(reference):
    reference = held.pop("reference")
    del reference
    gc.collect()


def test_a_reference_that_dies_in_a_child_lives_on_in_its_parent():
    with cluster(2):
        held["reference"] = rpc.remote("worker1", same, (5,))
        held["reference"].to_here()
        in_child(forget, None)
        for _ in range(10):
            assert held["reference"].to_here() == 5
        del held["reference"]


@pytest.mark.parametrize("is_another_threads", [False, True])
def test_shared_memory_that_a_child_drops_is_not_used_under_the_parents_tensor(is_another_threads):
    """What only another thread holds is gone in the child before anything runs there."""
    size, filled, done = 1 << 18, threading.Event(), threading.Event()
    own, found = threading.local(), []

    def keep():
        own.tensor = rpc.rpc_sync("worker1", torch.full, ((size,), -1.0))
        filled.set()
        done.wait(PATIENCE)
        found.append(own.tensor.eq(-1).all().item())

    def drop():
        held.clear()
        gc.collect()

    with cluster(2):
        thread = threading.Thread(target=keep)
        if is_another_threads:
            thread.start()
            filled.wait(PATIENCE)
        else:
            held["tensor"] = rpc.rpc_sync("worker1", torch.full, ((size,), -1.0))
        in_child(drop)
        for number in range(8):
            assert rpc.rpc_sync("worker1", torch.full, ((size,), float(number)))[0] == number
        if is_another_threads:
            done.set()
            thread.join()
        else:
            found.append(held.pop("tensor").eq(-1).all().item())
    assert found == [True]


def join_group(place, rank):
    """Two forked processes become a group, and use what they have from their parent."""
    options = rpc.RpcOptions(init_method=f"file://{place}")
    rpc.init_rpc(f"child{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    other = f"child{1 - rank}"
    large = rpc.rpc_sync(other, torch.full, ((1 << 18,), float(rank)))
    told = refusal(lambda: rpc.rpc_sync(other, same, (held["reference"],)))
    with dist_autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        dist_autograd.backward(context_id, [rpc.rpc_sync(other, torch.mul, (x, 3)).sum()])
        gradient = dist_autograd.get_gradients(context_id)[x].tolist()
    name = rpc.get_worker_info().name
    rpc.shutdown()
    return name, large[0].item(), gradient, told, refusal(rpc.shutdown)


def test_children_can_be_workers_of_another_group(tmp_path):
    with cluster(2):
        held["reference"] = rpc.remote("worker1", same, (5,))
        children = [Child(join_group, tmp_path / "store", rank) for rank in range(2)]
        assert rpc.rpc_sync("worker1", same, (3,)) == 3
        for rank, child in enumerate(children):
            *seen, told, end = child.result()
            assert seen == [f"child{rank}", rank, [3, 3]]
            assert told == refused()
            assert end.startswith("this worker has shut down")
        assert held.pop("reference").to_here() == 5


def start_and_end(place):
    told = refusal(rpc.shutdown)
    options = rpc.RpcOptions(init_method=f"file://{place}")
    rpc.init_rpc("child", rank=0, world_size=1, rpc_backend_options=options)
    rpc.shutdown()
    return told


def test_a_lock_that_another_thread_holds_is_free_in_the_child(tmp_path):
    with cluster(2):
        worker = current.current()
        locks = [api._init_lock, worker._closing_lock, worker.references.table._steps._turns._lock]
        locks += [peer._connections_lock for peer in worker.agent.network.members.peers()]
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            child = Child(start_and_end, tmp_path / "store")
        assert child.result() == refused()


def test_forks_in_the_middle_of_many_calls():
    stop, wrong = threading.Event(), []
    tensor = torch.arange(1 << 16)

    def call(number):
        reference = rpc.remote("worker1", same, (number,))
        while not stop.is_set():
            answers = (
                rpc.rpc_sync("worker1", same, (number,), timeout=PATIENCE),
                rpc.rpc_async("worker1", same, (number,), timeout=PATIENCE).wait(),
                reference.rpc_sync(timeout=PATIENCE).__int__(),
                rpc.remote("worker1", same, (number,)).to_here(),
            )
            large = rpc.rpc_sync("worker1", same, (tensor + number,), timeout=PATIENCE)
            if answers != (number,) * 4 or not torch.equal(large, tensor + number):
                wrong.append((number, answers, large))

    with cluster(2):
        threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                assert in_child(call_often) == {refused()}
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert not wrong


def fork_and_leave(way):
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return "the parent's"
    if way == "exit":
        sys.exit(0)
    return "the child's"


@pytest.mark.parametrize("way", ["exit", "return"])
def test_a_function_that_forks_is_answered_by_its_own_process(way):
    with cluster(2):
        calls = [rpc.rpc_async("worker1", fork_and_leave, (way,), timeout=PATIENCE)]
        for _ in range(3):
            answer = rpc.rpc_sync("worker1", fork_and_leave, (way,), timeout=PATIENCE)
            assert answer == "the parent's"
            assert rpc.rpc_sync("worker1", same, (3,)) == 3
        assert [call.wait() for call in calls] == ["the parent's"]


def start_child():
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return pid


def test_a_worker_that_dies_is_missed_although_its_children_live():
    with cluster(2, heartbeat_timeout=60.0) as group:
        pid = rpc.rpc_sync("worker1", start_child)
        try:
            call = rpc.rpc_async("worker1", wait_for_ever, timeout=PATIENCE)
            group.kill("worker1")
            with pytest.raises(WorkerLost):
                call.wait()
        finally:
            os.kill(pid, signal.SIGKILL)


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor(index**2)


def test_data_loaders_work_beside_a_worker():
    with cluster(2):
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=5, num_workers=2, multiprocessing_context="fork"
        )
        for _ in range(2):
            sums = [rpc.rpc_sync("worker1", torch.sum, (batch,)).item() for batch in loader]
            assert sum(sums) == sum(index**2 for index in range(20))


def run(code, *arguments):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_the_end_of_a_childs_interpreter_leaves_the_meeting_place_to_its_parent(tmp_path, scheme):
    printed = run(
        '''
        import gc, os, subprocess, sys
        import telegrad.autograd as dist_autograd
        from telegrad import rpc
        from telegrad.launch.environment import reserve_port
        with reserve_port() as reserved:
            port = reserved.getsockname()[1]
        options = rpc.RpcOptions(init_method=sys.argv[1].format(port=port))
        rpc.init_rpc("worker0", rank=0, rpc_backend_options=options)
        kept = rpc.RRef(5)
        with dist_autograd.context():
            pid = os.fork()
            if pid == 0:
                del kept
                gc.collect()
                sys.exit(0)
        print(os.waitpid(pid, 0)[1], flush=True)
        newcomer = f"""if True:
            from telegrad import rpc
            options = rpc.RpcOptions(init_method={options.init_method!r})
            rpc.init_rpc("worker1", rank=1, rpc_backend_options=options)
            print(rpc.rpc_sync("worker0", abs, (-3,)), flush=True)
            rpc.shutdown()
        """
        subprocess.run([sys.executable, "-c", newcomer], check=True)
        print(kept.to_here())
        rpc.shutdown()
        ''',
        "tcp://127.0.0.1:{port}" if scheme == "tcp" else f"file://{tmp_path}/store",
    )
    assert printed.split() == ["0", "3", "5"]


def test_the_drop_in_refuses_in_a_child_and_starts_anew(tmp_path):
    printed = run(
        """
        import os, sys, telegrad
        telegrad.install()
        import torch.distributed.autograd as dist_autograd
        import torch.distributed.rpc as rpc

        def start(name):
            place = f"file://{sys.argv[1]}/{name}"
            options = rpc.TensorPipeRpcBackendOptions(init_method=place)
            rpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=options)

        start("parent")
        agent = rpc.api._get_current_rpc_agent()
        rpc.api._all_gather(1)
        pid = os.fork()
        if pid == 0:
            assert not rpc._is_current_rpc_agent_set()
            for use in (
                lambda: rpc.rpc_sync("parent", abs, (-1,)),
                lambda: rpc.rpc_async("parent", abs, (-1,)),
                lambda: rpc.remote("parent", abs, (-1,)),
                rpc.get_worker_info,
                rpc.api._get_current_rpc_agent,
                lambda: dist_autograd.context().__enter__(),
                rpc.shutdown,
                lambda: rpc.shutdown(graceful=False),
                agent.get_worker_infos,
                agent.sync,
            ):
                try:
                    use()
                except RuntimeError as error:
                    assert f"forked from worker 'parent' (process {os.getppid()})" in str(error)
                else:
                    raise AssertionError("not refused")
            agent.shutdown()
            start("child")
            assert rpc.rpc_sync("child", abs, (-3,)) == 3
            assert rpc.api._all_gather(2) == {"child": 2}
            rpc.shutdown()
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        print(rpc.rpc_sync("parent", abs, (-3,)), rpc.api._all_gather(1))
        rpc.shutdown()
        """,
        tmp_path,
    )
    assert printed == "3 {'parent': 1}\n"


LARGE = 1 << 18  # elements: through shared memory


def keep(tensor):
    held["tensor"] = tensor


def fork_and_look():
    """Returns what a child sees of the kept tensor before and after this process has let go of it,
    and the memory has been filled anew."""
    line, there = forking.Pipe()
    process = forking.Process(target=look_twice, args=(there,))
    process.start()
    there.close()
    held.pop("tensor")
    held["child"] = line, process


def look_twice(line):
    before = first_element()
    line.recv()
    line.send((before, first_element()))


def what_the_child_saw():
    line, process = held.pop("child")
    line.send("now")
    assert line.poll(PATIENCE), "the child hangs"
    seen = line.recv()
    process.join(PATIENCE)
    line.close()
    return seen


def write_in_child():
    in_child(overwrite)  # by numpy: torch's own threads do not survive a fork
    return held.pop("tensor").mean().item()


def overwrite():
    held["tensor"].numpy()[:] = 7.0


def first_element():
    return float(held["tensor"].numpy()[0])


def test_a_childs_received_tensors_are_its_own():
    with cluster(2):
        rpc.rpc_sync("worker1", keep, (torch.ones(LARGE),))
        rpc.rpc_sync("worker1", fork_and_look)
        for _ in range(4):
            rpc.rpc_sync("worker1", same, (torch.full((LARGE,), 5.0),))
        assert rpc.rpc_sync("worker1", what_the_child_saw) == (1.0, 1.0)


def test_what_a_child_writes_to_received_tensors_stays_in_it():
    with cluster(2):
        rpc.rpc_sync("worker1", keep, (torch.ones(LARGE),))
        assert rpc.rpc_sync("worker1", write_in_child) == 1.0


def test_a_childs_results_that_came_back_in_the_requests_memory_are_its_own():
    with cluster(2):
        held["tensor"] = rpc.rpc_sync("worker1", same, (torch.ones(LARGE),))
        assert write_in_child() == 1.0
