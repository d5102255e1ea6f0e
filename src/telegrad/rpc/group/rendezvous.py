"""How workers find each other: through one of torch's own stores.

Each worker publishes one record (name, id, incarnation, host, addresses) under its id. In a group
of known size everybody first says which host it is on, so that nobody listens beyond loopback when
all are on one; then listens, publishes, and waits for all other records. In an open group
(`world_size=None`) a worker publishes, reads who is there, and tells them; whoever asks for a name
it does not know reads on in the store.

A worker that is started again after a crash finds a record under its id. If nobody answers at its
addresses the newcomer takes its place; otherwise the id is taken, and it fails.

The store is not trusted: others may reach it, and change what stands there. A worker is known by
what it proves when it is connected to. So a secret is told through the store only where no other
user can get at it, in the private file of a `file://` store. A store on a loopback address listens
there only.

Every wait here is a wait on the store, and ends in the value or after the agent's timeout, also if
the store has vanished.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from numbers import Integral
from typing import Any, TypeVar
from urllib.parse import urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from telegrad.drop_in import torch_phrase
from telegrad.errors import TelegradError
from telegrad.ids import MAX_LIVES, MAX_WORKER_ID
from telegrad.rpc.group.options import LONGEST_TIMEOUT, RpcOptions
from telegrad.rpc.group.private_files import claim_store_file, user_secret
from telegrad.rpc.group.store import PatientStore
from telegrad.rpc.group.worker_info import WorkerInfo

__all__ = ["Directory", "Record", "host_identity", "meet"]

_NO_SECRET = (
    "the workers of this group may be on several machines, and have no secret: whoever can reach "
    "their meeting place can join them and run any code on their machines"
)
_MAKE_SECRET = (
    "Make a secret, with: export TELEGRAD_SECRET=$(python -c 'import secrets; "
    "print(secrets.token_hex(32))') and start all workers with the same value. "
    "TELEGRAD_INSECURE=1 does without one, for networks where every machine and user is trusted"
)
_LOOK_EVERY = 1.0  # seconds, for those who have died while others wait for them

_T = TypeVar("_T")
_log = logging.getLogger("telegrad.rpc")

_starts: dict[str, int] = {}  # the number of this process's next one, by meeting place
_open_groups: dict[str, int] = {}  # that of its last one there, if the group was open
# torch's TCP rendezvous ends with its iterator: it is kept for as long as the process lives.
_iterators: list[Iterator[Any]] = []


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a worker tells of itself."""

    name: str
    id: int
    incarnation: str
    host: str
    addresses: list[str]

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, self.id)


