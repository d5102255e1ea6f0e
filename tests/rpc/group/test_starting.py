"""Workers that are called while they are still starting themselves. Real processes."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from lined_processes import PATIENCE, lined_process, said
from telegrad import rpc
from telegrad.rpc.connections.acceptor import Acceptor
from telegrad.rpc.group import current
from telegrad.rpc.group.directory import Directory
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.transport.handshake import Identity, Purpose, introduce
from telegrad.transport.inproc import InprocTransport


def names_seen():
    """Who is in the group, and what one of them answers, as seen by the worker that is called."""
    members = current.current().agent.network.members.infos()
    return [member.name for member in members], rpc.rpc_sync("worker0", rpc.get_worker_info).name


def hold_up(line):
    """Lets this process's `init_rpc` learn of the others only when `line` says so."""
    read = Directory.everybody

    def read_late(directory):
        line.send("published")
        if line.recv() == "fail":
            raise RuntimeError("the store has gone")
        return read(directory)

    Directory.everybody = read_late


def start(rank, options, size, is_late, line):
    """Joins, says so, answers what it is asked to call, and leaves."""
    if is_late:
        hold_up(line)
    try:
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
        line.send("joined")
        while (callee := line.recv()) is not None:
            future = rpc.rpc_async(callee, names_seen)
            line.send(future.done())
            try:
                line.send(future.wait())
            except Exception as error:
                line.send(f"{type(error).__name__}: {error}")
        rpc.shutdown(graceful=False)
    except Exception as error:
        line.send(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def three_workers(init_method, size, seconds=PATIENCE):
    """The lines to three processes that start as workers of a group, worker2 being late; and what
    kills that one."""
    options = rpc.RpcOptions(init_method=init_method, rpc_timeout=seconds)
    with contextlib.ExitStack() as stack:
        lines = []
        for rank in range(3):
            worker = lined_process(start, rank, options, size, rank == 2)
            process, line = stack.enter_context(worker)
            lines.append(line)
            if size is None:  # worker2 comes to a group that is there
                assert said(line) == ("published" if rank == 2 else "joined")
        yield *lines, process.kill


@pytest.mark.parametrize("size", [3, None], ids=["of known size", "open"])
def test_one_that_is_called_while_it_starts_knows_the_whole_group(tmp_path, size):
    with three_workers(f"file://{tmp_path}/store", size) as (first, second, late, _kill):
        if size is not None:
            assert said(late) == "published"
            assert said(second) == "joined"
        second.send("worker2")
        assert said(second) is False
        assert not second.poll(0.3)  # it is held until worker2 knows whom it may be asked for
        late.send("go on")
        assert said(second) == (["worker0", "worker1", "worker2"], "worker0")
        assert said(late) == "joined"
        if size is not None:
            assert said(first) == "joined"


def test_whoever_called_one_whose_start_fails_hears_of_it(tmp_path):
    with three_workers(f"file://{tmp_path}/store", 3) as (_first, second, late, _kill):
        assert said(late) == "published"
        assert said(second) == "joined"
        second.send("worker2")
        assert said(second) is False
        late.send("fail")
        assert said(late) == "RuntimeError: the store has gone"
        text = said(second)
        assert text.startswith("WorkerLost: ")
        assert "worker2" in text


@pytest.mark.parametrize("seconds", [PATIENCE, 0.0])
def test_one_that_dies_while_it_starts_keeps_nobody_waiting(tmp_path, seconds):
    method = f"file://{tmp_path}/store"
    with three_workers(method, 3, seconds) as (first, second, late, kill):
        assert said(late) == "published"
        assert said(second) == "joined"
        assert not first.poll(0.1)  # it may keep the store, and waits
        kill()
        assert said(first) == "joined"
        first.send("worker2")
        said(first)
        assert said(first).startswith("WorkerLost: worker 'worker2' cannot be reached")
        first.send("worker1")
        said(first)
        assert said(first) == (["worker0", "worker1", "worker2"], "worker0")


def test_one_that_is_stuck_while_it_starts_is_named(tmp_path):
    method = f"file://{tmp_path}/store"
    with three_workers(method, 3, 2.0) as (first, _second, late, _kill):
        assert said(late) == "published"
        assert said(first) == (
            "TelegradError: worker 'worker2' came to the meeting place, and has not joined the "
            "group within 2 s: look at what it does (rpc_timeout sets this limit)"
        )


def test_one_that_has_proved_itself_may_wait_for_longer_than_a_stranger():
    secret, me = b"s" * 32, b"m" * 16
    listener = InprocTransport().listen()
    may_recognise, is_recognising, is_welcome = (threading.Event() for _ in range(3))
    threads = []

    def recognise(_identity):
        is_recognising.set()
        assert may_recognise.wait(PATIENCE)

    def spawn(_role, target):
        threads.append(threading.Thread(target=target, daemon=True))
        threads[-1].start()

    info = WorkerInfo("worker0", 0)
    door = Acceptor(info, me, secret, recognise, lambda *_: is_welcome.set(), spawn)
    door.add(listener)
    door.open()
    connection = InprocTransport().connect(listener.address, PATIENCE)
    introduce(connection, secret, Identity(1, 0, Purpose.LANE, me, me))
    assert is_recognising.wait(PATIENCE)
    door.tick(time.monotonic() + 60)
    connection.send_bytes(b"it was not sent away")
    may_recognise.set()
    assert is_welcome.wait(PATIENCE)
    connection.close()
    door.close()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
