"""The processes of the demo: they end with it, however it ends.

A worker waits at a pipe. A word on it, or the end of whoever holds the other end, ends the worker;
Ctrl-C, which a terminal sends to every process in the foreground, is the starter's business alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from telegrad.demo.sides import side_named

__all__ = ["DRIVER", "NAMES", "joined_group", "run_apart"]

NAMES = ("driver", "encoder", "server")
DRIVER = NAMES[0]

_PATIENCE = 20.0


@contextlib.contextmanager
def joined_group(side_name: str, instrument: Any = None) -> Iterator[None]:
    """Starts the other workers and makes this process the driver, while the block lasts.

    Args:
        instrument: for `RpcOptions.wrap_transport`, on all workers.
    """
    rpc = side_named(side_name).rpc
    with _started_workers(side_name, instrument) as (where, workers):
        has_joined = False
        try:
            _join(side_name, DRIVER, 0, where, instrument)
            has_joined = True
            for worker in workers:
                worker.hear()
            yield
            for worker in workers:
                worker.say("finish")
            rpc.shutdown()
            has_joined = False
            for worker in workers:
                worker.wait()
        finally:
            if has_joined:
                rpc.shutdown(graceful=False)


def run_apart(side_name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function on the driver of a group of its own, all in other processes; returns what it
    returns."""
    with _started_workers(side_name, None) as (where, workers):
        with _uninterrupted():
            workers.append(_Child(DRIVER, _drive, side_name, where, function, args))
        *others, driver = workers
        for other in others:
            other.hear()
        value = driver.hear()
        for other in others:
            other.say("finish")
        for worker in workers:
            worker.wait()
        return value


@contextlib.contextmanager
def _started_workers(side_name: str, instrument: Any) -> Iterator[tuple[str, list[_Child]]]:
    """Where they meet, and the processes, which end with the block."""
    with tempfile.TemporaryDirectory(prefix="telegrad-demo-") as directory:
        where = f"file://{directory}/store"
        workers: list[_Child] = []
        try:
            with _uninterrupted():
                for rank, name in enumerate(NAMES[1:], start=1):
                    workers.append(_Child(name, _work, side_name, name, rank, where, instrument))
            yield where, workers
        finally:
            for worker in workers:
                worker.destroy()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block: a process that is started and that nobody knows
    of yet would be left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C is not for this thread
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


class _Child:
    def __init__(self, name: str, target: Callable[..., None], *args: Any) -> None:
        starter = _fork_server()
        self._name = name
        self._line, there = starter.Pipe()
        self._process: BaseProcess = starter.Process(
            target=target, args=(there, *args), name=name, daemon=True
        )
        self._process.start()
        there.close()

    def hear(self) -> Any:
        """What it says next; ends at the latest when it dies."""
        try:
            value = self._line.recv()
        except EOFError:
            raise RuntimeError(f"the process of {self._name} ended too early") from None
        if isinstance(value, BaseException):
            raise value
        return value

    def say(self, word: str) -> None:
        with contextlib.suppress(OSError):  # it has died: whoever needs it hears of that
            self._line.send(word)

    def wait(self) -> None:
        self._process.join(_PATIENCE)

    def destroy(self) -> None:
        """Ends it: by itself if it can, by force if it does not."""
        self._line.close()  # a worker goes at this
        if self._process.is_alive():
            self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()


def _fork_server() -> Any:
    """Starts processes that have imported torch already. It must be deaf to Ctrl-C, which would end
    it in the middle of its imports: it inherits the blocked signal. Here the signal is only held
    back for that moment, not lost."""
    starter = multiprocessing.get_context("forkserver")
    starter.set_forkserver_preload(["telegrad.demo.command"])
    resource_tracker.ensure_running()  # before: when it starts, it unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return starter


def _work(
    line: Connection, side_name: str, name: str, rank: int, where: str, instrument: Any
) -> None:
    _begin(side_name)
    _join(side_name, name, rank, where, instrument)
    try:
        line.send("ready")
        word = line.recv()
    except (EOFError, OSError):
        word = "stop"
    side_named(side_name).rpc.shutdown(graceful=word == "finish")


def _drive(
    line: Connection, side_name: str, where: str, function: Callable[..., Any], args: Any
) -> None:
    _begin(side_name)
    try:
        _join(side_name, DRIVER, 0, where, None)
        value = function(*args)
    except Exception as error:  # noqa: BLE001 - told to who asked
        value = RuntimeError(f"{side_name}: {type(error).__name__}: {error}")
    try:
        line.send(value)
    except OSError:
        return  # nobody waits for it any more
    side_named(side_name).rpc.shutdown()


def _begin(side_name: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if side_name == "torch":  # it tells of every connection that ends, and of its own deprecations
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def _join(side_name: str, name: str, rank: int, where: str, instrument: Any) -> None:
    torch.set_num_threads(1)  # there are more processes than processors
    # Saying so avoids a warning.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    side = side_named(side_name)
    extra = {} if instrument is None else {"wrap_transport": instrument}
    side.rpc.init_rpc(
        name,
        rank=rank,
        world_size=len(NAMES),
        rpc_backend_options=side.options(init_method=where, **extra),
    )
