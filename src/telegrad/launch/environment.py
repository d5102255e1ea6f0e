"""The environment of workers, as programs written for torchrun read it, and the port in it.

Worker 0 opens the store where the workers meet, at a port that all of them know beforehand. To
choose a free port and then release it would be a race. So the launcher keeps it bound, without
listening, for as long as the workers run: the kernel does not give such a port to a process that
asks for any port, nor to a connection. Only a process that binds this very number, and allows reuse
as torch's store does, gets it.

(Rejected: the launcher hosts the store, as torchrun does. Worker 0 must then be told not to, by
`TORCHELASTIC_USE_AGENT_STORE`. Programs that start groups of their own, at other ports, inherit
that variable and wait for a host forever.)
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from telegrad.errors import LaunchError

__all__ = ["group_environment", "reserve_port"]


def group_environment(
    base: Mapping[str, str], *, size: int, port: int, secret: str, threads: int | None
) -> dict[str, str]:
    """The environment that all workers of a group share. Each gets its rank when it is forked.

    Args:
        base: the launcher's own environment.
        secret: the workers', unless the user has set one. Joining the group takes the secret, not
            only a connection to the meeting place.
        threads: see `LaunchOptions.threads`.
    """
    # Under torchrun, these would lead the workers to torchrun's own store.
    found = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    found.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        PYTHONUNBUFFERED="1",  # output is shown at once
    )
    found.setdefault("TELEGRAD_SECRET", secret)
    found.setdefault("PYTHONFAULTHANDLER", "1")  # a crash shows a traceback
    if threads is not None:
        found["OMP_NUM_THREADS"] = str(threads)
    return found


def reserve_port(number: int = 0) -> socket.socket:
    """A socket that reserves a port until it is closed.

    Args:
        number: which port; 0 is any.

    Raises:
        LaunchError: it is taken, or this user may not use it.
    """
    try:
        return _bind(socket.AF_INET6, "::", number)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise _refused(number, error) from None
    try:
        return _bind(socket.AF_INET, "0.0.0.0", number)
    except OSError as error:
        raise _refused(number, error) from None


def _bind(family: socket.AddressFamily, address: str, number: int) -> socket.socket:
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind((address, number))
    except BaseException:
        holder.close()
        raise
    return holder


def _refused(number: int, error: OSError) -> LaunchError:
    if error.errno == errno.EADDRINUSE:
        return LaunchError(f"port {number} is taken: choose another, or leave it to the launcher")
    if error.errno == errno.EACCES:
        return LaunchError(f"port {number} needs more rights: choose one from 1024 on")
    return LaunchError(f"port {number} cannot be used: {error.strerror}")
