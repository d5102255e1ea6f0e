"""What happens to the others when a worker dies, stops or leaves. Real processes, real signals."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from telegrad import rpc
from telegrad.compat.futures import collect_all
from telegrad.errors import RRefError, TelegradError, WorkerLost
from telegrad.rpc.group import current
from telegrad.testing.cluster import cluster

SOON = 2.0
X = torch.ones(2)


def add(a, b):
    return a + b


def pid():
    return os.getpid()


def sleep(seconds):
    time.sleep(seconds)


def ask(to, func, args=()):
    return rpc.rpc_sync(to, func, args)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


held = []


def hold(rref):
    held.append(rref)


def release_held():
    held.clear()


class Waiter:
    """Something that waits, in a thread of its own."""

    def __init__(self, wait):
        self.error = None
        self.ended_at = None
        self._thread = threading.Thread(target=self._run, args=(wait,))
        self._thread.start()

    def _run(self, wait):
        try:
            wait()
        except Exception as error:
            self.error = error
        self.ended_at = time.monotonic()

    def join(self):
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_killed_worker_fails_everything_that_depends_on_it_at_once(transport):
    with cluster(3, transport=transport) as group:
        rref = rpc.remote("worker1", add, (1, 2))
        pending = rpc.remote("worker1", sleep, (60,))
        assert rref.to_here() == 3
        future = rpc.rpc_async("worker1", sleep, (60,))
        waiters = [
            Waiter(lambda: rpc.rpc_sync("worker1", sleep, (60,))),
            Waiter(future.wait),
            Waiter(pending.to_here),
            # worker2 waits for worker1 on our behalf
            Waiter(lambda: rpc.rpc_sync("worker2", ask, ("worker1", sleep, (60,)))),
        ]
        wait_for_calls("worker1", 5)
        killed_at = time.monotonic()
        group.kill("worker1")
        for waiter in waiters:
            waiter.join()
            assert isinstance(waiter.error, WorkerLost), waiter.error
            assert "worker1" in str(waiter.error)
            assert waiter.error.worker == "worker1"
            assert waiter.ended_at - killed_at < SOON
        # later uses fail at once, too
        for use in (
            rref.to_here,
            lambda: rpc.rpc_sync("worker1", add, (1, 2)),
            lambda: rpc.rpc_async("worker1", add, (1, 2)).wait(),
            lambda: rpc.remote("worker1", add, (1, 2)).to_here(),
        ):
            with pytest.raises(WorkerLost, match="worker1"):
                use()
        assert time.monotonic() - killed_at < 2 * SOON
        # and everybody else goes on
        assert rpc.rpc_sync("worker2", add, (torch.ones(2), 1)).sum() == 4


calls_running = threading.Semaphore(0)


def wait_for_calls(worker, count):
    """Until so many calls run there: they have arrived, and are asleep."""
    while rpc.rpc_sync(worker, count_running) < count:
        time.sleep(0.01)


def count_running():
    begun, ended = current.current().agent.service.work_counts()
    return begun - ended


def test_a_call_for_which_there_is_no_connection_is_named():
    with cluster(2) as group:
        group.kill("worker1")
        calls = {
            f"{__name__}.add": lambda: rpc.rpc_sync("worker1", add, (1, 2)),
            "the call of torch.add": lambda: rpc.rpc_sync("worker1", torch.add, (X, 1)),
            f"{__name__}.pid": lambda: rpc.rpc_async("worker1", pid).wait(),
            f"remote({__name__}.sleep)": lambda: rpc.remote("worker1", sleep, (0,)).to_here(),
        }
        for name, call in calls.items():
            with pytest.raises(WorkerLost) as caught:
                call()
            assert "worker 'worker1' cannot be reached: " in str(caught.value)
            assert f"{name} was not sent" in str(caught.value)
            assert caught.value.worker == "worker1"


def test_a_worker_that_kills_itself_in_a_call_is_named():
    with cluster(2) as group:
        group._expected_dead.add("worker1")
        with pytest.raises(WorkerLost, match=r"worker1.*die"):
            rpc.rpc_sync("worker1", die)


def test_a_stopped_worker_is_noticed_by_its_silence():
    with cluster(2, heartbeat_interval=0.1, heartbeat_timeout=0.6, graceful=False) as group:
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
        group.pause("worker1")
        try:
            begun = time.monotonic()
            with pytest.raises(WorkerLost, match=r"worker1.*no sign of life"):
                rpc.rpc_sync("worker1", add, (1, 1))
            assert time.monotonic() - begun < 0.6 + SOON
        finally:
            group.resume("worker1")


def test_a_worker_that_goes_on_after_a_pause_can_be_called_again():
    with cluster(2, heartbeat_interval=0.1, heartbeat_timeout=0.5, graceful=False) as group:
        group.pause("worker1")
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("worker1", add, (1, 1))
        group.resume("worker1")
        end = time.monotonic() + 10
        while True:
            try:
                assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
                break
            except WorkerLost:
                assert time.monotonic() < end


def test_a_worker_that_comes_back_under_its_name_can_be_called_again():
    with cluster(3) as group:
        before = rpc.rpc_sync("worker1", pid)
        old = rpc.remote("worker1", add, (1, 1))
        assert old.to_here() == 2
        group.kill("worker1")
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("worker1", pid)
        group.start("worker1", 1)
        group.wait_until_ready("worker1")
        after = rpc.rpc_sync("worker1", pid)
        assert after != before
        assert rpc.rpc_sync("worker2", ask, ("worker1", pid)) == after
        assert rpc.rpc_sync("worker1", ask, ("worker0", pid)) == os.getpid()
        fresh = rpc.remote("worker1", add, (2, 2))
        assert fresh.to_here() == 4
        with pytest.raises((WorkerLost, RRefError)):
            old.to_here()


def test_the_forks_of_a_dead_worker_are_struck_off():
    with cluster(3) as group:
        rref = rpc.RRef(torch.ones(1))
        rpc.rpc_sync("worker1", hold, (rref,))
        rpc.rpc_sync("worker2", hold, (rref,))
        assert rpc._rref_context_get_debug_info()["num_forks"] == "2"
        group.kill("worker1")
        until(lambda: rpc._rref_context_get_debug_info()["num_forks"] == "1")
        rpc.rpc_sync("worker2", release_held)
        until(lambda: rpc._rref_context_get_debug_info()["num_forks"] == "0")
        assert rref.local_value().sum() == 1


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_an_ungraceful_end_fails_the_others_calls_with_its_reason():
    with cluster(2, graceful=False):
        rpc.rpc_async("worker1", stop_here)
        with pytest.raises(WorkerLost, match="worker1"):
            while True:
                rpc.rpc_sync("worker1", add, (1, 1))


def stop_here():
    threading.Thread(target=rpc.shutdown, args=(False,)).start()


def test_a_graceful_end_waits_for_outstanding_work_everywhere():
    with cluster(3):
        futures = [rpc.rpc_async("worker1", ask, ("worker2", sleep, (0.3,))) for _ in range(3)]
        rpc.rpc_async("worker1", leave_a_note, (0.2,))
    assert [future.wait() for future in futures] == [None] * 3


def leave_a_note(seconds):
    time.sleep(seconds)
    rpc.rpc_async("worker2", sleep, (seconds,))


def test_a_graceful_end_does_not_wait_for_the_dead():
    with cluster(3) as group:
        group.kill("worker1")


def test_a_graceful_end_does_not_look_for_the_dead_again(monkeypatch):
    watched = []
    with cluster(3) as group:
        network = current.current().agent.network
        rpc.rpc_sync("worker1", add, (1, 1))
        group.kill("worker1")
        until(lambda: network.members.is_lost(1))
        monkeypatch.setattr(network.members, "watch", watched.append)
    assert set(watched) == {0, 2}


def test_a_graceful_end_without_the_others_ends_by_its_timeout():
    with cluster(2, graceful=False):
        begun = time.monotonic()
        with pytest.raises(TelegradError):
            rpc.shutdown(timeout=0.3)
        assert time.monotonic() - begun < 0.3 + SOON
        assert not rpc.is_initialized()


def test_an_end_does_not_wait_for_a_worker_that_has_stopped_in_the_middle_of_a_message():
    with cluster(2, shared_memory=False, graceful=False) as group:
        rpc.rpc_sync("worker1", add, (1, 1))
        multiplex = current.current().agent.network.members.peer(1).multiplex()
        group.pause("worker1")
        caught = []

        def send():
            try:
                rpc.rpc_async("worker1", len, (torch.ones(1 << 22),)).wait()
            except WorkerLost as error:
                caught.append(error)

        sender = threading.Thread(target=send)
        sender.start()
        until(
            lambda: multiplex._rest_is_sent is not None
        )  # more than fits into the socket: it stays so
        ended = threading.Event()
        end = threading.Thread(target=lambda: (rpc.shutdown(graceful=False), ended.set()))
        end.start()
        has_ended = ended.wait(10.0)
        group.resume("worker1")
        end.join()
        sender.join()
        assert has_ended
        assert "worker1" in str(caught[0])


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_ctrl_c_during_a_call_leaves_the_worker_usable(to):
    with cluster(2):
        main = threading.get_ident()
        timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            rpc.rpc_sync(to, sleep, (1.0,))
        timer.join()
        assert [rpc.rpc_sync(to, add, (i, 1)) for i in range(5)] == [1, 2, 3, 4, 5]


class Sleeper:
    def sleep(self, seconds):
        time.sleep(seconds)


def later(to):
    return rpc.rpc_async(to, sleep, (2.0,))


@pytest.mark.parametrize("to", ["worker0", "worker1"])
@pytest.mark.parametrize(
    "make",
    [
        later,
        lambda to: later(to).then(lambda done: done.wait()),
        lambda to: later(to).then(lambda done: done.wait()).then(lambda done: done.wait()),
        lambda to: rpc.remote(to, Sleeper).rpc_async().sleep(2.0),
        lambda to: collect_all([later(to), later(to)]),
    ],
    ids=["call", "then", "then, then", "method", "several"],
)
def test_ctrl_c_ends_the_wait_for_a_future(to, make):
    with cluster(2):
        future = make(to)
        main = threading.get_ident()
        timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            future.wait()
        assert not future.done()
        timer.join()
        future.wait()


def test_ctrl_c_ends_a_graceful_shutdown_that_waits_for_others():
    main = threading.get_ident()
    ended_otherwise = threading.Event()
    with cluster(2, graceful=False, heartbeat_timeout=1000) as group:
        group.pause("worker1")  # it lives, and comes to no meeting

        def end_it_otherwise():
            ended_otherwise.set()
            group.kill("worker1")

        timers = [
            threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)),
            threading.Timer(SOON, end_it_otherwise),
        ]
        for timer in timers:
            timer.start()
        with pytest.raises(KeyboardInterrupt):
            rpc.shutdown()
        timers[1].cancel()
        assert not ended_otherwise.is_set()
        assert not rpc.is_initialized()
        group.kill("worker1")
        for timer in timers:
            timer.join()


def test_ctrl_c_ends_the_wait_for_a_value_whose_method_is_called():
    with cluster(2):
        rref = rpc.remote("worker1", sleep, (2.0,))
        main = threading.get_ident()
        timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            rref.rpc_sync().__bool__()
        assert not rref._get_type(blocking=False).done()
        timer.join()


def test_a_missing_worker_is_named_when_the_group_does_not_come_together(tmp_path):
    options = rpc.RpcOptions(init_method=f"file://{tmp_path}/store", rpc_timeout=0.5)
    with pytest.raises(TelegradError, match="rank 1 of 2 did not join"):
        rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
    assert not rpc.is_initialized()


def test_a_rank_that_is_taken_by_a_living_worker_is_refused():
    with cluster(2) as group:
        group.start("impostor", 1)
        group._expected_dead.add("impostor")
        with pytest.raises(RuntimeError, match="before it had joined"):
            group.wait_until_ready("impostor")
        assert rpc.rpc_sync("worker1", add, (1, 1)) == 2


def test_init_shutdown_init_again_in_one_process(tmp_path):
    for round_ in range(3):
        options = rpc.RpcOptions(init_method=f"file://{tmp_path}/store")
        rpc.init_rpc(f"solo{round_}", rank=0, world_size=1, rpc_backend_options=options)
        assert rpc.rpc_sync(f"solo{round_}", add, (1, round_)) == 1 + round_
        rpc.shutdown()
