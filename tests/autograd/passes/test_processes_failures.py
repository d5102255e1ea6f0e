"""What becomes of a backward pass when something goes wrong. Real processes, real signals."""

from __future__ import annotations

import contextlib
import signal
import threading
import time

import process_programs as programs
import pytest
import torch
from process_programs import Waiter, counts_at, leaf, until, wait_until_clean, wait_until_no_pass

import telegrad.autograd as dist_autograd
from telegrad import rpc
from telegrad.autograd.passes.messages import GradientMessage
from telegrad.errors import BackwardError, ContextError, WorkerLost
from telegrad.testing.cluster import cluster
from telegrad.testing.faults import Faults
from telegrad.wire.frames import Kind

SOON = 2.0


def gated(worker):
    """A loss that ends behind a gate there."""
    return rpc.rpc_sync(worker, programs.gated, (worker, leaf("x"))).sum()


def gradient_of(context_id):
    return dist_autograd.get_gradients(context_id)[leaf("x")]


def wanted(worker):
    (gradient,) = torch.autograd.grad(programs.layer(worker, leaf("x")).sum(), leaf("x"))
    return gradient


def workers(size):
    return [f"worker{i}" for i in range(size)]


class TestAnExceptionInABackwardFunction:
    def test_reaches_the_caller_and_the_context_can_run_again(self):
        with cluster(3):
            with dist_autograd.context() as context_id:
                loss = gated("worker1") + gated("worker2")
                rpc.rpc_sync("worker1", programs.set_fault, ("raise",))
                with pytest.raises(BackwardError, match="Error on Node 1: a fault") as caught:
                    dist_autograd.backward(context_id, [loss], retain_graph=True)
                assert caught.value.worker == 1
                assert "ValueError: a fault in a backward function" in caught.value.traceback
                assert "process_programs.py" in str(caught.value)
                wait_until_no_pass(workers(3))
                rpc.rpc_sync("worker1", programs.set_fault)
                before = dist_autograd.get_gradients(context_id).get(leaf("x"), 0)
                dist_autograd.backward(context_id, [loss])
                torch.testing.assert_close(
                    gradient_of(context_id) - before, wanted("worker1") + wanted("worker2")
                )
            wait_until_clean(workers(3))

    def test_that_would_end_a_program_ends_the_pass(self):
        with cluster(2):
            rpc.rpc_sync("worker1", programs.set_fault, ("exit",))
            with dist_autograd.context() as context_id:
                loss = gated("worker1")
                with pytest.raises(BackwardError, match="Error on Node 1: a program that ends"):
                    dist_autograd.backward(context_id, [loss])
                wait_until_no_pass(workers(2))
            wait_until_clean(workers(2))

    def test_behind_another_worker_reaches_the_caller(self):
        with cluster(3):
            rpc.rpc_sync("worker2", programs.set_fault, ("raise",))
            with dist_autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", gated, ("worker2",))
                with pytest.raises(BackwardError, match="Error on Node 2: a fault"):
                    dist_autograd.backward(context_id, [loss])
                wait_until_no_pass(workers(3))
            wait_until_clean(workers(3))

    @pytest.mark.parametrize("faulty", ["worker1", "worker2"])
    def test_reaches_a_caller_that_waits_for_another_worker(self, faulty):
        blocked = "worker2" if faulty == "worker1" else "worker1"
        with cluster(3):
            rpc.rpc_sync(faulty, programs.set_fault, ("raise",))
            rpc.rpc_sync(blocked, programs.set_fault, ("block",))
            with dist_autograd.context() as context_id:
                loss = gated("worker1") + gated("worker2")
                begun = time.monotonic()
                with pytest.raises(BackwardError, match=f"Error on Node {faulty[-1]}"):
                    dist_autograd.backward(context_id, [loss])
                assert time.monotonic() - begun < SOON
                rpc.rpc_sync(blocked, programs.set_fault)
                wait_until_no_pass(workers(3))
            wait_until_clean(workers(3))

    def test_here_is_raised_as_it_is(self):
        with cluster(2):
            programs.set_fault("raise")
            try:
                with dist_autograd.context() as context_id:
                    loss = programs.Gate.apply(gated("worker1"))
                    with pytest.raises(ValueError, match="a fault in a backward function"):
                        dist_autograd.backward(context_id, [loss])
                    wait_until_no_pass(workers(2))
            finally:
                programs.set_fault()
            wait_until_clean(workers(2))


