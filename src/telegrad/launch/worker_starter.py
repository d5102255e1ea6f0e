"""Starts the workers of `telegrad.workers`: one process that imports torch once, then forks them.

It runs as a script, in a session of its own: `python -u worker_starter.py CONTROL DESCRIPTORS`. The
control socket leads to the driver. The starter reads a plan from it, then commands: STOP asks all
workers to leave their group and end, KILL kills them, KILL_ONE and a rank in two bytes kills one.
The end of the stream, which is the death of the driver, kills them too. The starter writes a line
for each event: `joined NAME`, `ended NAME CODE`. It exits when all workers have.

No worker outlives the driver: if the driver dies, this process notices (its socket closes, or its
parent changes, in case a fork of the driver holds the socket); if this process dies, the system
kills the workers (PR_SET_PDEATHSIG).

Workers never run the driver's script. Their `__main__` is an empty module, which receives the
definitions that the driver sends (`wire.definitions`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import logging
import os
import pickle
import select
import signal
import socket
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

STOP, KILL, KILL_ONE = b"s", b"k", b"o"

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY = 0.5  # seconds between checks that the driver is still the parent
_PATIENCE = 0.2  # seconds for calls that still run: the driver has waited for those that it needs


def receive(control: socket.socket) -> Any:
    """Reads one pickled value; its length precedes it."""
    length = int.from_bytes(_receive_exactly(control, 8), "big")
    return pickle.loads(_receive_exactly(control, length))


def _receive_exactly(control: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:  # ends with the data, or with the driver
        part = control.recv(length - len(data))
        if not part:
            sys.exit(1)  # the driver has died
        data += part
    return data


@dataclass
class _Worker:
    name: str
    rank: int
    process: int
    stop: int  # a pipe: the worker ends when it reads a byte or the end of it


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    descriptors = [int(text) for text in sys.argv[2].split(",")]
    outputs = list(zip(descriptors[::2], descriptors[1::2], strict=True))
    driver = os.getppid()
    plan = receive(control)
    sys.path[:] = plan["path"]
    sys.argv[:] = plan["argv"]
    # After the path is set, and before the forks, since importing torch takes the most time.
    import telegrad.rpc
    import telegrad.wire.by_value  # noqa: F401

    wake_reader, wake_writer = socket.socketpair()
    wake_writer.setblocking(False)
    wake_reader.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_writer.fileno(), warn_on_full_buffer=False)
    workers: dict[int, _Worker] = {}
    for rank, name in enumerate(plan["names"], start=1):
        stop_reader, stop_writer = os.pipe()
        with warnings.catch_warnings():
            # Python warns of threads at a fork. The only ones are those of numpy's BLAS, which
            # handles forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            wake_reader.close()
            wake_writer.close()
            os.close(stop_writer)
            for other in workers.values():
                os.close(other.stop)
            _become_worker(outputs[rank - 1], outputs)
            sys.modules["__main__"] = ModuleType("__main__")
            sys.modules["__main__"].__package__ = plan["package"]  # for relative imports
            _run_worker(name, rank, plan, control, stop_reader)
            return
        os.close(stop_reader)
        workers[process] = _Worker(name, rank, process, stop_writer)
    for descriptor in descriptors:
        os.close(descriptor)
    _watch(workers, control, wake_reader, driver)
    os._exit(0)  # unloading torch takes long


def _become_worker(own: tuple[int, int], outputs: list[tuple[int, int]]) -> None:
    parent = os.getppid()
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a notebook may signal all its descendants
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the starter died before the call above
    for number, descriptor in enumerate(own, start=1):
        os.dup2(descriptor, number)
    for pair in outputs:
        for descriptor in pair:
            os.close(descriptor)


def _run_worker(name: str, rank: int, plan: Any, control: socket.socket, stop: int) -> None:
    """Joins the group, and serves until `stop` holds a byte or is closed: the driver closes the
    group, or has died. Does not return."""
    import torch

    from telegrad import rpc
    from telegrad.rpc.group import current
    from telegrad.wire import by_value

    faulthandler.enable(all_threads=False)
    os.environ.clear()
    os.environ.update(plan["environment"])
    os.chdir(plan["directory"])
    if plan["threads"] is not None:
        torch.set_num_threads(plan["threads"])
    # By name, since the starter reads the plan before it imports torch.
    torch.set_default_dtype(getattr(torch, plan["dtype"]))
    by_value.travel(by_value.Role.AWAY)
    options: rpc.RpcOptions = pickle.loads(plan["options"])
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)
    control.sendall(f"joined {name}\n".encode())
    control.close()
    os.read(stop, 1)
    worker = current.acting()
    if worker is not None:  # a call may have ended it already
        logging.getLogger("telegrad.rpc").setLevel(logging.ERROR)  # it gives up calls on purpose
        worker.close(patience=_PATIENCE)
    # Exit without unloading torch, which takes half a second, but run the program's exit handlers.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _watch(
    workers: dict[int, _Worker], control: socket.socket, wake: socket.socket, driver: int
) -> None:
    """Ends when all workers have ended."""
    listened_to = [control, wake]
    while workers:
        ready, _, _ = select.select(listened_to, [], [], _LOOK_EVERY)
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                wake.recv(1 << 12)
        if control in ready:
            command = control.recv(1)
            if command == STOP:
                for worker in workers.values():
                    with contextlib.suppress(OSError):  # it has ended
                        os.write(worker.stop, b"\0")
            elif command == KILL_ONE:
                rank = int.from_bytes(_receive_exactly(control, 2), "big")
                _kill(process for process, worker in workers.items() if worker.rank == rank)
            else:
                _kill(workers)
                if not command:
                    listened_to.remove(control)
        elif os.getppid() != driver:
            _kill(workers)
        _reap(workers, control)


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)


def _reap(workers: dict[int, _Worker], control: socket.socket) -> None:
    for process in list(workers):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            worker = workers.pop(process)
            os.close(worker.stop)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # processes that the worker has left behind
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):  # the driver has died
                control.sendall(f"ended {worker.name} {code}\n".encode())


if __name__ == "__main__":
    main()
