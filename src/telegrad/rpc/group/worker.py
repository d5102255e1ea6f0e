"""`Worker`: joining a group, working, and leaving it.

A worker holds everything of this process's part in the group: the agent, the table of remote
references, gatherings, and the extensions of the layers above.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from telegrad.errors import NotInitialized, RpcTimeout, TelegradError, WorkerLost
from telegrad.forks import leave_at_fork
from telegrad.rpc.calls.agent import Agent
from telegrad.rpc.group import current
from telegrad.rpc.group.directory import Directory, Record
from telegrad.rpc.group.gather import Gatherings
from telegrad.rpc.group.options import RpcOptions
from telegrad.rpc.group.rendezvous import host_identity, meet
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.references.fetch import RemoteReferences
from telegrad.threads import heed_num_threads
from telegrad.transport.handshake import derive_key
from telegrad.wire.allowed.allow_list import AllowList
from telegrad.wire.frames import Kind

__all__ = ["Extension", "Worker", "extensions", "start_worker"]

_log = logging.getLogger("telegrad.rpc")

_PATIENCE = 5.0  # seconds for calls that still run here when the worker ends
_PATIENCE_AT_EXIT = 0.5


class Extension(Protocol):
    """A layer above's part of each worker."""

    def close(self) -> None:
        """The worker ends: drop its state, fail what waits for it."""

    def needs_close(self) -> bool:
        """Whether its threads must end before the interpreter exits."""
        ...


extensions: dict[str, Callable[[Agent], Extension]] = {}
"""Makes each worker's extensions, before it connects to others. A layer finds its own by key."""


