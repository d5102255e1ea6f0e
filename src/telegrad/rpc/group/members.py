"""Who belongs to the group: the workers by name and by id, and the peer that each of them is.

In an open group others come and go. Who has just come is found in the directory when somebody asks
for it; the name of one who has left is remembered, for what is said about it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from telegrad.errors import WorkerLost
from telegrad.rpc.connections.peer import Peer
from telegrad.rpc.group.rendezvous import Directory, Record
from telegrad.rpc.group.worker_info import WorkerInfo

__all__ = ["Members", "has_left"]


class Members:
    """All that this worker knows of, itself included. Safe to use from any thread.

    Args:
        info: this worker.
        directory: where newcomers are found.
        new_peer: makes what another worker is reached by.
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
        self._former_names: dict[int, str] = {}  # of those who have left
        self._lock = threading.RLock()  # guards changes of the tables above

    def introduce(self, record: Record) -> None:
        """A worker is (again) part of the group; a new incarnation replaces the old one."""
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
        """Of those who had the name of this one, nobody is left."""
        with self._lock:
            self._ids[worker.name] = worker.id

    def infos(self) -> list[WorkerInfo]:
        """All of them, by their ids."""
        with self._lock:
            return [record.info for _, record in sorted(self._records.items())]

    def peers(self) -> list[Peer]:
        """All others."""
        with self._lock:
            return list(self._peers.values())

    # -- one of them

    def id_of(self, name: str) -> int | None:
        """A worker by its name; in an open group also one that has just come."""
        worker_id = self._ids.get(name)
        if worker_id is None and self._directory.is_open:
            self._read_newcomers()
            worker_id = self._ids.get(name)
        return worker_id

    def find(self, name: str) -> WorkerInfo | None:
        worker_id = self.id_of(name)
        return None if worker_id is None else WorkerInfo(name, worker_id)

    def name_of(self, worker_id: int) -> str | None:
        record = self._records.get(worker_id)
        if record is None and self._directory.is_open:
            self._read_newcomers()
            record = self._records.get(worker_id)
        return None if record is None else record.name

    def last_name_of(self, worker_id: int) -> str | None:
        """The same, also of one that has left the group."""
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
        """Makes sure that the loss of a worker would be noticed, also if it is lost already."""
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