def lost_in_a_pass(worker):
    return f"^Error on Node {worker[-1]}: worker '{worker}' was lost during a backward pass: "


class TestAKilledWorker:
    def test_before_backward_fails_it(self):
        with cluster(3) as group:
            with dist_autograd.context() as context_id:
                loss = gated("worker1") + gated("worker2")
                group.kill("worker1")
                with pytest.raises(WorkerLost, match=lost_in_a_pass("worker1")) as caught:
                    dist_autograd.backward(context_id, [loss], retain_graph=True)
                assert caught.value.worker == "worker1"
                wait_until_no_pass(["worker0", "worker2"])
            wait_until_clean(["worker0", "worker2"])

    def test_that_only_others_know_fails_it(self):
        with cluster(3) as group:
            with dist_autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", gated, ("worker2",))
                group.kill("worker2")
                begun = time.monotonic()
                with pytest.raises(WorkerLost, match=lost_in_a_pass("worker2")) as caught:
                    dist_autograd.backward(context_id, [loss])
                assert caught.value.worker == "worker2"
                assert time.monotonic() - begun < SOON
                wait_until_no_pass(["worker0", "worker1"])
            wait_until_clean(["worker0", "worker1"])

    @pytest.mark.parametrize("killed", ["worker1", "worker2"])
    def test_during_backward_fails_it_while_another_is_busy(self, killed):
        """Whichever of the two the caller talks to."""
        left = "worker2" if killed == "worker1" else "worker1"

        def run():
            with dist_autograd.context() as context_id:
                loss = gated("worker1") + gated("worker2")
                dist_autograd.backward(context_id, [loss])

        with cluster(3) as group:
            for worker in workers(3)[1:]:
                rpc.rpc_sync(worker, programs.set_fault, ("block",))
            waiter = Waiter(run)
            for worker in workers(3)[1:]:
                rpc.rpc_sync(worker, programs.wait_until_reached)
            killed_at = time.monotonic()
            group.kill(killed)
            waiter.join()
            assert isinstance(waiter.error, WorkerLost), waiter.error
            assert f"Error on Node {killed[-1]}" in str(waiter.error)
            assert waiter.ended_at - killed_at < SOON
            rpc.rpc_sync(left, programs.set_fault)
            wait_until_clean(["worker0", left])

    def test_behind_a_busy_one_fails_it(self):
        """worker0 waits for worker1, which waits in a hook; worker2 is behind it."""

        def run():
            with dist_autograd.context() as context_id:
                x = leaf("x")
                y = rpc.rpc_sync("worker1", programs.gated_on_a_way, ("worker1", "worker2", x))
                dist_autograd.backward(context_id, [y.sum()])

        with cluster(3) as group:
            rpc.rpc_sync("worker1", programs.set_fault, ("block",))
            waiter = Waiter(run)
            rpc.rpc_sync("worker1", programs.wait_until_reached)
            killed_at = time.monotonic()
            group.kill("worker2")
            waiter.join()
            assert isinstance(waiter.error, WorkerLost), waiter.error
            assert waiter.ended_at - killed_at < SOON
            rpc.rpc_sync("worker1", programs.set_fault)
            wait_until_clean(["worker0", "worker1"])

    def test_by_its_own_hand_in_a_backward_function_fails_it(self):
        with cluster(3) as group:
            group._expected_dead.add("worker1")
            rpc.rpc_sync("worker1", programs.set_fault, ("die",))
            with dist_autograd.context() as context_id:
                loss = rpc.rpc_sync("worker2", gated, ("worker1",))
                with pytest.raises(WorkerLost, match=lost_in_a_pass("worker1")):
                    dist_autograd.backward(context_id, [loss])
            wait_until_clean(["worker0", "worker2"])

    @pytest.mark.parametrize("kind", [Kind.GRADIENTS, Kind.PASS_ANSWER, Kind.RECEIPT])
    def test_at_any_message_of_the_pass_fails_it_or_comes_too_late(self, kind):
        faults = Faults().kill_at(kind, on="worker1")
        with cluster(3, wrap_transport=faults) as group:
            group._expected_dead.add("worker1")
            with contextlib.suppress(WorkerLost), dist_autograd.context() as context_id:
                route = ["worker2", "worker1", "worker2", "worker1"]
                y = rpc.rpc_sync("worker2", programs.relay, ("synchronously", route, leaf("x")))
                dist_autograd.backward(context_id, [y.sum()])
            wait_until_clean(["worker0", "worker2"])

    def test_leaves_its_contexts_to_nobody(self):
        with cluster(3) as group:
            rpc.rpc_sync("worker1", leave_a_context_open, (["worker0", "worker2"],))
            assert counts_at(workers(3)) == dict.fromkeys(workers(3), (0, 1))
            group.kill("worker1")
            wait_until_clean(["worker0", "worker2"])

    @pytest.mark.parametrize("is_left_before", [False, True])
    def test_between_two_others_leaves_the_context_to_neither(self, is_left_before):
        """worker2 knows of the context by the dead one alone, which told nobody of worker2."""
        with cluster(3) as group:
            with dist_autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", gated, ("worker2",))
                if not is_left_before:
                    group.kill("worker1")
                    with pytest.raises(WorkerLost, match="Error on Node 1"):
                        dist_autograd.backward(context_id, [loss])
                else:
                    group.pause("worker1")  # it will not hear of the release
            if is_left_before:
                group.kill("worker1")
            wait_until_clean(["worker0", "worker2"])

    def test_in_its_own_pass_leaves_the_pass_to_nobody(self):
        with cluster(3) as group:
            rpc.rpc_sync("worker2", programs.set_fault, ("block",))
            rpc.rpc_async("worker1", backward_through, (["worker0", "worker2"],))
            rpc.rpc_sync("worker2", programs.wait_until_reached)
            group.kill("worker1")
            wait_until_clean(["worker0"])
            rpc.rpc_sync("worker2", programs.set_fault)
            wait_until_clean(["worker0", "worker2"])

    def test_that_comes_back_takes_part_in_new_passes(self):
        with cluster(2) as group:
            with dist_autograd.context() as context_id:
                loss = gated("worker1")
                group.kill("worker1")
                with pytest.raises(WorkerLost):
                    dist_autograd.backward(context_id, [loss])
                group.start("worker1", 1)
                group.wait_until_ready("worker1")
                until(lambda: can_call("worker1"))
                with pytest.raises((ContextError, BackwardError, WorkerLost)):
                    dist_autograd.backward(context_id, [loss])
                dist_autograd.backward(context_id, [gated("worker1")])
                torch.testing.assert_close(gradient_of(context_id), wanted("worker1"))
            wait_until_clean(workers(2))

    def test_that_comes_back_begins_contexts_that_nobody_has_seen(self):
        """The others remember the contexts of its former life as released."""
        with cluster(2) as group:
            for _ in range(2):
                assert rpc.rpc_sync("worker1", step_against, ("worker0",)) == {"x", "worker0"}
                group.kill("worker1")
                group.start("worker1", 1)
                group.wait_until_ready("worker1")
                until(lambda: can_call("worker1"))
            wait_until_clean(workers(2))


