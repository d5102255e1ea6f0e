"""What telegrad does that torch's RPC does not, tried on both.

`python -m telegrad.tools.bench.differences` runs it.

Every probe runs in processes of its own, which are killed after it. What has not ended after
`PATIENCE` seconds counts as hanging.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from telegrad.tools.bench.harness import SIDES, Arena, Side, join_group

PATIENCE = 45.0  # more than the heartbeat's 30 seconds
_SIZE = 3


def unused_result(side: Side, directory: str) -> str:
    x = torch.ones(3, requires_grad=True)
    with side.autograd.context() as context_id:
        used = side.rpc.rpc_sync("worker1", torch.mul, args=(x, 2))
        side.rpc.rpc_sync("worker2", torch.mul, args=(used, 3))
        side.autograd.backward(context_id, [used.sum()])
        gradient = side.autograd.get_gradients(context_id)[x].tolist()
    return "exact gradients" if gradient == [2, 2, 2] else f"wrong: {gradient}"


def gradients_of_gradients(side: Side, directory: str) -> str:
    x = torch.full((3,), 2.0, requires_grad=True)
    with side.autograd.context() as context_id:
        y = side.rpc.rpc_sync("worker1", torch.pow, args=(x, 3)).sum()
        side.autograd.backward(context_id, [y], create_graph=True)
        first = side.autograd.get_gradients(context_id)[x]
        side.autograd.backward(context_id, [first.sum()])
        second = (side.autograd.get_gradients(context_id)[x] - first.detach()).tolist()
    return "exact gradients" if second == [12, 12, 12] else f"wrong: {second}"


def killed_worker(side: Side, directory: str) -> str:
    call = side.rpc.rpc_async("worker1", time.sleep, args=(60,), timeout=10)
    time.sleep(0.5)
    begun = time.monotonic()
    _signal(side, "worker1", signal.SIGKILL)
    try:
        call.wait()
    except RuntimeError as error:
        is_named = "worker1" in str(error)
        taken = time.monotonic() - begun
        return f"{type(error).__name__} after {taken:.2f} s, {'' if is_named else 'not '}naming it"
    return "no error"


def silent_worker(side: Side, directory: str) -> str:
    call = side.rpc.rpc_async("worker1", time.sleep, args=(600,), timeout=0)
    time.sleep(0.5)
    begun = time.monotonic()
    _signal(side, "worker1", signal.SIGSTOP)
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


def dead_holder(side: Side, directory: str) -> str:
    def held() -> int:
        return int(side.rpc._rref_context_get_debug_info()["num_owner_rrefs"])

    rref = side.rpc.RRef(torch.ones(1))
    side.rpc.rpc_sync("worker2", keep, args=(rref,))
    del rref
    before = held()
    _signal(side, "worker2", signal.SIGKILL)
    end = time.monotonic() + 10
    while held() and time.monotonic() < end:
        time.sleep(0.05)
    return f"{before} held before, {held()} within 10 s of its death"


def returning_worker(side: Side, directory: str) -> str:
    _signal(side, "worker1", signal.SIGKILL)
    command = [sys.executable, "-m", "telegrad.tools.bench.differences", side.name, directory]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as returned:
        try:
            end = time.monotonic() + 15
            while time.monotonic() < end:
                with contextlib.suppress(RuntimeError):
                    if side.rpc.rpc_sync("worker1", os.getpid, timeout=2) == returned.pid:
                        return "can be called again"
                time.sleep(0.2)
            return "cannot be called for 15 s"
        finally:
            returned.kill()


def closure(side: Side, directory: str) -> str:
    offset = 10
    found = side.rpc.rpc_sync("worker1", lambda a: a + offset, args=(1,))
    return "works" if found == 11 else f"wrong: {found}"


PROBES: dict[str, Callable[[Side, str], str]] = {
    "a remote result that the loss does not use": unused_result,
    "gradients of gradients across workers": gradients_of_gradients,
    "a worker is killed during a call with timeout=10": killed_worker,
    "a worker falls silent during a call with timeout=0": silent_worker,
    "a reference held by a dead worker": dead_holder,
    "a worker comes back under its name": returning_worker,
    "a closure is called": closure,
}


def run(side: str, probe: str) -> str:
    """What a probe finds on a side."""
    arena = Arena(side, _SIZE, apart=True)
    try:
        arena.begin(_probe, side, probe, arena.directory)
        if not arena.is_done(PATIENCE):
            return f"hangs: not over after {PATIENCE:.0f} s"
        return str(arena.end())
    except EOFError:
        return "the caller's process died"
    except Exception as error:  # noqa: BLE001 - what it says is the result
        return f"{type(error).__name__}: {str(error).splitlines()[0][:40]}…"
    finally:
        arena.kill()


def main() -> None:
    print("| | torch's RPC | telegrad |\n|---|---|---|")
    for probe in PROBES:
        print(f"| {probe} | {run('torch', probe)} | {run('telegrad', probe)} |", flush=True)


# -- in the driver


def _probe(side: str, probe: str, directory: str) -> str:
    for worker in range(_SIZE):
        SIDES[side].rpc.rpc_sync(f"worker{worker}", _be_quiet)
    return PROBES[probe](SIDES[side], directory)


def _be_quiet() -> None:
    """torch's RPC has much to say about what is done to it here."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _signal(side: Side, worker: str, number: signal.Signals) -> None:
    os.kill(side.rpc.rpc_sync(worker, os.getpid), number)


if __name__ == "__main__":
    if sys.argv[1:]:  # the worker that comes back
        join_group(sys.argv[1], sys.argv[2], 1, _SIZE)
        time.sleep(10 * PATIENCE)  # it is killed before
    else:
        main()
