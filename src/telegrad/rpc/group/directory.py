"""The directory of a group: one record per worker, kept in a store.

Each worker publishes its record (name, id, incarnation, host, addresses) under its id. In a group
of known size each worker first publishes its host, so that a group on one host listens on loopback
only; then it listens, publishes its record, and waits for all others. In an open group
(`world_size=None`) a worker publishes, reads who is there, and notifies them; a worker that is
asked for an unknown name reads on in the store.

A worker that is restarted after a crash finds a record under its id. If the worker in that record
no longer answers, the new one replaces it; otherwise the id is taken, and joining fails.

The store is not trusted, since others may reach and change it: workers prove their identity when
they connect. The secret goes through the store only if no other user can read it, as with the
private file of a `file://` store.

Every wait here is for the store. It ends in the value, or in an error after the agent's timeout,
even if the store has vanished.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from telegrad.errors import TelegradError
from telegrad.ids import MAX_LIVES
from telegrad.rpc.group.private_files import user_secret
from telegrad.rpc.group.store import Part, PatientStore
from telegrad.rpc.group.worker_info import WorkerInfo

__all__ = ["Directory", "Record"]

_NO_SECRET = (
    "the workers of this group may be on several machines, and have no secret: whoever can reach "
    "their meeting place can join them and run any code on their machines"
)
_MAKE_SECRET = (
    "Make a secret, with: export TELEGRAD_SECRET=$(python -c 'import secrets; "
    "print(secrets.token_hex(32))') and start all workers with the same value. "
    "TELEGRAD_INSECURE=1 does without one, for networks where every machine and user is trusted"
)
_LOOK_EVERY = 1.0  # seconds between checks for workers that died while others wait for them


_T = TypeVar("_T")
_log = logging.getLogger("telegrad.rpc")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a worker publishes about itself."""

    name: str
    id: int
    incarnation: str
    host: str
    addresses: list[str]

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, self.id)


