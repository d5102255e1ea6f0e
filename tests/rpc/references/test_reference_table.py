"""RRef and its table, on a network in memory."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from telegrad import drop_in
from telegrad.errors import (
    NotInitialized,
    RpcTimeout,
    RRefError,
    SerializationError,
    TelegradError,
    WorkerLost,
)
from telegrad.ids import ForkId, RRefId
from telegrad.rpc.group import current
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.references import housekeeper, proxy
from telegrad.rpc.references import rref as rref_module
from telegrad.rpc.references.events import Timing
from telegrad.rpc.references.housekeeper import Housekeeper
from telegrad.rpc.references.proxy import ASYNC_MARK
from telegrad.rpc.references.rref import RRef, set_rref_backward
from telegrad.rpc.references.table import RRefTable
from telegrad.testing.messenger import SimulatedNetwork
from telegrad.wire.frames import Kind

TIMING = Timing(retry_first=1.0, retry_last=4.0, max_message_age=60.0)


class Cluster:
    """Tables on a simulated network, with an agent as simple as can be: calls run at once."""

    def __init__(self, network: SimulatedNetwork, workers: int) -> None:
        self.network = network
        self.acting = threading.local()
        self.tables = [self.make_table(n) for n in range(workers)]

    def make_table(self, worker: int) -> RRefTable:
        remote = SimpleNamespace(
            fetch=lambda owner, rref, timeout: self.on(
                owner, lambda: self.tables[owner].entry(rref).value_to_send()
            ),
            call=lambda *call: self.call(worker, *call),
            bound_here=lambda work: work,
        )
        messenger = self.network.messenger(worker)
        return RRefTable(messenger, remote, timing=TIMING, clock=self.network.clock)

    def on(self, worker: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = getattr(self.acting, "worker", None)
        self.acting.worker = worker
        try:
            return function(*args, **kwargs)
        finally:
            self.acting.worker = before

    def lookup(self) -> RRefTable:
        worker = getattr(self.acting, "worker", None)
        if worker is None:
            raise NotInitialized("no worker acts")
        return self.tables[worker]

    def call(
        self,
        caller: int,
        mode: str,
        owner: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Any:
        if mode == "remote":
            return self.remote(caller, owner, function, *args, **kwargs)
        future: torch.futures.Future[Any] = torch.futures.Future()
        try:
            result = self.on(owner, function, *args, **kwargs)
            if hasattr(function, ASYNC_MARK):
                result = result.wait()
            future.set_result(result)
        except Exception as error:
            future.set_exception(error)
        return future if mode == "async" else future.wait()

    def remote(
        self, caller: int, owner: int, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> RRef[Any]:
        rref_id, fork_id, rref = self.tables[caller].new_user(owner)
        entry = self.tables[owner].owner_created(rref_id, fork_id, caller)
        try:
            entry.set_value(self.on(owner, function, *args, **kwargs))
        except Exception as error:
            entry.set_error(error)
        self.tables[caller].creation_finished(fork_id)
        return rref

    def send(self, rref: RRef[Any], source: int, to: int) -> RRef[Any]:
        rebuild, args = self.tables[source].reduce(rref, to)
        return self.on(to, rebuild, *args)

    def settle(self) -> None:
        gc.collect()
        for _ in range(40):
            for table in self.tables:
                table.drain()
            self.network.advance(2.0)

    def count(self, worker: int, name: str = "num_owner_rrefs") -> int:
        return int(self.tables[worker].debug_info()[name])


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    yield from make_cluster(SimulatedNetwork(seed=1))


@pytest.fixture
def lossy_cluster() -> Iterator[Cluster]:
    yield from make_cluster(SimulatedNetwork(seed=2, loss=0.3, repetition=0.3))


def make_cluster(network: SimulatedNetwork) -> Iterator[Cluster]:
    cluster = Cluster(network, workers=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proxy, "current_table", cluster.lookup)
        patch.setattr(rref_module, "current_table", cluster.lookup)
        yield cluster
    for table in cluster.tables:
        table.close()


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, n: int) -> int:
        self.value += n
        return self.value

    def later(self) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(self.value)
        return future


setattr(Counter.later, ASYNC_MARK, Counter.later)


# --- The life of a value -------------------------------------------------------------------------


def test_a_local_value_is_counted_once_it_is_shared_and_dropped_with_its_last_reference(cluster):
    rref = cluster.on(0, RRef, Counter(7))
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.local_value().value == rref.to_here().value == 7
    assert cluster.count(0) == 0
    user = cluster.send(rref, 0, 1)
    assert user.confirmed_by_owner()  # the owner counted it when it made it
    assert not user.is_owner()
    assert user.owner() == WorkerInfo("worker0", 0)
    assert user.owner_name() == "worker0"
    assert cluster.count(0) == cluster.count(0, "num_forks") == 1
    del rref
    cluster.settle()
    assert user.to_here().value == 7
    del user
    cluster.settle()
    assert cluster.count(0) == 0
    assert cluster.tables[0].leak_report() == []


def test_a_child_keeps_its_dead_parent_until_the_owner_knows_it(lossy_cluster):
    cluster = lossy_cluster
    rref = cluster.remote(1, 0, Counter, 3)
    child = cluster.send(rref, 1, 2)
    assert not child.confirmed_by_owner()
    assert cluster.count(2, "num_pending_users") == 1
    del rref
    cluster.tables[1].drain()
    assert cluster.count(0, "num_forks") == 1
    cluster.settle()
    assert child.confirmed_by_owner()
    assert child.to_here().value == 3
    assert cluster.tables[0].leak_report() == [
        "Leaking RRef GloballyUniqueId(created_on=1, local_id=0) with fork Id "
        "GloballyUniqueId(created_on=1, local_id=2)"
    ]
    with pytest.raises(RRefError, match="Leaking RRef"):
        cluster.tables[0].check_leaks()
    cluster.tables[1].check_leaks()
    del child
    cluster.settle()
    assert [cluster.tables[n].debug_info() for n in range(3)] == [
        {
            "num_owner_rrefs": "0",
            "num_forks": "0",
            "num_pending_users": "0",
            "num_pending_futures": "0",
        }
    ] * 3


def test_a_reference_that_comes_home_is_the_value_itself(lossy_cluster):
    cluster = lossy_cluster
    rref = cluster.remote(1, 0, Counter, 3)
    home = cluster.send(rref, 1, 0)
    del rref
    cluster.settle()
    assert home.is_owner()
    assert home.local_value().value == 3
    to_itself = cluster.send(home, 0, 0)
    assert to_itself.local_value() is home.local_value()
    del home, to_itself
    cluster.settle()
    assert cluster.count(0) == 0
    assert not cluster.tables[0]._entries


def inside_a_step(table: RRefTable, action: Callable[[], None]) -> None:
    """What a destructor does that the collector runs inside of the table's critical section."""

    def step() -> list[Callable[[], None]]:
        action()
        return []

    table._steps.apply(first=step)


