"""What is a silence that means a loss, and what is not. Real processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

from telegrad import rpc
from telegrad.errors import WorkerLost
from telegrad.rpc.connections.processor_time import ProcessorTime
from telegrad.rpc.group import current
from telegrad.testing.cluster import cluster

HEARTBEAT = {"heartbeat_interval": 0.2, "heartbeat_timeout": 1.5}


def same(x):
    return x


def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def keep_the_interpreter_lock(seconds):
    """One operation in C, that does not give it up."""
    begun, count = time.perf_counter(), 10**6
    sum(range(count))
    took = time.perf_counter() - begun
    return sum(range(int(count * seconds / took)))


def test_a_worker_with_a_long_queue_of_calls_is_alive():
    with cluster(2, num_worker_threads=2, **HEARTBEAT):
        reference = rpc.remote("worker1", same, (5,))
        assert reference.to_here() == 5
        futures = [rpc.rpc_async("worker1", compute, (0.02,), timeout=0) for _ in range(150)]
        for future in futures:
            future.wait()
        assert reference.to_here() == 5


def test_a_worker_in_one_long_operation_is_alive():
    with cluster(2, **HEARTBEAT):
        reference = rpc.remote("worker1", same, (5,))
        assert reference.to_here() == 5
        assert rpc.rpc_sync("worker1", keep_the_interpreter_lock, (4,), timeout=0) > 0
        assert reference.to_here() == 5


def test_a_worker_that_is_stopped_is_lost():
    with cluster(2, graceful=False, **HEARTBEAT) as group:
        rpc.rpc_sync("worker1", same, (1,))
        group.pause("worker1")
        with pytest.raises(WorkerLost, match="no sign of life"):
            rpc.rpc_sync("worker1", same, (1,), timeout=0)
        group.resume("worker1")


def test_processor_time_is_seen_to_grow_only_where_it_does():
    with cluster(2, graceful=False) as group:
        rpc.rpc_async("worker1", same, (1,)).wait()
        (multiplex,) = current.current().agent.network.members.peer(1)._multiplexes
        process = multiplex.peer_process
        assert process == group.pid("worker1")

        def grows(process):
            looks = ProcessorTime(0.8)
            looks.has_grown(process, time.monotonic())
            time.sleep(0.2)
            return looks.has_grown(process, time.monotonic())

        busy = rpc.rpc_async("worker1", compute, (1.0,))
        assert grows(process)
        busy.wait()
        group.pause("worker1")
        assert not grows(process)
        group.resume("worker1")
        assert not grows(0)
        assert not grows(2**22 + 1)  # there is no such process


PASSIVE = """
    import sys
    from telegrad import rpc

    options = rpc.RpcOptions(
        init_method=f"file://{sys.argv[2]}", heartbeat_interval=0.2, heartbeat_timeout=1.0
    )
    rank = int(sys.argv[1])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        rpc.rpc_sync("worker1", abs, (1,))
        print("called", flush=True)
        sys.stdin.readline()
    rpc.shutdown()
"""


def test_a_worker_that_gives_up_on_a_silent_one_at_the_end_says_so(tmp_path):
    """It waits in `shutdown`, as passive workers do, while the driver is stopped."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PASSIVE), str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    driver, passive = workers
    try:
        assert driver.stdout.readline() == "called\n"
        driver.send_signal(19)  # SIGSTOP
        _, complaint = passive.communicate(timeout=60)
        assert passive.returncode == 1
        assert "worker 'worker1' ends without worker 'worker0'" in complaint
        assert "no sign of life" in complaint
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
