"""A port that stays ours between choosing it and its use by a worker.

Worker 0 opens the store where the workers meet, at a port that all of them must know before. To
choose a free one and let go of it would be a race. So the launcher keeps it bound, without
listening, for as long as the workers run: the kernel gives such a port to nobody who asks for any,
and not to a connection either. Only who binds just this number, and allows reuse as torch's store
does, gets it.

(Rejected: the launcher hosting the store, as torchrun does. Then worker 0 must be told that it is
no host, by `TORCHELASTIC_USE_AGENT_STORE`; programs that start groups of their own, at ports of
their own, inherit that, and wait for a host for ever.)
"""

from __future__ import annotations

import errno
import socket

from telegrad.errors import LaunchError

__all__ = ["reserve_port"]


def reserve_port(number: int = 0) -> socket.socket:
    """A socket that holds a port; the port is free again when it is closed.

    Args:
        number: which port; 0 is any.

    Raises:
        LaunchError: it is taken, or not ours to take.
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
