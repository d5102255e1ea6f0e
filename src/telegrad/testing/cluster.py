"""A group of real worker processes on this machine, for tests of telegrad and of programs on it.

The calling process becomes worker `worker0`; the others run in processes of their own and wait to
be called::

    with cluster(3) as group:
        assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).sum() == 4
        group.kill("worker2")

Processes come from a fork server that has imported torch once, so starting one takes hundredths of
a second and none inherits threads or descriptors of the test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from telegrad import rpc
from telegrad.errors import NotInitialized

__all__ = ["Cluster", "cluster", "processes"]

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["telegrad.testing.cluster"])

_PATIENCE = 30.0


class Cluster:
    """A running group. Its methods act on the other workers' processes."""

    def __init__(self, init_method: str, size: int | None, options: rpc.RpcOptions) -> None:
        self.init_method = init_method
        self.size = size
        self.options = options
        self._processes: dict[str, BaseProcess] = {}
        self._lines: dict[str, Connection] = {}
        self._expected_dead: set[str] = set()

    def start(self, name: str, rank: int) -> None:
        """Starts a worker, also one to take the place of a dead one."""
        former = self._processes.pop(name, None)
        if former is not None:
            self._lines.pop(name).close()  # one that has left its group by itself goes at this
            former.join(_PATIENCE)
            former.close()
        here, there = processes.Pipe()
        process = processes.Process(
            target=_work, args=(name, rank, self.size, self.options, there), name=name
        )
        process.start()
        there.close()
        self._processes[name] = process
        self._lines[name] = here
        self._expected_dead.discard(name)

    def wait_until_ready(self, name: str) -> None:
        """Returns when the worker has joined the group; ends at the latest when it dies."""
        while self._hear(name) != "ready":
            pass

    def wait_until_started(self, name: str) -> None:
        """Returns when the worker's process runs, or ends at the latest when it dies."""
        self._hear(
            name,
            ". A script that uses cluster() needs \"if __name__ == '__main__':\" around it, "
            "because each worker imports the script",
        )

    def _hear(self, name: str, hint: str = "") -> str:
        try:
            word: str = self._lines[name].recv()
        except EOFError:
            process = self._processes[name]
            process.join(_PATIENCE)
            raise RuntimeError(
                f"{name} ended with exit code {process.exitcode} before it had joined the group"
                + hint
            ) from None
        return word

    def pid(self, name: str) -> int:
        pid = self._processes[name].pid
        assert pid is not None
        return pid

    def kill(self, name: str) -> None:
        """`kill -9`; returns when the process is gone."""
        self._expected_dead.add(name)
        os.kill(self.pid(name), signal.SIGKILL)
        self._processes[name].join()

    def end(self, name: str) -> None:
        """Lets the worker shut down gracefully; returns when its process has ended."""
        self._lines[name].send("finish")
        self._processes[name].join()

    def expect_death(self, name: str) -> None:
        """The worker is going to die by itself, and the group's end must not complain of it."""
        self._expected_dead.add(name)

    def pause(self, name: str) -> None:
        """Stops the process (SIGSTOP): it lives, and does not answer. Returns when it stands still,
        which on a busy machine is a while after the signal."""
        os.kill(self.pid(name), signal.SIGSTOP)
        while any(state not in "TtZX" for state in _thread_states(self.pid(name))):
            time.sleep(0.001)

    def resume(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGCONT)

    def finish(self, *, graceful: bool) -> None:
        """Ends all workers, this process's last. Fails if one did not end well."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # it was killed
                line.send("finish" if graceful else "stop")
        if rpc.is_initialized():
            rpc.shutdown(graceful=graceful, timeout=_PATIENCE)
        failed = []
        for name, process in self._processes.items():
            process.join(_PATIENCE)
            if process.exitcode != 0 and name not in self._expected_dead:
                failed.append(f"{name} ended with {process.exitcode}")
        self.destroy()
        if failed:
            raise RuntimeError("; ".join(failed))

    def destroy(self) -> None:
        """Ends what is left, by force."""
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for line in self._lines.values():
            line.close()
        self._processes.clear()
        self._lines.clear()


@contextlib.contextmanager
def cluster(
    size: int, *, graceful: bool = True, open_group: bool = False, **options: object
) -> Iterator[Cluster]:
    """`size` workers, `worker0` (this process) to `worker{size-1}`.

    Args:
        graceful: how the group ends; a test that has ended a worker's agent by hand says False.
        open_group: workers may join and leave.
        options: fields of `RpcOptions`.
    """
    with tempfile.TemporaryDirectory(prefix="telegrad-") as directory:
        init_method = f"file://{directory}/store"
        chosen = dataclasses.replace(
            rpc.RpcOptions(),
            **{"init_method": init_method, **options},  # type: ignore[arg-type]
        )
        group = Cluster(init_method, None if open_group else size, chosen)
        try:
            for rank in range(1, size):
                group.start(f"worker{rank}", rank)
            for rank in range(1, size):  # one that cannot even start is not waited for
                group.wait_until_started(f"worker{rank}")
            rpc.init_rpc(
                "worker0", rank=0, world_size=group.size, rpc_backend_options=group.options
            )
            for rank in range(1, size):
                group.wait_until_ready(f"worker{rank}")
            yield group
            group.finish(graceful=graceful)
        finally:
            if rpc.is_initialized():
                rpc.shutdown(graceful=False)
            group.destroy()


def _work(
    name: str, rank: int, size: int | None, options: rpc.RpcOptions, line: Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for worker0, which ends the others
    with contextlib.suppress(OSError):  # whoever started this one is gone: found out below
        line.send("started")
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    try:
        line.send("ready")
        word = line.recv()  # ends with the word, or with the process that started this one
    except (EOFError, OSError):
        word = "stop"
    with contextlib.suppress(NotInitialized):  # a call may have ended it already
        rpc.shutdown(graceful=word == "finish", timeout=_PATIENCE)


def _thread_states(pid: int) -> Iterator[str]:
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            with open(f"/proc/{pid}/task/{thread}/stat", encoding="utf-8") as file:
                yield file.read().rpartition(")")[2].split()[0]