def test_the_death_of_a_handle_inside_of_a_step_neither_blocks_nor_is_lost(cluster):
    rrefs = [cluster.remote(1, 0, Counter, 3)]
    inside_a_step(cluster.tables[1], rrefs.clear)
    cluster.settle()
    assert cluster.count(0) == 0


def test_a_destructor_inside_of_a_step_may_make_pass_and_unpack_references(cluster):
    kept = [cluster.on(0, RRef, "old")]

    def destroy() -> None:
        cluster.on(0, RRef, "forgotten")
        kept.append(cluster.on(0, RRef, "new"))
        kept.extend([cluster.send(rref, 0, 1) for rref in kept])
        kept.extend([cluster.send(rref, 1, 0) for rref in kept[2:]])
        kept.append(cluster.remote(0, 1, Counter, 3))

    inside_a_step(cluster.tables[0], destroy)
    cluster.settle()
    assert [cluster.on(1, rref.to_here) for rref in kept[2:4]] == ["old", "new"]
    assert [rref.local_value() for rref in kept[4:6]] == ["old", "new"]
    assert kept[6].to_here().value == 3
    kept.clear()
    cluster.settle()
    assert cluster.count(0) == cluster.count(1) == 0


def test_what_needs_an_answer_inside_of_a_step_is_refused(cluster):
    errors = []

    def ask() -> None:
        with pytest.raises(TelegradError, match="destructor or a signal handler") as caught:
            cluster.tables[0].debug_info()
        errors.append(caught)

    inside_a_step(cluster.tables[0], ask)
    assert errors