class Worker:
    def __init__(
        self,
        info: WorkerInfo,
        incarnation: bytes,
        key: bytes,
        options: RpcOptions,
        directory: Directory,
    ) -> None:
        self.info = info
        self.directory = directory
        self.references = RemoteReferences()
        self.references.codec.allowed = options.allow_list()
        self.agent = Agent(
            info,
            incarnation,
            key,
            options,
            directory,
            self.references.codec,
            self._begin_thread,
        )
        self._predecessor = directory.predecessor()
        self.references.connect(self.agent)
        self.gatherings = Gatherings(self.agent)
        self.agent.handle(Kind.MEMBERS, self._on_membership)
        self.extensions = {name: make(self.agent) for name, make in extensions.items()}
        self._process = os.getpid()
        self._is_closed = False
        self._closing_lock = threading.Lock()  # one thread closes
        leave_at_fork(self)

    @property
    def allowed(self) -> AllowList | None:
        """What others may run here; None means no limit."""
        return self.references.codec.allowed

    def _begin_thread(self, _agent: Agent) -> None:
        current.act_for(self)
        heed_num_threads()

    def start(self, *, all_local: bool) -> None:
        """Listens, publishes the address, and waits for the rest of the group."""
        network, directory = self.agent.network, self.directory
        predecessor = self._predecessor
        record = network.listen(all_local=all_local)
        if predecessor is not None and network.answers(predecessor):
            raise TelegradError(
                f"rank {self.info.id} is taken: worker {predecessor.name!r} runs under it"
            )
        network.members.introduce(record)
        network.start()
        directory.publish(record)
        everybody = directory.everybody()
        for other in everybody:
            network.members.introduce(other)
        if directory.is_open:
            self._check_name_is_free()
        network.admit_members()
        if directory.is_open or predecessor is not None:
            self._tell_others(record, timeout=10.0)
        directory.joined(everybody, network.answers)

    def _check_name_is_free(self) -> None:
        network, me = self.agent.network, self.info
        for other in network.members.infos():
            if other.name == me.name and other.id != me.id:
                record = self.directory.record_of(other.id)
                if record is not None and network.answers(record):
                    self.directory.withdraw()
                    raise TelegradError(
                        f"RPC worker name {me.name!r} is not unique: worker {other.id} has it"
                    )
                network.members.forget(other.id)  # it is dead, or has just left
        network.members.call_by_name(me)

    def _tell_others(self, record: Record | None, *, timeout: float) -> None:
        """Notifies the workers in the group that this one joins or, by None, that it leaves. A
        worker that is lost or does not answer learns it later."""
        members = self.agent.network.members
        answers = [
            self.agent.request(member.id, Kind.MEMBERS, record, timeout=timeout)
            for member in members.infos()
            if member.id != self.info.id and not members.is_lost(member.id)
        ]
        for answer in answers:
            try:
                answer.wait()
            except (RpcTimeout, WorkerLost) as error:
                _log.info("another worker could not be notified of %s: %s", self.info.name, error)

    def _on_membership(self, source: int, record: Record | None) -> None:
        if record is None:
            self.agent.network.members.forget(source)
        else:
            self.agent.network.members.introduce(record)

    # -- the end

    def shutdown(self, *, graceful: bool, timeout: float) -> None:
        """Leaves the group. The worker is unusable afterwards, even if this raises.

        Args:
            graceful: first waits until no worker has work left, and all workers know it.
            timeout: seconds for that; 0 waits for as long as the others live.
        """
        try:
            if graceful:
                deadline = time.monotonic() + timeout if timeout else float("inf")
                if self.directory.is_open:
                    self._leave(deadline)
                else:
                    self._finish_together(deadline)
        finally:
            self.close()

    def _finish_together(self, deadline: float) -> None:
        self.wait_until_quiet(deadline)
        self.references.flush(_left(deadline))
        self.part(deadline)

    def wait_until_quiet(self, deadline: float) -> None:
        """Waits until no worker has work left and no message is under way. All must call it.

        Raises:
            RpcTimeout: the deadline, a time of `time.monotonic`, has passed.
        """
        workers = [member.id for member in self.agent.network.members.infos()]
        # The same counts twice, and no work: so no message was under way in between.
        seen: Any = None
        while True:
            self._wait_until_idle(deadline)
            counts = self._gather(workers, self._activity(), deadline)
            is_quiet = all(begun == ended and not pending for begun, ended, pending in counts)
            if is_quiet and counts == seen:
                return
            seen = counts

    def part(self, deadline: float) -> None:
        """The last gathering: afterwards no worker sends anything, and all may close."""
        workers = [member.id for member in self.agent.network.members.infos()]
        self._gather(workers, None, deadline)
        self._wait_until_last(workers)

    def _gather(self, workers: list[int], value: Any, deadline: float) -> list[Any]:
        found = self.gatherings.gather(workers, value, timeout=_left(deadline), forgive_losses=True)
        for worker, silence in self.agent.network.given_up.items():
            if worker in workers and worker not in found:
                name = self.agent.name_of(worker)
                raise WorkerLost(
                    f"worker {self.info.name!r} ends without worker {name!r}, which may still need "
                    f"it: {silence} (RpcOptions.heartbeat_timeout sets the limit)",
                    worker=name,
                    reason=silence,
                )
        return [found[worker] for worker in sorted(found)]

    def _activity(self) -> tuple[int, int, int]:
        begun, ended = self.agent.service.work_counts()
        return begun, ended, self.agent.pending_calls()

    def _is_idle(self) -> bool:
        """Whether no call runs here, and no call made here is open."""
        begun, ended, pending = self._activity()
        return begun == ended and not pending

    def _wait_until_idle(self, deadline: float) -> None:
        """Ends when this worker is idle, or at the deadline. A call made here ends with its reply,
        its timeout, or the loss of its worker."""
        pause = 0.0005
        while not self._is_idle():
            if time.monotonic() > deadline:
                begun, ended, pending = self._activity()
                raise RpcTimeout(
                    f"worker {self.info.name!r} still has work at the end of its shutdown's "
                    f"timeout: {begun - ended} calls run here, {pending} made here are open",
                    worker=self.info.name,
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _wait_until_last(self, workers: list[int]) -> None:
        """Holds the leader of the last gathering until the others have its answer, and so have
        left. Ends when they are gone, or after a few seconds."""
        network = self.agent.network
        others = [w for w in workers if w != self.info.id]
        if others and self.info.id < min(others):
            end = time.monotonic() + 5.0
            while time.monotonic() < end and not all(network.members.is_lost(w) for w in others):
                time.sleep(0.001)

    def _leave(self, deadline: float) -> None:
        """Leaves an open group, in which others may continue."""
        try:
            self._wait_until_idle(deadline)
            self.references.flush(_left(deadline), others_stay=True)
        finally:  # also after a timeout: this worker ends, and its name must be free
            self.directory.withdraw()
            self._tell_others(None, timeout=_left(deadline) and max(1.0, _left(deadline)))

    def close(self, *, patience: float = _PATIENCE) -> None:
        """Ends at once. Everything that waits for this worker, here or elsewhere, fails.

        Args:
            patience: seconds to wait for calls that still run here.
        """
        with self._closing_lock:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self._close_at_exit)
        for extension in self.extensions.values():
            extension.close()
        self.references.close()
        self.agent.close(patience=patience)

    def close_at_exit(self) -> None:
        """Ends the worker of a program that exits without a shutdown.

        Otherwise the ends of other workers would wake its threads while the interpreter exits, and
        abort the process.
        """
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        if not (_may_be_blamed() and self._leave_open(_PATIENCE_AT_EXIT)):
            self.close(patience=_PATIENCE_AT_EXIT)

    def _leave_open(self, patience: float) -> bool:
        """Leaves the connections open until the process ends, so that no other worker fails for
        lack of this one before it has exited. False if the worker must be closed first.

        `multiprocessing` and `torch.multiprocessing.spawn` blame the process that exits first. A
        process that has raised takes a second to unload torch. If it closed its connections before
        that, the workers that notice would fail and exit before it.

        The threads that wait for messages remain. If one is woken later, the exiting interpreter
        ends it. So no work may run on them, and none may hold an object that cannot be destroyed
        without the interpreter.
        """
        if any(extension.needs_close() for extension in self.extensions.values()):
            return False
        self.agent.network.hold_requests()
        deadline = time.monotonic() + patience
        while not self._is_idle():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        self.agent.network.fall_silent()
        _keep_forever(self)  # otherwise the end of this object closes the connections
        return True

    def leave_to_parent(self) -> None:
        """In a forked process: every use of this worker, and of references, raises; its end does
        nothing."""
        _keep_forever(self)  # the end of a `file://` store would change the parent's file
        self._closing_lock, self._is_closed = threading.Lock(), True
        elsewhere: Any = current.InParent(self._refusal)
        self.agent.network = elsewhere
        self.references.table.leave_to_parent(self._refusal)
        current.leave_to_parent(self, self._refusal)

    def _refusal(self) -> NotInitialized:
        return NotInitialized(
            f"this process was forked from worker {self.info.name!r} (process {self._process}) and "
            "has no worker of its own: init_rpc can be called here"
        )


