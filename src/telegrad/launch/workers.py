"""`telegrad.workers`: worker processes on this machine, and this process as their driver.

::

    driver      this process, rank 0, named "driver"
    └── starter     imports torch once and forks (`worker_starter`)
        ├── a           rank 1; in a session of its own, so Ctrl-C reaches the driver only
        └── b           rank 2

The group is an open one, so each process joins by itself, and a worker that dies while it starts is
reported at once. Its meeting place is a file that only this user can open, and connections are Unix
sockets, so nothing listens on a network.

(Rejected: `multiprocessing`. Its children import the main script again, which then needs a guard,
and does not exist in a notebook.)
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from telegrad import rpc
from telegrad.errors import LaunchError, TelegradError
from telegrad.forks import leave_at_fork
from telegrad.launch.monitor import GRACE, Monitor, write
from telegrad.launch.worker_starter import KILL, STOP
from telegrad.rpc.group import current
from telegrad.rpc.group.worker import Worker
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.wire import by_value

__all__ = ["DRIVER", "Workers", "check_positive", "checked_options", "workers"]

DRIVER = "driver"
"""The name of the process that starts the workers."""

_STARTER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker_starter.py")

_current: Workers | None = None


def workers(
    *names: str | int, timeout: float = 60.0, threads: int | None = None, **options: Any
) -> Workers:
    """Starts workers on this machine; this process becomes "driver".

    The workers run when the call returns. They end with the `with` block, with `close()`, or with
    this process, however that ends::

        with telegrad.workers("a", "b"):
            ...

    Functions and classes of `__main__`, a script or a notebook, are sent to the workers by value;
    those of modules are imported there, with this process's `sys.path` and working directory. The
    script is not run again, so it needs no `if __name__ == "__main__"`. The workers start with this
    process's environment variables and `torch.get_default_dtype()`.

    A second call at the top level, as when a notebook's cell is run twice, closes the earlier
    workers first.

    Args:
        names: the workers' names; or one number n, for "worker1" to "worker<n>".
        timeout: seconds to wait for the workers to start.
        threads: threads of torch on each worker. By default the cores divided by the workers, or
            `OMP_NUM_THREADS` if that is set.
        options: fields of `telegrad.rpc.RpcOptions`. Calls have no time limit by default.

    Raises:
        LaunchError: a worker has failed to start (the error quotes its output); or workers run
            already, in a `with` block that has not ended.
        TelegradError: this process belongs to another group.
        TypeError, ValueError: a name or an option is invalid.
    """
    global _current
    chosen = _checked_names(names)
    check_positive("timeout", timeout)
    if threads is not None:
        check_positive("threads", threads)
    fixed = {"init_method", "transport", "host"} & options.keys()
    if fixed:
        raise TypeError(f"workers() sets {', '.join(sorted(fixed))} itself: leave it out")
    rpc_options = checked_options("workers", {**options, "transport": "unix"})
    _refuse_own(rpc_options.allow or ())
    _make_room()
    group = Workers(chosen)
    try:
        group._start(rpc_options, _threads_for(len(chosen), threads), timeout)
    except BaseException:
        group._end(graceful=False)
        raise
    _current = group
    return group


def _refuse_own(allow: Iterable[Any]) -> None:
    """
    Raises:
        ValueError: the allow-list names a function or class of this script. Those are sent by
            value, which workers with an allow-list refuse.
    """
    for entry in allow:
        if isinstance(entry, str):
            module: Any = entry.partition(".")[0]
        else:
            module = getattr(entry, "__module__", None) or getattr(entry, "__name__", None)
        if module == "__main__":
            name = entry if isinstance(entry, str) else getattr(entry, "__qualname__", "__main__")
            raise ValueError(
                f"allow: {name} is part of the script or notebook that starts the workers. Such "
                "functions and classes are sent by value, which a worker with an allow-list "
                "refuses: define it in a module, and import that"
            )


class Workers:
    """The workers that `telegrad.workers` has started: a context manager, or use `close()`.

    `list(group)` and `group.names` give their names.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        """The names of the workers, without "driver"."""
        self._is_closed = False
        self._is_ending = False
        self._has_started = False
        self._depth = 0  # `with` blocks that have not ended
        self._directory = ""
        self._starter: subprocess.Popen[bytes] | None = None
        self._monitor: Monitor | None = None
        self._driver: Worker | None = None  # this process's

    def __enter__(self) -> Workers:
        if self._is_closed:
            raise LaunchError(f"{self!r}: start new ones with telegrad.workers(...)")
        self._depth += 1
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._close(graceful=kind is None, timeout=0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        listed = ", ".join(map(repr, self.names))
        return f"<telegrad.workers({listed}){', closed' if self._is_closed else ''}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _elsewhere, (self.names,)

    def close(self, timeout: float = 0) -> None:
        """Waits for this process's open calls, then ends the workers. Returns when they have ended.
        A second call does nothing.

        Args:
            timeout: seconds to wait for those calls; 0 means no limit.

        Raises:
            RpcTimeout: a call took longer. The workers have ended nevertheless.
        """
        self._close(graceful=True, timeout=timeout)

    def _close(self, *, graceful: bool, timeout: float = 0) -> None:
        global _current
        if self._is_closed:
            return
        if _current is self:
            _current = None
        self._end(graceful=graceful, timeout=timeout)

    # -- starting

    def _start(self, options: rpc.RpcOptions, threads: int | None, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._directory = tempfile.mkdtemp(prefix="telegrad-")
        options.init_method = f"file://{self._directory}/store"
        try:
            packed = pickle.dumps(options)
        except Exception as error:
            raise ValueError(
                f"the options cannot be sent to the workers: {error}. Use functions of modules "
                "that the workers can import"
            ) from error
        try:
            directory = os.getcwd()
        except OSError as error:
            raise LaunchError(
                f"the workers need this process's working directory: {error.strerror}"
            ) from None
        plan = {
            "names": self.names,
            "path": [os.path.abspath(entry) for entry in sys.path],  # "" is this directory
            "argv": sys.argv,
            "package": getattr(sys.modules["__main__"], "__package__", None),
            "environment": dict(os.environ),
            "directory": directory,
            "threads": threads,
            "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "options": packed,
        }
        self._start_processes(pickle.dumps(plan))
        monitor = self._monitor
        assert monitor is not None
        leave_at_fork(self)
        atexit.register(self._close, graceful=False)
        # Joined while the starter imports torch.
        rpc.init_rpc(DRIVER, rank=0, rpc_backend_options=options)
        self._driver = current.current()
        by_value.travel(by_value.Role.HOME)
        monitor.wait_until_joined(deadline, timeout)
        self._has_started = True

    def _start_processes(self, plan: bytes) -> None:
        ours, theirs = socket.socketpair()
        readers: list[int] = []
        writers: list[int] = []
        try:
            for _ in range(2 * len(self.names) + 1):  # the last is the starter's stderr
                reader, writer = os.pipe()
                readers.append(reader)
                writers.append(writer)
            self._starter = subprocess.Popen(
                [
                    sys.executable,
                    *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                    "-u",
                    _STARTER,
                    str(theirs.fileno()),
                    ",".join(map(str, writers[:-1])),
                ],
                stdin=subprocess.DEVNULL,
                stdout=writers[-1],
                stderr=writers[-1],
                pass_fds=(theirs.fileno(), *writers[:-1]),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            for reader in readers:
                os.close(reader)
            raise LaunchError(f"the workers cannot be started: {error}") from error
        finally:
            theirs.close()
            for writer in writers:
                os.close(writer)
        self._monitor = Monitor(self.names, self._starter, ours, readers)
        with contextlib.suppress(OSError):  # the starter has died: found out below
            ours.sendall(len(plan).to_bytes(8, "big") + plan)

    # -- ending

    def _end(self, *, graceful: bool, timeout: float = 0) -> None:
        if self._is_ending:
            return
        self._is_ending = True
        try:
            self._leave_group(graceful=graceful, timeout=timeout)
        finally:
            self._is_closed = True
            atexit.unregister(self._close)
            self._end_processes()
            if self._directory:
                shutil.rmtree(self._directory, ignore_errors=True)

    def _leave_group(self, *, graceful: bool, timeout: float) -> None:
        by_value.travel(by_value.Role.NONE)
        driver, monitor = self._driver, self._monitor
        if driver is None or monitor is None or current.acting() is not driver:
            return
        network = driver.agent.network

        def lost(rank: int, reason: str) -> None:
            if network.given_up.get(rank) == reason:  # it is silent and may never end by itself
                monitor.kill(self.names[rank - 1])

        network.watch_losses(lost)
        for rank, name in enumerate(self.names, start=1):
            if rank in network.given_up and network.members.is_lost(rank):
                monitor.kill(name)
        rpc.shutdown(graceful=graceful, timeout=timeout)

    def _end_processes(self) -> None:
        starter, monitor = self._starter, self._monitor
        if starter is None or monitor is None:
            return
        try:
            # Each wait ends when the starter does, after all workers, or at its timeout.
            for command in (STOP, KILL) if self._has_started else (KILL,):
                monitor.send(command)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    starter.wait(GRACE)
                    break
        finally:
            starter.kill()
            starter.wait()
            monitor.finish()

    def leave_to_parent(self) -> None:
        """In a process forked from the driver: the workers belong to the parent."""
        global _current
        self._is_closed = self._is_ending = True
        if _current is self:
            _current = None
        atexit.unregister(self._close)
        by_value.travel(by_value.Role.NONE)
        if self._monitor is not None:
            self._monitor.leave_to_parent()


def _elsewhere(names: tuple[str, ...]) -> Workers:
    """The group as a worker sees it in a global variable of the driver: it cannot close it."""
    group = Workers(names)
    group._is_closed = group._is_ending = True
    return group


# -- arguments


def _checked_names(names: tuple[str | int, ...]) -> tuple[str, ...]:
    if len(names) == 1 and isinstance(names[0], int) and not isinstance(names[0], bool):
        if names[0] < 1:
            raise ValueError(f"the number of workers must be 1 or more, got {names[0]}")
        return tuple(f"worker{number}" for number in range(1, names[0] + 1))
    if not names:
        raise ValueError('name the workers, or say how many: workers("a", "b") or workers(2)')
    chosen: list[str] = []
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f'a worker\'s name must be a string, got {name!r}: workers("a", "b") or workers(2)'
            )
        try:
            WorkerInfo(name, 0)
        except TelegradError as error:
            raise ValueError(str(error)) from None
        if name == DRIVER:
            raise ValueError(f'"{DRIVER}" is the name of this process: choose another')
        if name in chosen:
            raise ValueError(f"two workers are named {name!r}: names must differ")
        chosen.append(name)
    return tuple(chosen)


def check_positive(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number, got {value!r}")
    if not value > 0:
        raise ValueError(f"{what} must be positive, got {value!r}")


def checked_options(function: str, options: dict[str, Any]) -> rpc.RpcOptions:
    unknown = options.keys() - rpc.RpcOptions.__dataclass_fields__.keys()
    if unknown:
        raise TypeError(
            f"{function}() has no option {', '.join(map(repr, sorted(unknown)))}: see its "
            "documentation, and telegrad.rpc.RpcOptions for more"
        )
    return rpc.RpcOptions(**{"rpc_timeout": 0.0, **options})


def _threads_for(size: int, asked: int | None) -> int | None:
    if asked is not None:
        return int(asked)
    try:
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    except (KeyError, ValueError):
        return max(1, len(os.sched_getaffinity(0)) // size)


def _make_room() -> None:
    """Closes the workers of an earlier call at the top level."""
    if not rpc.is_initialized():
        if _current is not None:
            _current._close(graceful=False)
        return
    name = rpc.get_worker_info().name
    if _current is None or name != DRIVER:
        raise TelegradError(
            f"this process is worker {name!r} of a group, and telegrad.workers() would start "
            "another one: start all workers in the first call, or leave this group first, by "
            "closing what join() returned or by rpc.shutdown()"
        )
    if _current._depth:
        raise LaunchError(
            f"{_current!r} is in use by a `with` block that has not ended: use these workers, or "
            "start others after the block"
        )
    write(sys.stderr, f"telegrad: closing {_current!r} to start new workers\n")
    _current._close(graceful=False)