def test_values_die_outside_of_steps(cluster):
    table = cluster.tables[0]
    seen = []

    class Tattler:
        def __del__(self) -> None:
            seen.append(table.debug_info())  # is refused inside of one

    rref = cluster.remote(1, 0, Tattler)
    del rref
    cluster.settle()
    assert len(seen) == 1


def test_a_reference_whose_destructor_was_interrupted_ends_all_the_same(cluster, monkeypatch):
    """As by Ctrl-C: Python drops it, and the rest of the destructor."""
    monkeypatch.setattr(housekeeper, "_GRACE", 0.0)
    swallowed = []
    monkeypatch.setattr("sys.unraisablehook", lambda what: swallowed.append(what.exc_type))

    def interrupted(self: RRef[Any]) -> None:
        raise KeyboardInterrupt

    rref = cluster.remote(1, 0, Counter, 3)
    with monkeypatch.context() as during:
        during.setattr(RRef, "__del__", interrupted)
        del rref
    assert swallowed == [KeyboardInterrupt]
    cluster.settle()
    assert cluster.count(0) == 0


def test_a_handle_in_a_cycle_is_given_up_after_the_destructors_of_the_cycle(cluster):
    sent = []

    class Holder:
        def __init__(self, rref: RRef[Any]) -> None:
            self.rref, self.me = rref, self

        def __del__(self) -> None:
            cluster.tables[1].drain()  # whatever its weak reference has told by now
            sent.append(cluster.send(self.rref, 1, 0))

    Holder(cluster.remote(1, 0, Counter, 3))
    gc.collect()
    cluster.settle()
    assert sent[0].local_value().value == 3


def test_the_tables_own_thread_sees_to_it_without_being_asked(cluster):
    with cluster.network.deliver_in_background():
        for table in cluster.tables:
            table.start()
        dropped = threading.Event()

        class Watched:
            def __del__(self) -> None:
                dropped.set()

        rref = cluster.remote(1, 0, Watched)
        del rref
        assert dropped.wait(30)
        for table in cluster.tables:
            table.close()


def test_the_tables_own_thread_may_itself_be_what_stops_it():
    keeper = Housekeeper("keeper", lambda *_: keeper.stop())
    keeper.start()
    (thread,) = [each for each in threading.enumerate() if each.name == "keeper"]
    keeper.note(1.0)
    thread.join(30)
    assert not thread.is_alive()


def test_many_threads_leave_nothing_behind(cluster):
    def work(seed: int) -> None:
        choice = random.Random(seed)
        handles: list[tuple[int, RRef[Any]]] = []
        for _ in range(150):
            worker, other = choice.sample(range(3), 2)
            action = choice.random()
            if action < 0.2:
                handles.append((worker, cluster.on(worker, RRef, Counter())))
            elif action < 0.4:
                handles.append((worker, cluster.remote(worker, other, Counter)))
            elif action < 0.7 and handles:
                source, rref = choice.choice(handles)
                handles.append((other, cluster.send(rref, source, other)))
            elif handles:
                _, rref = handles.pop(choice.randrange(len(handles)))
                assert isinstance(rref.to_here(), Counter)
                del rref

    with cluster.network.deliver_in_background():
        for table in cluster.tables:
            table.start()
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        flushes = [threading.Thread(target=table.flush, args=(60,)) for table in cluster.tables]
        for thread in flushes:
            thread.start()
        for thread in flushes:
            thread.join()
        for table in cluster.tables:
            assert table._steps.machine.is_settled()
            assert not table._users
            table.close()


