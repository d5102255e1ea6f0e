"""Starts the workers of `telegrad.workers`: one process that imports torch once, then forks them.

It runs as a script, in a session of its own: `python -u worker_starter.py CONTROL DESCRIPTORS`. The
control socket leads to the driver. The starter reads a `Plan` from it, then commands: STOP asks all
workers to leave their group and end, KILL kills them, KILL_ONE and a rank in two bytes kills one,
and the end of the stream, which is the death of the driver, kills them too. It writes a line for
each event: `joined NAME`, `ended NAME CODE`. It exits when all workers have.

No worker outlives the driver: if the driver dies, this process notices (its socket closes, or its
parent changes, in case a fork of the driver holds the socket); if this process dies, the system
kills the workers (PR_SET_PDEATHSIG).

Workers never run the driver's script. Their `__main__` is an empty module, which receives the
definitions that the driver sends (`wire.definitions`).
"""

from __future__ import annotations

import contextlib
import ctypes
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
_LOOK_EVERY = 0.5  # seconds between looks at whether the driver is still the parent


def receive(control: socket.socket) -> Any:
    """Reads one pickled value, which its length precedes."""
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
    stop: int  # a pipe: the worker ends when it can read a byte or the end from it


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    descriptors = [int(text) for text in sys.argv[2].split(",")]
    outputs = list(zip(descriptors[::2], descriptors[1::2], strict=True))
    driver = os.getppid()
    plan = receive(control)
    sys.path[:] = plan["path"]
    sys.argv[:] = plan["argv"]
    # Imported after the path is set, and before the forks: this is what takes the time.
    import telegrad  # noqa: F401
    from telegrad.launch import worker_life

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
            # knows about forks.
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
            worker_life.live(name, rank, plan, control, stop_reader)
            return
        os.close(stop_reader)
        workers[process] = _Worker(name, rank, process, stop_writer)
    for descriptor in descriptors:
        os.close(descriptor)
    _watch(workers, control, wake_reader, driver)
    os._exit(0)  # unloading torch takes a while


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
                os.killpg(process, signal.SIGKILL)  # what the worker has left behind
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):  # the driver has died
                control.sendall(f"ended {worker.name} {code}\n".encode())


if __name__ == "__main__":
    main()