def host_identity() -> str:
    """Equal for processes that can use each other's Unix sockets: of one boot, and one network
    namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def meet(options: RpcOptions, rank: int, world_size: int | None) -> tuple[Store, int, int]:
    """Opens the store where the workers meet.

    Returns:
        the store, this worker's rank, and the size of the group (0 for an open one).
    """
    _check(rank, world_size)
    scheme = urlparse(options.init_method).scheme
    if scheme not in ("env", "tcp", "file"):
        raise ValueError(
            f"init_method must begin with env://, tcp:// or file://, got {options.init_method!r}"
        )
    if world_size is None and rank < 0 and scheme == "env" and "WORLD_SIZE" in os.environ:
        world_size = _number("WORLD_SIZE", os.environ["WORLD_SIZE"])
    if world_size is None and rank < 0:
        raise _missing_rank(scheme)
    if rank < 0 and scheme == "env" and "RANK" in os.environ:
        rank = _number("RANK", os.environ["RANK"])
        _check(rank, world_size)
    if rank < 0:
        raise _missing_rank(scheme)
    store = _open_store(options, rank, world_size)
    part = Part(
        store,
        _place(options.init_method),
        rank,
        is_open=world_size is None,
        is_private=scheme == "file",
        is_local=_loopback_address(options.init_method) is not None,
    )
    return part, rank, world_size or 0


def _open_store(options: RpcOptions, rank: int, world_size: int | None) -> Store:
    url = urlparse(options.init_method)
    directory = os.path.dirname(url.path)
    if url.scheme == "file" and directory and not os.path.isdir(directory):
        raise ValueError(
            f"init_method is {options.init_method!r}, and there is no directory {directory!r} on "
            "this host: make it, or mend the path. All workers must see the same file"
        )
    if url.scheme == "file" and url.path:
        claim_store_file(url.path)
    # The file is removed by the last of so many workers. A TCP store is not told how many there
    # are: it would wait for them without a word on who is missing, and `Directory` has that.
    size = world_size if world_size is not None and url.scheme == "file" else -1
    of_worker = f"rank={rank}" if rank >= 0 else ""  # torch says what is missing then
    query = "&".join(filter(None, [url.query, of_worker, f"world_size={size}"]))
    timeout = timedelta(seconds=options.rpc_timeout or LONGEST_TIMEOUT)
    _check_address(url.scheme, url.hostname)
    rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
    try:
        # Only rank 0 keeps a store, unless torchrun's agent does. The server lives as long as the
        # store that `rendezvous` then opens at the same port of this process.
        keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        server = _serve_loopback(options.init_method, timeout) if keeps else None
        iterator = rendezvous(url._replace(query=query).geturl(), timeout=timeout)
        store: Store = next(iterator)[0]
        del server
    except RuntimeError as error:
        raise TelegradError(
            f"the workers' meeting place {_place(options.init_method)} could not be opened: "
            f"{str(error).splitlines()[0].rstrip('. ')}. {_what_to_check(url.scheme, rank)}"
        ) from None
    _iterators.append(iterator)
    store.set_timeout(timeout)
    return store


def _loopback_address(init_method: str) -> tuple[str, int] | None:
    """Where the meeting place is, if no other machine can reach that."""
    url = urlparse(init_method)
    if url.scheme == "file":
        return None
    host = url.hostname or os.environ.get("MASTER_ADDR", "")
    try:
        port = url.port or int(os.environ.get("MASTER_PORT", ""))
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port)} if host else set()
    except (OSError, ValueError):
        return None  # torch says what is wrong with it
    if not found or not all(ipaddress.ip_address(address).is_loopback for address in found):
        return None
    return min(found, key=lambda address: (":" in address, address)), port


def _serve_loopback(init_method: str, timeout: timedelta) -> Store | None:
    """Keeps a store that listens on loopback only. Left to itself, torch listens everywhere."""
    address = _loopback_address(init_method)
    if address is None:
        return None
    try:
        listener = socket.create_server(
            address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET, backlog=1024
        )
    except OSError:
        # Most likely this process keeps a store there already, for a group before this one or for
        # torch's process groups: then torch uses that. Else it says what is wrong.
        return None
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store: Store = tcp_store(  # which closes the descriptor
        *address,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    return store


def _what_to_check(scheme: str, rank: int) -> str:
    if scheme == "file":
        return "Check that this process may write the file"
    where = "MASTER_ADDR and MASTER_PORT" if scheme == "env" else "address and port of init_method"
    if rank == 0:
        return (
            f"Check that {where} are of this host, that no other process uses the port, and that "
            "only one worker has rank 0"
        )
    return (
        f"The worker of rank 0 keeps a store there: check that it was started, that {where} are "
        "the same for all workers, and that this host can reach it"
    )


def _missing_rank(scheme: str) -> ValueError:
    if scheme != "env":
        return ValueError(
            f"init_rpc needs a rank to meet by {scheme}://: pass rank=..."
            + torch_phrase("rank parameter missing")
        )
    missing = "WORLD_SIZE" if "RANK" in os.environ else "RANK"
    return ValueError(
        f"{missing} is not set: start the program by telegrad run or torchrun, or pass rank= and "
        "world_size= to init_rpc"
        + torch_phrase(f"environment variable {missing} expected, but not set")
    )


def _number(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable {variable} must be a whole number, got {text!r}"
        ) from None


def _check_address(scheme: str, host: str | None) -> None:
    """Finds out at once what torch would find out after many tries, if it did at all."""
    where = f"the host {host!r} of init_method"
    if scheme == "env":
        for variable in ("MASTER_ADDR", "MASTER_PORT"):
            if variable not in os.environ:
                raise ValueError(
                    f"{variable} is not set: start the program by telegrad run or torchrun, or "
                    'pass RpcOptions(init_method="tcp://host:port")'
                )
        _number("MASTER_PORT", os.environ["MASTER_PORT"])
        host = os.environ["MASTER_ADDR"]
        where = f"MASTER_ADDR {host!r}"
    if scheme != "file" and host:
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            raise TelegradError(f"{where} cannot be resolved: {error}") from None


def _place(init_method: str) -> str:
    if not init_method.startswith("env:"):
        return init_method
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _check(rank: int, world_size: int | None) -> None:
    given: dict[str, Any] = {"rank": rank, "world_size": world_size}
    for name, number in given.items():
        if number is not None and not isinstance(number, Integral):
            raise TypeError(f"{name} must be an integer, got {number!r}")
    if rank < -1:
        raise ValueError(f"rank must be 0 or more, got {rank}")
    if world_size is not None and world_size < 1:
        raise ValueError(f"world_size must be positive, got {world_size}")
    if world_size is not None and rank >= world_size:
        raise ValueError(f"rank {rank} is not within a group of {world_size} workers")
    if rank > MAX_WORKER_ID:
        raise ValueError(f"rank must be at most {MAX_WORKER_ID}, got {rank}")


class Part(PrefixStore):
    """The part of a store that belongs to one start of a group, by its number.

    A process that starts again at the same meeting place uses fresh keys; so do the others, in step
    with it. One that left an open group comes back to it: others may still be there. A process that
    takes the place of a crashed one goes where that one was.
    """

    def __init__(
        self,
        store: Store,
        place: str,
        rank: int,
        *,
        is_open: bool,
        is_private: bool = False,
        is_local: bool = False,
    ) -> None:
        self.is_private = is_private
        """No other user can read or change what stands there."""
        self.is_local = is_local
        """No other machine can reach it."""
        self._place = place
        self._is_open = is_open
        self._number = self._find_number(PatientStore(store), rank)
        super().__init__(f"telegrad/{self._number}", store)

    def _find_number(self, store: PatientStore, rank: int) -> int:
        place = self._place
        if self._is_open and place in _open_groups:
            return _open_groups[place]
        last = f"telegrad/generation/{rank}"
        if place not in _starts and store.check([last]):
            return int(store.get(last))
        number = _starts.get(place, 0)
        store.set(last, str(number))
        return number

    def use_up(self) -> None:
        """Others can see this worker now. Had it failed before, a second try would be the same
        start: the others may be waiting for it."""
        _starts[self._place] = self._number + 1
        _open_groups.pop(self._place, None)
        if self._is_open:
            _open_groups[self._place] = self._number


class Directory:
    """The records of a group, kept in a store.

    The store may end with the worker that keeps it, while others go on. Then nobody can join any
    more, and what they know of each other has to do.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = PatientStore(store)
        self._part = store if isinstance(store, Part) else None
        self._rank = rank
        self._world_size = world_size
        self._seen = 0  # slots of an open group that have been looked at
        self._empty: list[int] = []  # those of them that nobody had written to
        self._has_ended = False  # the store has
        self.life = 0
        """How many workers of this group had this rank before, as `declare` has found."""

    @property
    def is_open(self) -> bool:
        """Whether workers may join and leave."""
        return self._world_size == 0

    def declare(self) -> None:
        """Says which kind of group this is, and who has come for which rank.

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
                "no more ids for it: take another rank, or meet elsewhere"
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
        """The group's secret: the configured one, or one that only processes of this user know.

        Args:
            all_local: the whole group is on this host.
            has_certificates: workers prove by these that they belong together.

        Raises:
            TelegradError: the group is on several machines, and has no secret.
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
        """Whether the whole group is on this host. An open group knows by where it meets."""
        if self.is_open:
            return self._part is not None and self._part.is_local
        self._store.set(f"host/{self._rank}", host)
        return all(
            self._get(f"host/{rank}", rank) == host.encode() for rank in range(self._world_size)
        )

    def predecessor(self) -> Record | None:
        """The record of a worker that had this id before."""
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
        """All records of a group of known size, waited for; those present of an open one.

        Raises:
            TelegradError: two workers have one name, or a worker did not come in time.
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
            # One that took a slot may die before it writes to it. Whoever is just about to reads
            # all others afterwards, and tells them.
            if not self._store.check([f"slot/{slot}"]):
                self._empty.append(slot)
                continue
            worker = int(self._store.get(f"slot/{slot}"))
            record = _parse(self._store.get(f"worker/{worker}"))
            if record is not None:
                found[worker] = record
        return list(found.values())

    def record_of(self, worker_id: int) -> Record | None:
        """The newest record of a worker; None if there is none (any more)."""
        return self._ask(lambda: self._stored(worker_id), None)

    def _stored(self, worker_id: int) -> Record | None:
        key = f"worker/{worker_id}"
        return _parse(self._store.get(key)) if self._store.check([key]) else None

    def _ask(self, question: Callable[[], _T], without_store: _T) -> _T:
        """Asks the store, if it is still there. Each time that one is asked which is not, torch
        complains at length: so that is found out once."""
        if self._has_ended:
            return without_store
        try:
            return question()
        except dist.DistNetworkError as error:
            self._has_ended = True
            _log.info("the store where the workers met has ended: %s", str(error).splitlines()[0])
            return without_store

    def joined(self, group: Sequence[Record], is_alive: Callable[[Record], bool]) -> None:
        """Keeps the worker that may host the store until all others have read from it, or died.

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
        # Ends when all are there, or none of those that are not is alive, or at the timeout.
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
                    f"group within {self._store.timeout:g} seconds"
                )

    def _get(self, key: str, rank: int) -> bytes:
        try:
            return bytes(self._store.get(key))
        except dist.DistNetworkError as error:
            raise TelegradError(
                f"the meeting place was lost while worker {rank} of {self._world_size} was waited "
                f"for there: {str(error).splitlines()[0]}. Check the worker of rank 0, or whatever "
                "keeps the store, and the network"
            ) from None
        except RuntimeError as error:
            raise TelegradError(
                f"rank {rank} of {self._world_size} did not join within "
                f"{self._store.timeout:g} s (rpc_timeout sets this limit). Was it started, with "
                "the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, or the same init_method?"
                f"{self._mistakes()}"
            ) from error

    def _mistakes(self) -> str:
        """What those who came were told wrongly: for one who waits in vain."""
        try:
            lines = [line for rank in range(self._world_size) for line in self._mistakes_of(rank)]
        except RuntimeError:  # the store has ended with the worker that kept it
            return ""
        return "".join(f" {line}." for line in lines)

    def _mistakes_of(self, rank: int) -> list[str]:
        lines = [
            bytes(self._store.get(f"turn/{rank}/{turn}")).decode()
            for turn in range(1, self._store.add(f"turns/{rank}", 0) + 1)
        ]
        came = list({line.partition(", told")[0]: line for line in lines}.values())  # their last
        own = f"told of {self._world_size} workers"
        if len(came) > 1:
            return [f"Rank {rank} was taken more than once: by {'; by '.join(came)}"]
        return [f"Rank {rank} is {other}" for other in came if not other.endswith(own)]


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _parse(data: bytes) -> Record | None:
    return Record(**json.loads(data)) if data else None


def address_towards(init_method: str) -> str:
    """The address of this host as the meeting place sees it; loopback if it is on this host."""
    parsed = urlparse(init_method)
    host = parsed.hostname or os.environ.get("MASTER_ADDR", "")
    if parsed.scheme == "file" or not host:
        return "127.0.0.1"
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # a datagram socket only chooses a route: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TelegradError(f"cannot find a route to the meeting place {host!r}: {error}") from None