def test_a_call_that_outlives_its_reference_still_ends(cluster):
    rref_id, fork_id, rref = cluster.tables[1].new_user(0)
    entry = cluster.tables[0].owner_created(rref_id, fork_id, 1)
    cluster.tables[1].creation_confirmed(fork_id)
    future = rref._get_future()
    del rref
    cluster.settle()
    assert not cluster.tables[1]._users
    entry.set_value(1)
    cluster.tables[1].creation_finished(fork_id)
    future.wait()
    assert not cluster.tables[1]._creations


# --- Creation ------------------------------------------------------------------------------------


def test_a_value_may_be_asked_for_before_its_creation_arrives(cluster):
    rref_id, fork_id, rref = cluster.tables[1].new_user(0)
    early = cluster.tables[0].entry(rref_id)
    home = cluster.send(rref, 1, 0)
    values = []
    early.add_done_callback(lambda entry: values.append(entry.result()))
    entry = cluster.tables[0].owner_created(rref_id, fork_id, 1)
    assert entry is early
    entry.set_value(5)
    assert values == [5]
    assert home.local_value() == 5
    cluster.tables[1].creation_confirmed(fork_id)
    assert rref.confirmed_by_owner()
    assert not rref._get_future().done()
    cluster.tables[1].creation_finished(fork_id)
    rref._get_future().wait()
    assert isinstance(rref._get_future(), torch._C.Future)


def test_a_value_that_came_before_the_owners_answer_confirms_its_reference(cluster):
    rref_id, fork_id, rref = cluster.tables[0].new_user(1)
    cluster.tables[1].owner_created(rref_id, fork_id, 0).set_value(5)
    assert not rref.confirmed_by_owner()
    assert rref.to_here() == 5
    assert rref.confirmed_by_owner()
    cluster.tables[0].creation_finished(fork_id)
    assert rref.confirmed_by_owner()
    assert rref.to_here() == 5
    del rref
    cluster.settle()
    assert cluster.count(1) == 0


def test_a_value_does_not_confirm_a_reference_that_was_passed_on(cluster):
    rref = cluster.remote(1, 2, lambda: 5)
    passed = cluster.send(rref, 1, 0)
    assert passed.to_here() == 5
    assert not passed.confirmed_by_owner()  # nothing has been delivered yet
    cluster.settle()
    assert passed.confirmed_by_owner()


def test_a_creation_that_never_arrives_is_given_up_when_it_no_longer_can(cluster):
    rref_id, _, _rref = cluster.tables[1].new_user(0)
    early = cluster.tables[0].entry(rref_id)
    cluster.settle()
    with pytest.raises(RRefError, match="gone from worker 0"):
        early.wait(0.001)
    with pytest.raises(RRefError, match="gone from worker 0"):
        cluster.tables[0].entry(rref_id)


def test_the_loss_of_a_creator_ends_the_wait_for_what_it_was_creating(cluster):
    rref_id, _, _rref = cluster.tables[1].new_user(0)
    early = cluster.tables[0].entry(rref_id)
    cluster.network.lose(1)
    with pytest.raises(WorkerLost, match="worker1, which was about to create it"):
        early.wait()


@pytest.mark.parametrize("is_confirmed_before", [False, True])
def test_the_use_of_a_reference_whose_creation_failed_raises(cluster, is_confirmed_before):
    _, fork_id, rref = cluster.tables[1].new_user(0)
    future = rref._get_future()
    if is_confirmed_before:
        cluster.tables[1].creation_confirmed(fork_id)
    cluster.tables[1].creation_failed(fork_id, RpcTimeout("RPC ran for more than 1 s"))
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        future.wait()
    assert cluster.count(1, "num_pending_users") == 0
    for use in (rref.to_here, rref._serialize, rref._get_type, lambda: cluster.send(rref, 1, 2)):
        with pytest.raises(RRefError, match=r"RRef creation via rpc.remote\(\) timed out"):
            use()


