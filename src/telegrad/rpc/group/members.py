"""Who belongs to the group: the workers by name and id, and the peer of each.

In an open group workers come and go. A newcomer is looked up in the directory when it is first
asked for. The name of a worker that has left is remembered, for error texts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from telegrad.errors import TelegradError, WorkerLost
from telegrad.rpc.connections.peer import Peer
from telegrad.rpc.group.directory import Directory, Record
from telegrad.rpc.group.worker_info import WorkerInfo

__all__ = ["Members", "has_left"]


class Members:
    """All workers that this worker knows of, itself included. Safe to use from any thread.

    Args:
        info: this worker.
        directory: where newcomers are found.
        new_peer: makes the peer of another worker.
    """

    def __init__(
        self, info: WorkerInfo, directory: Directory, new_peer: Callable[[Record], Peer]
    ) -> None:
        self._info = info
        self._directory = directory
        self._new_peer = new_peer
        self._peers: dict[int, Peer] = {}
        self._records: dict[int, Record] = {}
        self._ids: dict[str, int] = {info.name: info.id}
        self._former_names: dict[int, str] = {}  # of workers that have left
        self._lock = threading.RLock()  # guards changes of the tables above

    def introduce(self, record: Record) -> None:
        """Adds a worker; a new incarnation replaces the old one."""
        replaced: Peer | None = None
        with self._lock:
            known = self._records.get(record.id)
            if known is not None and known.incarnation == record.incarnation:
                return
            self._records[record.id] = record
            self._ids[record.name] = record.id
            if record.id != self._info.id:
                replaced = self._peers.get(record.id)
                self._peers[record.id] = self._new_peer(record)
        if replaced is not None:
            replaced.lose("another worker has taken its place")

    def forget(self, worker_id: int) -> None:
        """A worker has left an open group."""
        with self._lock:
            record = self._records.pop(worker_id, None)
            peer = self._peers.pop(worker_id, None)
            if record is not None:
                self._former_names[worker_id] = record.name
                if self._ids.get(record.name) == worker_id:
                    del self._ids[record.name]
        if peer is not None:
            peer.lose("it has left the group")

    def call_by_name(self, worker: WorkerInfo) -> None:
        """Gives a name to this worker, after every earlier worker of that name has gone."""
        with self._lock:
            self._ids[worker.name] = worker.id

    def infos(self) -> list[WorkerInfo]:
        """All workers, by id."""
        with self._lock:
            return [record.info for _, record in sorted(self._records.items())]

    def peers(self) -> list[Peer]:
        """The peers of all other workers."""
        with self._lock:
            return list(self._peers.values())

    # -- one of them

    def id_of(self, name: str) -> int | None:
        """A worker's id by its name; in an open group also a newcomer's."""
        worker_id = self._ids.get(name)
        if worker_id is None and self._directory.is_open:
            self._read_newcomers()
            worker_id = self._ids.get(name)
        return worker_id

    def named(self, worker: str | int) -> WorkerInfo:
        """A worker by its name or rank.

        Raises:
            TelegradError: there is no such worker.
            ValueError: this is neither a name nor a rank.
        """
        if isinstance(worker, str):
            worker_id = self.id_of(worker)
            if worker_id is not None:
                return WorkerInfo(worker, worker_id)
        elif isinstance(worker, int) and not isinstance(worker, bool):
            name = self.name_of(worker)
            if name is not None:
                return WorkerInfo(name, worker)
        else:
            raise ValueError(
                f"a worker is named by its name, rank or WorkerInfo, got a {type(worker).__name__}"
            )
        names = ", ".join(member.name for member in self.infos())
        raise TelegradError(
            f"could not find destination {worker!r}: the workers of this group are {names}"
        )

    def name_of(self, worker_id: int) -> str | None:
        record = self._records.get(worker_id)
        if record is None and self._directory.is_open:
            self._read_newcomers()
            record = self._records.get(worker_id)
        return None if record is None else record.name

    def last_name_of(self, worker_id: int) -> str | None:
        """The same, also for a worker that has left the group."""
        return self.name_of(worker_id) or self._former_names.get(worker_id)

    def record_of(self, worker_id: int) -> Record | None:
        return self._records.get(worker_id)

    def peer(self, worker_id: int) -> Peer:
        """
        Raises:
            WorkerLost: there is no such worker, or it has left the group.
        """
        peer = self._peers.get(worker_id)
        if peer is None:
            if self.name_of(worker_id) is None or worker_id not in self._peers:
                former = self._former_names.get(worker_id)
                if former is not None:
                    raise has_left(former)
                raise WorkerLost(f"there is no worker with id {worker_id} in the group")
            peer = self._peers[worker_id]
        return peer

    def known_peer(self, worker_id: int) -> Peer | None:
        """The same, without looking for newcomers."""
        return self._peers.get(worker_id)

    def watch(self, worker_id: int) -> None:
        """Connects to a worker, so that its loss is noticed; also if it is lost already."""
        if worker_id == self._info.id:
            return
        try:
            self.peer(worker_id).multiplex()
        except WorkerLost as error:
            peer = self._peers.get(worker_id)
            if peer is not None:
                peer.lose(error.reason)

    def is_lost(self, worker_id: int) -> bool:
        """Whether a worker was reached once and is gone now."""
        peer = self._peers.get(worker_id)
        return worker_id != self._info.id and (peer is None or peer.is_lost)

    def _read_newcomers(self) -> None:
        for record in self._directory.newcomers():
            self.introduce(record)


def has_left(name: str) -> WorkerLost:
    reason = "it has left the group"
    return WorkerLost(f"worker {name!r} cannot be called: {reason}", worker=name, reason=reason)
