"""Where workers meet: one of torch's stores, opened by `RpcOptions.init_method`.

A store on a loopback address listens only there. Every wait ends in the store, or in an error after
the agent's timeout.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from numbers import Integral
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from telegrad.drop_in import torch_phrase
from telegrad.errors import TelegradError
from telegrad.ids import MAX_WORKER_ID
from telegrad.rpc.group.options import LONGEST_TIMEOUT, RpcOptions
from telegrad.rpc.group.private_files import claim_store_file
from telegrad.rpc.group.store import Part

__all__ = ["address_towards", "host_identity", "meet"]

# torch's TCP rendezvous ends with its iterator, so the process keeps all of them.
_iterators: list[Iterator[Any]] = []


def host_identity() -> str:
    """Equal for processes that can use each other's Unix sockets: those of one boot and one network
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
            "this host: create it, or correct the path. All workers must see the same file"
        )
    if url.scheme == "file" and url.path:
        claim_store_file(url.path)
    # The last of so many workers removes the file. A TCP store gets no number: it would wait for
    # the workers without naming the missing ones, as `Directory` does.
    size = world_size if world_size is not None and url.scheme == "file" else -1
    of_worker = f"rank={rank}" if rank >= 0 else ""  # without one, torch says what is missing
    query = "&".join(filter(None, [url.query, of_worker, f"world_size={size}"]))
    timeout = timedelta(seconds=options.rpc_timeout or LONGEST_TIMEOUT)
    _check_address(url.scheme, url.hostname)
    rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
    try:
        # Rank 0 hosts the store, unless torchrun's agent does. The server lives as long as the
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
    """The address of the meeting place, if no other machine can reach it."""
    url = urlparse(init_method)
    if url.scheme == "file":
        return None
    host = url.hostname or os.environ.get("MASTER_ADDR", "")
    try:
        port = url.port or int(os.environ.get("MASTER_PORT", ""))
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port)} if host else set()
    except (OSError, ValueError):
        return None  # torch reports what is wrong with it
    if not found or not all(ipaddress.ip_address(address).is_loopback for address in found):
        return None
    return min(found, key=lambda address: (":" in address, address)), port


def _serve_loopback(init_method: str, timeout: timedelta) -> Store | None:
    """Hosts a store that listens on loopback only. By default, torch's listens everywhere."""
    address = _loopback_address(init_method)
    if address is None:
        return None
    try:
        listener = socket.create_server(
            address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET, backlog=1024
        )
    except OSError:
        # Most likely this process hosts a store there already, for an earlier group or for torch's
        # process groups, and torch uses that one. Otherwise torch reports what is wrong.
        return None
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    store: Store = tcp_store(  # closes the descriptor
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
        f"The worker of rank 0 hosts a store there: check that it was started, that {where} are "
        "the same for all workers, and that this host can reach it"
    )


def _missing_rank(scheme: str) -> ValueError:
    if scheme != "env":
        return ValueError(
            f"init_rpc needs a rank for {scheme}://: pass rank=..."
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
    """Reports at once what torch reports after many tries, or never."""
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


def address_towards(init_method: str) -> str:
    """This host's address as seen from the meeting place; loopback if that is on this host."""
    parsed = urlparse(init_method)
    host = parsed.hostname or os.environ.get("MASTER_ADDR", "")
    if parsed.scheme == "file" or not host:
        return "127.0.0.1"
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # a datagram socket only chooses a route; nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TelegradError(f"cannot find a route to the meeting place {host!r}: {error}") from None