def test_a_creation_that_failed_but_arrives_after_the_end_is_not_kept(cluster):
    rref_id, fork_id, rref = cluster.tables[1].new_user(0)
    cluster.tables[1].creation_failed(fork_id, RpcTimeout("too late"))
    del rref
    cluster.tables[1].drain()
    cluster.network.run()
    entry = cluster.tables[0].owner_created(rref_id, fork_id, 1)
    entry.set_value(1)
    assert cluster.count(0) == 0
    assert cluster.tables[1].debug_info()["num_pending_futures"] == "0"


def test_a_creation_on_the_creator_itself(cluster):
    entry, rref = cluster.tables[0].new_owned()
    assert rref.is_owner()
    with pytest.raises(RpcTimeout, match="RPC ran for more than"):
        rref.to_here(0.001)
    entry.creation_failed(RpcTimeout("RPC ran for more than 1 s"))
    with pytest.raises(RuntimeError, match="RPC ran for more than"):
        rref._get_future().wait()
    for use in (rref.to_here, rref.local_value, rref._serialize):
        with pytest.raises(RRefError, match="RRef creation"):
            use()


def test_what_the_function_raised_is_raised_by_each_use(cluster):
    def fail() -> None:
        raise ValueError("Expected error")

    rref = cluster.remote(1, 0, fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="Expected error"):
            rref.to_here()
        with pytest.raises(ValueError, match="Expected error"):
            rref._get_type()


# --- Packing -------------------------------------------------------------------------------------


def test_references_in_a_message_that_was_not_sent_are_taken_back(cluster):
    user = cluster.remote(1, 0, Counter)
    local = cluster.on(1, RRef, 4)

    made = []
    for rref in (user, local):
        _, *ids, _, _ = cluster.tables[1].fork(rref, 2)
        made.append((RRefId(*ids[:2]), ForkId(*ids[2:])))
    cluster.tables[1].abandon(made)
    assert cluster.count(1, "num_forks") == 0
    user = local = rref = None
    cluster.settle()
    assert cluster.count(0) == cluster.count(1) == 0


def test_a_function_can_wait_until_its_arguments_are_confirmed(lossy_cluster):
    cluster = lossy_cluster
    rref = cluster.remote(1, 0, Counter)
    child = cluster.send(rref, 1, 2)
    unconfirmed = cluster.tables[2].take_unconfirmed()
    assert unconfirmed == [child]
    assert cluster.tables[2].take_unconfirmed() == []
    confirmed = []
    cluster.tables[2].when_confirmed(
        unconfirmed, lambda: confirmed.append(child.confirmed_by_owner())
    )
    assert confirmed == []
    cluster.settle()
    assert confirmed == [True]
    cluster.tables[2].when_confirmed([child, rref], lambda: confirmed.append(True))
    assert confirmed == [True, True]


def test_a_failed_creation_and_the_end_of_the_table_end_the_wait_for_a_confirmation(cluster):
    ended = []
    _, fork_id, created = cluster.tables[1].new_user(0)
    cluster.tables[1].when_confirmed([created], lambda: ended.append("creation"))
    cluster.tables[1].creation_failed(fork_id, RpcTimeout("too late"))
    assert ended == ["creation"]
    child = cluster.send(cluster.remote(1, 0, Counter), 1, 2)
    cluster.tables[2].when_confirmed([child], lambda: ended.append("table"))
    cluster.tables[2].close()
    assert ended == ["creation", "table"]


