"""Whom `torch.multiprocessing.spawn` blames when a worker raises: whichever is gone first."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.multiprocessing

from telegrad import autograd, rpc
from telegrad.errors import WorkerLost

CAUSE = 1


def double(x):
    return x * 2


def take_a_while(seconds):
    time.sleep(seconds)


def wait_for_it():
    while True:
        rpc.rpc_sync(f"worker{CAUSE}", take_a_while, (0.1,))


def call_it():
    while True:
        rpc.rpc_sync(f"worker{CAUSE}", double, (torch.ones(2),))


def call_it_with_futures():
    while True:
        torch.futures.wait_all(
            [rpc.rpc_async(f"worker{CAUSE}", double, (torch.ones(2),)) for _ in range(4)]
        )


def train_with_it():
    while True:
        with autograd.context() as context_id:
            x = torch.ones(2, requires_grad=True)
            y = rpc.rpc_sync(f"worker{CAUSE}", double, (x,))
            autograd.backward(context_id, [y.sum()])


def leave():
    rpc.shutdown()


def join(rank, world_size, meeting):
    options = rpc.RpcOptions(init_method=f"file://{meeting}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)


def worker(rank, meeting, meanwhile):
    join(rank, 3, meeting)
    if rank != CAUSE:
        meanwhile()
    for other in (0, 2):
        rpc.rpc_sync(f"worker{other}", double, (torch.ones(2),))
    raise ValueError("the cause")


@pytest.mark.parametrize(
    "meanwhile", [wait_for_it, call_it, call_it_with_futures, train_with_it, leave]
)
def test_spawn_blames_the_worker_that_raised(tmp_path, meanwhile):
    group = torch.multiprocessing.spawn(
        worker, (tmp_path / "meeting", meanwhile), nprocs=3, join=False
    )
    with pytest.raises(torch.multiprocessing.ProcessRaisedException) as raised:
        while not group.join():
            pass
    assert raised.value.error_index == CAUSE, str(raised.value)
    assert "ValueError: the cause" in str(raised.value)
    assert group.processes[CAUSE].exitcode == 1


is_asked = threading.Event()


def take_long():
    is_asked.set()
    time.sleep(60)


def part_from_a_caller(rank, meeting):
    join(rank, 2, meeting)
    if rank == CAUSE:
        is_asked.wait(60)
        raise ValueError("the cause")
    begun = time.monotonic()
    with pytest.raises(WorkerLost, match="take_long"):
        rpc.rpc_sync(f"worker{CAUSE}", take_long)
    (meeting.parent / "seconds").write_text(str(time.monotonic() - begun))
    rpc.shutdown()


def test_who_waits_for_a_long_call_does_not_wait_for_its_end(tmp_path):
    """A worker that still runs something when its program ends is closed, not left open."""
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="the cause"):
        torch.multiprocessing.spawn(part_from_a_caller, (tmp_path / "meeting",), nprocs=2)
    assert float((tmp_path / "seconds").read_text()) < 30