def step_against(worker):
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [gated(worker)])
        here = rpc.get_worker_info().name
        return set(programs.gradients_everywhere(context_id, [worker, here]))


def can_call(worker):
    try:
        rpc.rpc_sync(worker, programs.counts)
    except WorkerLost:
        return False
    return True


def leave_a_context_open(others):
    def run():
        context = dist_autograd._new_context()
        for other in others:
            rpc.rpc_sync(other, programs.layer, (other, leaf("x")))
        assert context is not None

    Waiter(run).join()


def backward_through(others):
    with dist_autograd.context() as context_id:
        loss = sum(gated(other) for other in others)
        dist_autograd.backward(context_id, [loss])


class TestAStoppedWorker:
    def test_fails_the_pass_by_its_silence_and_forgets_it_when_it_goes_on(self):
        with cluster(3, heartbeat_interval=0.1, heartbeat_timeout=0.6, graceful=False) as group:
            try:
                with dist_autograd.context() as context_id:
                    loss = gated("worker1") + gated("worker2")
                    group.pause("worker1")
                    begun = time.monotonic()
                    with pytest.raises(WorkerLost, match=lost_in_a_pass("worker1")):
                        dist_autograd.backward(context_id, [loss])
                    assert time.monotonic() - begun < 0.6 + SOON
                wait_until_clean(["worker0", "worker2"])
            finally:
                group.resume("worker1")
            until(lambda: is_clean("worker1"))