def test_a_reference_can_be_packed_for_nobody_special(cluster):
    rref = cluster.on(0, RRef, 4)
    fields = rref._serialize()
    assert len(fields) == 7
    user = cluster.on(1, RRef._deserialize, fields)
    again = cluster.on(2, RRef._deserialize, user._serialize())
    cluster.settle()
    assert user.confirmed_by_owner()
    assert again.confirmed_by_owner()
    cluster.network.lose(1)
    cluster.network.lose(2)
    assert cluster.count(0) == 0
    with pytest.raises(SerializationError, match="7 numbers"):
        cluster.on(0, RRef._deserialize, (1, 2))


@pytest.mark.parametrize(
    "pickler", [pickle.dumps, copy.copy, copy.deepcopy, lambda r: torch.save(r, io.BytesIO())]
)
def test_a_reference_is_not_pickled_outside_a_call(cluster, pickler):
    rref = cluster.on(0, RRef, 35)
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        pickler(rref)


def test_a_reference_belongs_to_one_agent(cluster):
    rref = cluster.on(0, RRef, 35)
    with pytest.raises(RRefError, match="another agent"):
        cluster.tables[1].reduce(rref, 2)


# --- Loss ----------------------------------------------------------------------------------------


def test_an_owners_loss_fails_its_users_with_worker_lost(cluster):
    rref = cluster.remote(1, 0, Counter)
    child = cluster.send(rref, 1, 2)
    settled = []
    cluster.tables[2].when_confirmed([child], lambda: settled.append(True))
    cluster.network.lose(0, "out of memory")
    assert settled == [True]
    for reference in (rref, child):
        with pytest.raises(WorkerLost, match=r"owner worker0 was lost \(out of memory\)"):
            reference.to_here()
    with pytest.raises(WorkerLost):
        rref._serialize()
    cluster.settle()  # the child's worker tells its parent, which may not have lost the owner
    sent = cluster.network.sent.total()
    del rref, child, reference
    cluster.settle()
    assert cluster.network.sent.total() == sent
    assert cluster.tables[1]._steps.machine.is_empty()
    assert cluster.tables[2]._steps.machine.is_empty()


def test_a_users_loss_strikes_off_its_references(cluster):
    rref = cluster.on(0, RRef, Counter())
    cluster.send(rref, 0, 1)
    user = cluster.send(rref, 0, 2)
    cluster.network.lose(2)
    cluster.settle()
    assert cluster.count(0, "num_forks") == 0
    assert user is not None


def test_a_reference_whose_parent_was_lost_on_the_way_finds_the_value_gone(cluster):
    rref = cluster.remote(1, 0, Counter)
    fields = cluster.tables[1].fork(rref, 2)
    cluster.network.lose(1)
    child = cluster.on(2, RRef._deserialize, fields)
    cluster.settle()
    with pytest.raises(RRefError, match="worker0 no longer has its value"):
        child.to_here()


def test_a_loss_found_by_sending_counts_as_a_loss(cluster):
    rref = cluster.remote(1, 0, Counter)
    fields = cluster.tables[1].fork(rref, 2)
    cluster.network._lost[0] = "nobody was told"
    child = cluster.on(2, RRef._deserialize, fields)
    with pytest.raises(WorkerLost, match="nobody was told"):
        child.to_here()


# --- Shutdown ------------------------------------------------------------------------------------


def test_a_flush_ends_references_that_are_still_held(lossy_cluster):
    cluster = lossy_cluster
    rref = cluster.remote(1, 0, Counter)
    child = cluster.send(rref, 1, 2)
    for table in cluster.tables:
        assert table is cluster.tables[2] or table.flush(timeout=0.001)
    cluster.tables[2].flush(timeout=0.001)
    cluster.settle()
    for table in cluster.tables:
        assert table.flush(timeout=0) == []
    for reference in (rref, child):
        with pytest.raises(RRefError, match=r"Cannot call to_here\(\) on it after deletion\."):
            reference.to_here()
        with pytest.raises(RRefError, match=r"Cannot call fork an UserRRef after deletion\."):
            reference._serialize()


