"""What telegrad does that torch's RPC does not, tried on both.

`python -m telegrad.tools.bench.differences` runs it.

Every probe runs in processes of its own, which are killed after it. What has not ended after
`PATIENCE` seconds counts as hanging.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from telegrad.tools.bench.harness import SIDES, Side, join_group

PATIENCE = 45.0  # more than the heartbeat's 30 seconds
_spawn = multiprocessing.get_context("spawn")


class Group:
    """Processes of a group, as the driver of a probe sees them: it may kill and start them."""

    def __init__(self, side: str, directory: str, size: int) -> None:
        self._side = side
        self._directory = directory
        self._size = size
        self._processes: dict[int, Any] = {}

    def start(self, rank: int) -> None:
        process = _spawn.Process(
            target=_serve, args=(self._side, self._directory, rank, self._size), daemon=True
        )
        process.start()
        self._processes[rank] = process

    def kill(self, rank: int) -> None:
        os.kill(self._processes[rank].pid, signal.SIGKILL)
        self._processes[rank].join()

    def stop(self, rank: int) -> None:
        os.kill(self._processes[rank].pid, signal.SIGSTOP)


def unused_result(side: Side, group: Group) -> str:
    x = torch.ones(3, requires_grad=True)
    with side.autograd.context() as context_id:
        used = side.rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
        side.rpc.rpc_sync("worker2", torch.mul, args=(used, 3))
        side.autograd.backward(context_id, [used.sum()])
        gradient = side.autograd.get_gradients(context_id)[x].tolist()
    return "exact gradients" if gradient == [2, 2, 2] else f"wrong: {gradient}"


def gradients_of_gradients(side: Side, group: Group) -> str:
    x = torch.full((3,), 2.0, requires_grad=True)
    with side.autograd.context() as context_id:
        y = side.rpc.rpc_sync("worker1", torch.pow, args=(x, 3)).sum()
        side.autograd.backward(context_id, [y], create_graph=True)
        first = side.autograd.get_gradients(context_id)[x]
        side.autograd.backward(context_id, [first.sum()])
        second = (side.autograd.get_gradients(context_id)[x] - first.detach()).tolist()
    return "exact gradients" if second == [12, 12, 12] else f"wrong: {second}"


def killed_worker(side: Side, group: Group) -> str:
    call = side.rpc.rpc_async("worker1", time.sleep, args=(60,), timeout=10)
    time.sleep(0.5)
    begun = time.monotonic()
    group.kill(1)
    try:
        call.wait()
    except RuntimeError as error:
        is_named = "worker1" in str(error)
        taken = time.monotonic() - begun
        return f"{type(error).__name__} after {taken:.2f} s, {'' if is_named else 'not '}naming it"
    return "no error"


def silent_worker(side: Side, group: Group) -> str:
    call = side.rpc.rpc_async("worker1", time.sleep, args=(600,), timeout=0)
    time.sleep(0.5)
    begun = time.monotonic()
    group.stop(1)
    try:
        call.wait()
    except RuntimeError as error:
        is_named = "worker1" in str(error)
        taken = time.monotonic() - begun
        return f"{type(error).__name__} after {taken:.0f} s, {'' if is_named else 'not '}naming it"
    return "no error"


_kept: list[Any] = []


def keep(rref: Any) -> None:
    _kept.append(rref)


def dead_holder(side: Side, group: Group) -> str:
    def held() -> int:
        return int(side.rpc._rref_context_get_debug_info()["num_owner_rrefs"])

    rref = side.rpc.RRef(torch.ones(1))
    side.rpc.rpc_sync("worker2", keep, args=(rref,))
    del rref
    before = held()
    group.kill(2)
    end = time.monotonic() + 10
    while held() and time.monotonic() < end:
        time.sleep(0.05)
    return f"{before} held before, {held()} within 10 s of its death"


def returning_worker(side: Side, group: Group) -> str:
    side.rpc.rpc_sync("worker1", os.getpid)
    group.kill(1)
    group.start(1)
    end = time.monotonic() + 15
    while time.monotonic() < end:
        with contextlib.suppress(RuntimeError):
            if side.rpc.rpc_sync("worker1", os.getpid, timeout=2):
                return "can be called again"
        time.sleep(0.2)
    return "cannot be called for 15 s"


def closure(side: Side, group: Group) -> str:
    offset = 10
    found = side.rpc.rpc_sync("worker1", lambda a: a + offset, args=(1,))
    return "works" if found == 11 else f"wrong: {found}"


PROBES: dict[str, Callable[[Side, Group], str]] = {
    "a remote result that the loss does not use": unused_result,
    "gradients of gradients across workers": gradients_of_gradients,
    "a worker is killed during a call with timeout=10": killed_worker,
    "a worker falls silent during a call with timeout=0": silent_worker,
    "a reference held by a dead worker": dead_holder,
    "a worker comes back under its name": returning_worker,
    "a closure is called": closure,
}


def _serve(side: str, directory: str, rank: int, size: int) -> None:
    _be_quiet()
    join_group(side, directory, rank, size)
    time.sleep(10 * PATIENCE)  # it is killed before


def _be_quiet() -> None:
    """torch's RPC has much to say about what is done to it here."""
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)


def _drive(side: str, probe: str, directory: str, line: Connection) -> None:
    _be_quiet()
    os.setpgid(0, 0)  # the workers are of its process group, and are ended with it
    group = Group(side, directory, 3)
    for rank in (1, 2):
        group.start(rank)
    join_group(side, directory, 0, 3)
    line.send("ready")
    try:
        line.send(PROBES[probe](SIDES[side], group))
    except Exception as error:  # noqa: BLE001 - what it says is the result
        line.send(f"{type(error).__name__}: {str(error).splitlines()[0][:40]}…")


@contextlib.contextmanager
def _driver(side: str, probe: str) -> Iterator[Connection]:
    with tempfile.TemporaryDirectory(prefix="telegrad-bench-") as directory:
        here, there = _spawn.Pipe()
        process = _spawn.Process(target=_drive, args=(side, probe, directory, there))
        process.start()
        there.close()
        try:
            here.recv()
            yield here
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()


def run(side: str, probe: str) -> str:
    """What a probe finds on a side."""
    with _driver(side, probe) as line:
        if not line.poll(PATIENCE):
            return f"hangs: not over after {PATIENCE:.0f} s"
        try:
            found: str = line.recv()
        except EOFError:
            found = "the caller's process died"
        return found


def main() -> None:
    print("| | torch's RPC | telegrad |\n|---|---|---|")
    for probe in PROBES:
        print(f"| {probe} | {run('torch', probe)} | {run('telegrad', probe)} |", flush=True)


if __name__ == "__main__":
    main()
