"""Starts two workers, as `telegrad run` does, and looks at what lies between them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import torch

from telegrad import rpc
from telegrad.rpc.group import current
from telegrad.tools.doctor.host import Finding, fail, ok

__all__ = ["try_two_workers"]

_MEGABYTES = 16
_PATIENCE = 100.0  # seconds; importing torch twice can take long on a machine that does more

_TRANSPORTS = {
    "unix": "Unix socket: both workers are on this host",
    "tcp": "encrypted TCP: the workers have no Unix sockets in common",
    "tls": "TLS with certificates",
    "plain": "TCP without encryption: the workers have no Unix sockets in common",
}


def try_two_workers() -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="telegrad-doctor-") as directory:
        path = os.path.join(directory, "seen.json")
        begun = time.monotonic()
        try:
            ran = subprocess.run(
                [
                    *(sys.executable, "-m", "telegrad", "run", "-n", "2"),
                    *("-m", "telegrad.tools.doctor.workers", path),
                ],
                capture_output=True,
                text=True,
                timeout=_PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            yield _failed(f"two workers did not come to an end within {_PATIENCE:g} s", "")
            return
        if ran.returncode != 0:
            yield _failed("two workers could not be started", ran.stderr)
            return
        taken = time.monotonic() - begun
        with open(path, encoding="utf-8") as file:
            seen = json.load(file)
    scheme = seen["address"].partition(":")[0]
    how = _TRANSPORTS.get(scheme, scheme)
    if seen["shares_memory"]:
        how += ", large tensors go through shared memory"
    yield ok("two workers", f"started, called each other and ended in {taken:.1f} s")
    yield ok("transport", how)
    yield ok("a call", f"{seen['call'] * 1e6:.0f} µs, with two small tensors")
    rate = 2 * _MEGABYTES / seen["echo"] / 1024
    yield ok(f"echo of {_MEGABYTES} MB", f"{seen['echo'] * 1e3:.1f} ms, {rate:.1f} GB/s")


def _failed(what: str, said: str) -> Finding:
    lines = [line for line in said.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    advice = "telegrad run -n 2 -m telegrad.tools.doctor.workers /dev/null shows all they said"
    return fail("two workers", what + last, advice)


# -- what the two workers run: worker 0 measures, and writes what it saw to a file


def _echo(x: torch.Tensor) -> torch.Tensor:
    return x


def _main(path: str) -> None:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        small, large = torch.ones(4), torch.zeros(_MEGABYTES << 18)
        seen = {
            "call": _median(200, lambda: rpc.rpc_sync("worker1", torch.add, args=(small, small))),
            "echo": _median(9, lambda: rpc.rpc_sync("worker1", _echo, args=(large,))),
        }
        network = current.current().agent.network
        peer = network.members.peer(1)
        route = {"address": network.address_of(1), "shares_memory": peer.memory is not None}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({**seen, **route}, file)
    rpc.shutdown()


def _median(times: int, run: Callable[[], object]) -> float:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


if __name__ == "__main__":
    _main(sys.argv[1])