def test_a_flush_says_what_is_still_open(cluster):
    rref = cluster.remote(1, 0, Counter)
    assert cluster.tables[0].flush(timeout=0.001) == [
        "worker 1 still holds GloballyUniqueId(created_on=1, local_id=0), which worker 0 owns"
    ]
    assert rref is not None


def test_a_flush_waits_for_the_acknowledgements(cluster):
    rref = cluster.remote(1, 0, Counter)
    with cluster.network.deliver_in_background():
        flushes = [threading.Thread(target=table.flush, args=(30,)) for table in cluster.tables[:2]]
        for thread in flushes:
            thread.start()
        for thread in flushes:
            thread.join()
    assert cluster.count(0) == 0
    assert rref is not None


def test_closing_ends_every_wait(cluster):
    _, _, user = cluster.tables[1].new_user(0)
    future = user._get_future()
    entry, owned = cluster.tables[1].new_owned()
    local = cluster.on(1, RRef, 4)
    cluster.tables[1].close()
    with pytest.raises(RuntimeError, match="shut down"):
        future.wait()
    with pytest.raises(NotInitialized):
        entry.wait()
    with pytest.raises(NotInitialized):
        owned.to_here()
    with pytest.raises(RRefError, match="after deletion"):
        user.to_here()
    assert local.local_value() == 4
    with pytest.raises(RRefError):
        local._serialize()
    late = cluster.tables[1].rebuild((0, 0, 1, 0, 2, 0, ""))
    with pytest.raises(RRefError, match="after deletion"):
        late.to_here()
    assert cluster.tables[1].flush(1) is not None


# --- Methods of the value, and upstream's private names ------------------------------------------


@pytest.mark.parametrize("owner", [0, 1])
def test_proxies_call_methods_where_the_value_is(cluster, owner):
    rref = cluster.remote(1, 0, Counter, 1) if owner == 0 else cluster.on(1, RRef, Counter(1))
    assert rref.rpc_sync().add(1) == 2
    assert rref.rpc_async().add(1).wait() == 3
    assert rref.rpc_sync().later() == 3
    assert rref.rpc_async(timeout=5).later().wait() == 3
    if owner == 0:
        assert rref.remote().add(1).to_here() == 4
    sent = cluster.network.sent.total()
    assert rref.rpc_sync().add(0) is not None
    assert cluster.network.sent.total() == sent  # the reference itself does not travel
    for call in (rref.rpc_sync, rref.rpc_async, rref.remote):
        with pytest.raises(AttributeError, match="has no attribute 'non_exist'"):
            call().non_exist()


def test_an_asynchronous_call_waits_for_the_type_without_blocking(cluster):
    types: torch.futures.Future[type] = torch.futures.Future()
    rref = cluster.remote(1, 0, Counter, 1)
    rref._type_future = types
    good, bad = rref.rpc_async().add(1), rref.rpc_async().non_exist()
    assert not good.done()
    types.set_result(Counter)
    assert good.wait() == 2
    with pytest.raises(AttributeError):
        bad.wait()


def test_the_type_is_asked_for_once(cluster):
    rref = cluster.remote(1, 0, Counter)
    futures = [rref._get_type(blocking=False) for _ in range(3)]
    assert futures[0] is futures[1] is futures[2]
    assert rref._get_type() is Counter
    assert cluster.on(0, RRef, 1)._get_type() is int