class Directory:
    """The records of a group, kept in a store.

    The store may end with the worker that hosts it while others continue. After that, no worker can
    join, and the others use the records that they have.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = PatientStore(store)
        self._part = store if isinstance(store, Part) else None
        self._rank = rank
        self._world_size = world_size
        self._seen = 0  # slots of an open group that were read
        self._empty: list[int] = []  # those of them that were still empty
        self._has_ended = False  # the store has
        self.life = 0
        """How many workers of this group had this rank before; set by `declare`."""

    @property
    def is_open(self) -> bool:
        """Whether workers may join and leave."""
        return self._world_size == 0

    def declare(self) -> None:
        """Publishes which kind of group this is, and which process takes this rank.

        Raises:
            TelegradError: the group that meets here is of another kind or size.
        """
        kind = "open" if self.is_open else f"of {self._world_size} workers"
        declared = bytes(self._store.compare_set("kind", "", kind)).decode()
        if "open" in (kind, declared) and declared != kind:
            raise TelegradError(
                "RPC group mixes statically and dynamically initialized members which is not "
                f"supported. The group is {declared}, and this worker was told that it is {kind}: "
                "give all workers the world size, or none"
            )
        turn = self._store.add(f"turns/{self._rank}", 1)
        self.life = turn - 1
        if self.life >= MAX_LIVES:
            raise TelegradError(
                f"rank {self._rank} has been taken {MAX_LIVES} times in this group, and there are "
                "no more ids for it: take another rank, or another meeting place"
            )
        if not self.is_open:
            self._store.set(f"turn/{self._rank}/{turn}", f"{_this_process()}, told {kind}")
        if declared != kind:
            raise TelegradError(
                f"the group that meets here is {declared}, and this worker, rank {self._rank}, was "
                f"told that it is {kind}: give all workers the same world size. If no other "
                "worker was started, an earlier group has left this behind: meet elsewhere"
            )

    def secret(
        self, configured: bytes | None, *, all_local: bool, has_certificates: bool = False
    ) -> bytes:
        """The group's secret: the configured one, or one that only this user's processes know.

        Args:
            all_local: the whole group is on this host.
            has_certificates: workers prove by certificates that they belong together.

        Raises:
            TelegradError: the group is on several machines and has no secret.
        """
        if configured is not None:
            return configured
        is_private = self._part is not None and self._part.is_private
        if all_local and not is_private:
            return user_secret()
        if not is_private and not has_certificates:
            if os.environ.get("TELEGRAD_INSECURE") != "1":
                raise TelegradError(f"{_NO_SECRET}. {_MAKE_SECRET}")
            _log.warning("TELEGRAD_INSECURE=1: %s. %s", _NO_SECRET, _MAKE_SECRET)
        made = secrets.token_hex(32)
        return bytes(self._store.compare_set("secret", "", made))

    def all_on_one_host(self, host: str) -> bool:
        """Whether the whole group is on this host. An open group is if its meeting place is."""
        if self.is_open:
            return self._part is not None and self._part.is_local
        self._store.set(f"host/{self._rank}", host)
        return all(
            self._get(f"host/{rank}", rank) == host.encode() for rank in range(self._world_size)
        )

    def predecessor(self) -> Record | None:
        """The record of the worker that had this id before."""
        return self._stored(self._rank)

    def publish(self, record: Record) -> None:
        if self._part is not None:
            self._part.use_up()
        self._store.set(f"worker/{record.id}", json.dumps(asdict(record)))
        if self.is_open:
            slot = self._store.add("slots", 1)
            self._store.set(f"slot/{slot}", str(record.id))

    def withdraw(self) -> None:
        """This worker leaves an open group."""
        self._ask(lambda: self._store.set(f"worker/{self._rank}", ""), None)

    def everybody(self) -> list[Record]:
        """All records of a group of known size, waiting for them; those present in an open one.

        Raises:
            TelegradError: two workers have one name, or a worker did not join in time.
        """
        if self.is_open:
            return self._read_slots()
        records = [
            record
            for rank in range(self._world_size)
            if (record := _parse(self._get(f"worker/{rank}", rank))) is not None
        ]
        names: dict[str, int] = {}
        for record in records:
            if record.name in names:
                raise TelegradError(
                    f"RPC worker name {record.name!r} is not unique: workers {names[record.name]} "
                    f"and {record.id} both have it"
                )
            names[record.name] = record.id
        return records

    def newcomers(self) -> list[Record]:
        """Records of an open group that have appeared since the last call."""
        return self._ask(self._read_slots, [])

    def _read_slots(self) -> list[Record]:
        count = self._store.add("slots", 0)
        slots = [*self._empty, *range(self._seen + 1, count + 1)]
        self._seen, self._empty = count, []
        found: dict[int, Record] = {}
        for slot in slots:
            # A worker that took a slot may die before it writes to it. If it is alive, it reads
            # all others afterwards and notifies them.
            if not self._store.check([f"slot/{slot}"]):
                self._empty.append(slot)
                continue
            worker = int(self._store.get(f"slot/{slot}"))
            record = _parse(self._store.get(f"worker/{worker}"))
            if record is not None:
                found[worker] = record
        return list(found.values())

    def record_of(self, worker_id: int) -> Record | None:
        """The newest record of a worker; None if it has none."""
        return self._ask(lambda: self._stored(worker_id), None)

    def _stored(self, worker_id: int) -> Record | None:
        key = f"worker/{worker_id}"
        return _parse(self._store.get(key)) if self._store.check([key]) else None

    def _ask(self, question: Callable[[], _T], without_store: _T) -> _T:
        """Asks the store, if it is still there. torch logs at length each time an ended store is
        asked, so that happens once only."""
        if self._has_ended:
            return without_store
        try:
            return question()
        except dist.DistNetworkError as error:
            self._has_ended = True
            _log.info("the store where the workers met has ended: %s", str(error).splitlines()[0])
            return without_store

    def joined(self, group: Sequence[Record], is_alive: Callable[[Record], bool]) -> None:
        """Holds the worker that may host the store until all others have read from it, or died.

        Raises:
            TelegradError: one of them took longer than the store's timeout.
        """
        if self.is_open:
            return
        self._store.set(f"joined/{self._rank}", "")
        if self._rank != 0:
            return
        end = time.monotonic() + self._store.timeout
        keys = [f"joined/{record.id}" for record in group]
        # Ends when all have joined, when none of the missing is alive, or at the timeout.
        while not self._store.wait(keys, _LOOK_EVERY):
            missing = [record for record in group if not self._store.check([f"joined/{record.id}"])]
            living = [record for record in missing if is_alive(record)]
            if not living:
                for record in missing:
                    _log.warning("worker %s died while the group came together", record.name)
                return
            if time.monotonic() > end:
                raise TelegradError(
                    f"worker {living[0].name!r} came to the meeting place, and has not joined the "
                    f"group within {self._store.timeout:g} s: look at what it does (rpc_timeout "
                    "sets this limit)"
                )

    def _get(self, key: str, rank: int) -> bytes:
        try:
            return bytes(self._store.get(key))
        except dist.DistNetworkError as error:
            raise TelegradError(
                f"the meeting place was lost while waiting for worker {rank} of {self._world_size} "
                f"there: {str(error).splitlines()[0]}. Check the worker of rank 0, or the process "
                "that hosts the store, and the network"
            ) from None
        except RuntimeError as error:
            raise TelegradError(
                f"rank {rank} of {self._world_size} did not join within "
                f"{self._store.timeout:g} s (rpc_timeout sets this limit). Was it started, with "
                "the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or the same init_method?"
                f"{self._mistakes()}"
            ) from error

    def _mistakes(self) -> str:
        """Wrong settings of workers, for the error text of one that waits in vain."""
        try:
            lines = [line for rank in range(self._world_size) for line in self._mistakes_of(rank)]
        except RuntimeError:  # the store has ended with the worker that hosted it
            return ""
        return "".join(f" {line}." for line in lines)

    def _mistakes_of(self, rank: int) -> list[str]:
        lines = [
            bytes(self._store.get(f"turn/{rank}/{turn}")).decode()
            for turn in range(1, self._store.add(f"turns/{rank}", 0) + 1)
        ]
        came = list(
            {line.partition(", told")[0]: line for line in lines}.values()
        )  # the last of each
        own = f"told of {self._world_size} workers"
        if len(came) > 1:
            return [f"Rank {rank} was taken more than once: by {'; by '.join(came)}"]
        return [f"Rank {rank} is {other}" for other in came if not other.endswith(own)]


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _parse(data: bytes) -> Record | None:
    return Record(**json.loads(data)) if data else None