def is_clean(worker):
    """One that was stopped may close connections once more, when it finds out about itself."""
    try:
        return rpc.rpc_sync(worker, programs.counts) == (0, 0)
    except WorkerLost:
        return False


class TestAReleasedContext:
    @pytest.mark.parametrize("by", ["worker0", "worker1"])
    def test_fails_the_pass(self, by):
        """Whether its creator releases it, or another worker."""
        contexts = []

        def run():
            context = dist_autograd._new_context()
            loss = gated("worker1") + gated("worker2")
            contexts.append(context._context_id())
            dist_autograd.backward(context._context_id(), [loss])

        with cluster(3):
            rpc.rpc_sync("worker2", programs.set_fault, ("block",))
            waiter = Waiter(run)
            rpc.rpc_sync("worker2", programs.wait_until_reached)
            released_at = time.monotonic()
            rpc.rpc_sync(by, dist_autograd._release_context, (contexts[0],))
            waiter.join()
            assert isinstance(waiter.error, ContextError), waiter.error
            assert "during the backward pass" in str(waiter.error)
            assert waiter.ended_at - released_at < SOON
            rpc.rpc_sync("worker2", programs.set_fault)
            wait_until_clean(workers(3))


class TestAnInterruption:
    @pytest.mark.parametrize("blocked", ["worker0", "worker1", "worker2"])
    def test_leaves_everything_usable(self, blocked):
        """Ctrl-C while a function runs here, or while the caller waits for either worker."""
        main = threading.get_ident()

        def interrupt():
            rpc.rpc_sync(blocked, programs.wait_until_reached)
            signal.pthread_kill(main, signal.SIGINT)
            if blocked == "worker0":  # it is waiting in Python: it notices at once
                rpc.rpc_sync(blocked, programs.set_fault)

        with cluster(3):
            with dist_autograd.context() as context_id:
                loss = programs.Gate.apply(gated("worker1") + gated("worker2"))
                rpc.rpc_sync(blocked, programs.set_fault, ("block",))
                helper = Waiter(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    dist_autograd.backward(context_id, [loss], retain_graph=True)
                helper.join()
                assert helper.error is None, helper.error
                rpc.rpc_sync(blocked, programs.set_fault)
                wait_until_no_pass(workers(3))
                before = dist_autograd.get_gradients(context_id).get(leaf("x"), 0)
                dist_autograd.backward(context_id, [loss])
                torch.testing.assert_close(
                    gradient_of(context_id) - before, wanted("worker1") + wanted("worker2")
                )
            wait_until_clean(workers(3))

    def test_of_one_pass_leaves_another_of_the_same_context_alone(self):
        main = threading.get_ident()
        with cluster(2):
            with dist_autograd.context() as context_id:
                loss = programs.Gate.apply(gated("worker1"))
                other = gated("worker1")
                programs.set_fault("block")
                waiters = []

                def interrupt():
                    programs.wait_until_reached()
                    # It leaves its roots to the thread that runs this context's wave.
                    waiters.append(Waiter(dist_autograd.backward, context_id, [other]))
                    context = dist_autograd._retrieve_context(context_id)
                    until(lambda: context.work)
                    signal.pthread_kill(main, signal.SIGINT)

                helper = Waiter(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    dist_autograd.backward(context_id, [loss])
                programs.set_fault()
                helper.join()
                assert helper.error is None, helper.error
                assert waiters[0].join().error is None
                torch.testing.assert_close(gradient_of(context_id), wanted("worker1"))
            wait_until_clean(workers(2))


class TestMemory:
    def test_of_a_graph_is_freed_with_its_context(self):
        with cluster(2):
            with dist_autograd.context() as context_id:
                y = rpc.rpc_sync("worker1", programs.watched_layer, ("worker1", leaf("x")))
                dist_autograd.backward(context_id, [y.sum()], retain_graph=True)
                assert rpc.rpc_sync("worker1", programs.watched_alive) > 0
            until(lambda: rpc.rpc_sync("worker1", programs.watched_alive) == 0)
            wait_until_clean(workers(2))

    def test_of_a_context_without_a_pass_is_freed(self):
        with cluster(3):
            for _ in range(20):
                with dist_autograd.context():
                    y = rpc.rpc_sync("worker1", programs.watched_layer, ("worker1", leaf("x")))
                    rpc.rpc_sync("worker2", programs.watched_layer, ("worker2", y))
            for worker in workers(3)[1:]:
                until(lambda worker=worker: rpc.rpc_sync(worker, programs.watched_alive) == 0)
            wait_until_clean(workers(3))

    def test_of_a_failed_pass_is_freed(self):
        with cluster(3):
            rpc.rpc_sync("worker2", programs.set_fault, ("raise",))
            with dist_autograd.context() as context_id:
                y = rpc.rpc_sync("worker1", programs.watched_layer, ("worker1", leaf("x")))
                z = rpc.rpc_sync("worker2", programs.gated, ("worker2", y))
                with pytest.raises(BackwardError):
                    dist_autograd.backward(context_id, [z.sum()])
            until(lambda: rpc.rpc_sync("worker1", programs.watched_alive) == 0)
            wait_until_clean(workers(3))


class TestABadNetwork:
    @pytest.mark.parametrize(
        "faults",
        [
            Faults().drop(Kind.CONTEXT_RELEASE, times=1),
            Faults().drop(Kind.CONTEXT_RELEASED, times=1),
            Faults().duplicate(Kind.CONTEXT_RELEASE).duplicate(Kind.CONTEXT_RELEASED),
            Faults().delay(Kind.CONTEXT_RELEASE, seconds=0.3),
        ],
        ids=["dropped", "unacknowledged", "twice", "late"],
    )
    def test_contexts_are_freed_all_the_same(self, faults):
        with cluster(3, wrap_transport=faults):
            for _ in range(3):
                with dist_autograd.context() as context_id:
                    y = rpc.rpc_sync("worker1", gated, ("worker2",))
                    dist_autograd.backward(context_id, [y])
            wait_until_clean(workers(3))

    def test_late_gradients_are_gradients(self):
        faults = Faults().delay(Kind.GRADIENTS, seconds=0.05, chance=0.5)
        faults = faults.delay(Kind.PASS_ANSWER, seconds=0.1, chance=0.5)
        with cluster(3, wrap_transport=faults):
            for _ in range(5):
                with dist_autograd.context() as context_id:
                    dist_autograd.backward(context_id, [gated("worker1") + gated("worker2")])
                    want = wanted("worker1") + wanted("worker2")
                    torch.testing.assert_close(gradient_of(context_id), want)
            wait_until_clean(workers(3))


def break_gradients(how):
    """Makes this worker unable to read gradients."""

    def unpack(packet):
        raise MemoryError("no room for gradients")

    def pass_of(payload):
        raise ValueError("not even that")

    GradientMessage.unpack = unpack
    if how == "altogether":
        GradientMessage.pass_of = pass_of


class TestGradientsThatCannotBeRead:
    def test_end_the_pass(self):
        with cluster(3), dist_autograd.context() as context_id:
            loss = gated("worker1") + gated("worker2")
            rpc.rpc_sync("worker1", break_gradients, ("in part",))
            with pytest.raises(BackwardError, match="no room for gradients"):
                dist_autograd.backward(context_id, [loss])
            assert rpc.rpc_sync("worker1", torch.add, (1, 1)) == 2  # the worker is not lost
            wait_until_no_pass(workers(3))

    def test_end_it_also_if_nobody_knows_which_pass_they_are_of(self):
        with cluster(2, graceful=False), dist_autograd.context() as context_id:
            loss = gated("worker1")
            rpc.rpc_sync("worker1", break_gradients, ("altogether",))
            with pytest.raises((BackwardError, WorkerLost), match="lost"):
                dist_autograd.backward(context_id, [loss])