def test_the_words_are_upstreams(cluster, monkeypatch):
    local = cluster.on(1, RRef, 1)
    assert str(local) == "OwnerRRef(GloballyUniqueId(created_on=1, local_id=0))"
    rref = cluster.remote(1, 0, Counter)
    assert str(rref) == (
        "UserRRef(RRefId = GloballyUniqueId(created_on=1, local_id=1), "
        "ForkId = GloballyUniqueId(created_on=1, local_id=2))"
    )
    monkeypatch.setattr(drop_in, "_is_drop_in", True)
    with pytest.raises(
        RuntimeError,
        match=(
            r"For UserRRef\(rref_id=GloballyUniqueId\(created_on=1, local_id=1\), "
            r"fork_id=GloballyUniqueId\(created_on=1, local_id=2\)\), "
            r"can't call localValue\(\) on user WorkerInfo\(id=1, name=worker1\). "
            r"Call it on owner WorkerInfo\(id=0, name=worker0\)"
        ),
    ):
        rref.local_value()
    with pytest.raises(RuntimeError, match=r"Can't call RRef.local_value\(\) on a non-owner RRef"):
        rref.local_value()


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_script_modules_need_a_type_hint_and_stay_at_their_owner(cluster):
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(RRefError, match="type_hint should only be specified"):
        cluster.on(0, RRef, 1, type_hint=int)
    script = torch.jit.trace_module(Module(), {"forward": torch.ones(1)})
    with pytest.raises(RRefError, match="must provide its ModuleInterface type hint"):
        cluster.on(0, RRef, script)
    rref = cluster.on(0, RRef, script, type_hint=object)
    user = cluster.send(rref, 0, 1)
    with pytest.raises(RRefError, match=r"is an RRef to a ScriptModule\. It can't be sent through"):
        user.to_here()


def test_backward_is_local_without_a_context_and_autograds_with_one(cluster):
    leaf = torch.ones(2, requires_grad=True)
    rref = cluster.on(0, RRef, leaf.sum())
    rref.backward(retain_graph=True)
    assert leaf.grad is not None
    user = cluster.send(rref, 0, 1)
    with pytest.raises(RRefError, match="User RRefs require 'dist_autograd_ctx_id'"):
        user.backward()
    with pytest.raises(RRefError, match=r"RRef should contain a tensor for .backward\(\)"):
        cluster.on(0, RRef, "foo").backward()
    before = set_rref_backward(None)
    with pytest.raises(RRefError, match="not loaded"):
        user.backward(5)
    calls = []
    set_rref_backward(lambda *call: calls.append(call))
    try:
        user.backward(5, retain_graph=True)
        rref.backward(6)
    finally:
        set_rref_backward(before)
    assert calls == [(user, 5, True), (rref, 6, False)]


def test_futures_that_do_not_exist_are_refused(cluster):
    rref = cluster.on(0, RRef, 1)
    user = cluster.send(rref, 0, 1)
    with pytest.raises(RRefError, match="not made by remote"):
        user._get_future()
    with pytest.raises(RRefError, match="no profiling future"):
        rref._get_profiling_future()
    future: torch.futures.Future[None] = torch.futures.Future()
    rref._set_profiling_future(future)
    assert rref._get_profiling_future() is future


def test_without_an_agent_there_are_no_references():
    with pytest.raises(NotInitialized):
        RRef(1)
    with pytest.raises(NotInitialized):
        current.current_table()


def test_a_value_that_is_asked_for_after_its_end_is_gone(cluster):
    with pytest.raises(RRefError, match="gone"):
        cluster.tables[0].entry(RRefId(0, 99))
    home = cluster.tables[0].rebuild((0, 0, 99, 0, 98, 0, ""))
    with pytest.raises(RRefError, match="gone"):
        home.to_here()
    assert isinstance(ForkId(0, 98), tuple)


def test_lost_control_messages_are_sent_again(cluster):
    for kind in (Kind.RREF_FORK, Kind.RREF_CHILD_ACCEPTED, Kind.RREF_DELETE, Kind.RREF_DELETED):
        cluster.network.drop(kind, times=3)
    rref = cluster.remote(1, 0, Counter)
    child = cluster.send(rref, 1, 2)
    del rref, child
    cluster.settle()
    assert cluster.count(0) == 0
    assert all(int(n) == 0 for table in cluster.tables for n in table.debug_info().values())