def _may_be_blamed() -> bool:
    """Whether this process was started by `multiprocessing` and has no children. (A process with
    children waits for them at its exit, and they may wait for the end of its worker.)"""
    return multiprocessing.parent_process() is not None and not multiprocessing.active_children()


def _keep_forever(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _left(deadline: float) -> float:
    return 0.0 if deadline == float("inf") else max(0.001, deadline - time.monotonic())


def start_worker(
    name: str,
    rank: int,
    world_size: int | None,
    options: RpcOptions,
    store: Store | None = None,
    prepare: Callable[[Worker], None] | None = None,
) -> Worker:
    """Joins a group.

    Args:
        store: where to meet; by default `options.init_method`.
        prepare: gets the worker before it connects to others.
    """
    size = world_size or 0
    try:
        if store is None:
            store, rank, size = meet(options, rank, world_size)
        info = WorkerInfo(name, rank)
        directory = Directory(store, rank, size)
        directory.declare()
        all_local = directory.all_on_one_host(host_identity())
        secret = directory.secret(
            options.configured_secret(), all_local=all_local, has_certificates=bool(options.tls)
        )
        incarnation = secrets.token_bytes(16)
        worker = Worker(info, incarnation, derive_key(secret), options, directory)
        try:
            if prepare is not None:
                prepare(worker)
            worker.start(all_local=all_local)
        except BaseException:
            worker.close()
            raise
    except dist.DistNetworkError as error:
        raise TelegradError(
            f"worker {name!r} lost the meeting place before it had joined the group: "
            f"{str(error).splitlines()[0]}. Check the worker of rank 0, or the process that "
            "hosts the store, and the network"
        ) from None
    worker.close_at_exit()
    return worker
