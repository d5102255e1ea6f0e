"""The options of a worker."""

from __future__ import annotations

import math
import os
import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from telegrad.transport.base import Transport
from telegrad.transport.same_host.spinning import DEFAULT_WINDOW
from telegrad.transport.tls import anonymous_contexts, restrict
from telegrad.wire.allowed.allow_list import AllowList
from telegrad.wire.frames import Limits

__all__ = [
    "DEFAULT_RPC_TIMEOUT",
    "LONGEST_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
    "RpcOptions",
    "TlsOptions",
    "checked_timeout",
]

DEFAULT_RPC_TIMEOUT = 60.0
LONGEST_TIMEOUT = 2e6
"""About 23 days: `poll` counts milliseconds in 31 bits. A longer timeout means no limit."""
UNSET_RPC_TIMEOUT = -1.0
"""As a timeout: the worker's default. (0 means no limit.)"""


def checked_timeout(seconds: Any, name: str = "timeout") -> float:
    """A program's timeout; 0 if it means no limit.

    Raises:
        TypeError: it is not a number.
        ValueError: it is negative or NaN.
    """
    is_number = isinstance(seconds, (float, int, Real)) and not isinstance(seconds, bool)
    if not is_number:
        raise TypeError(f"{name} must be a number of seconds, with 0 for no limit; got {seconds!r}")
    if seconds > LONGEST_TIMEOUT:
        return 0.0
    if math.isnan(seconds):
        raise ValueError(f"{name} must be a number of seconds, with 0 for no limit; got nan")
    if seconds < 0:
        raise ValueError(f"{name} must not be negative; 0 means no limit; got {seconds!r}")
    return float(seconds)


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """Mutual TLS: each worker has a certificate, and accepts only those of one authority.

    Args:
        certificate: file with this worker's certificate chain (PEM). Workers are reached by
            address, so it must name the address (`subjectAltName`) unless `check_hostname` is off.
        key: file with its private key, not encrypted: there is no way to give a passphrase.
        authority: file with the certificate of the authority that signs all workers'.
        check_hostname: whether a worker's certificate must name the address that it is reached at.
    """

    certificate: str
    key: str
    authority: str
    check_hostname: bool = True

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.check_hostname
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        """
        Raises:
            OSError: a file cannot be read.
            ValueError: its content is not what it should be.
        """
        restrict(context)
        for name in ("certificate", "key", "authority"):
            _check_readable(name, getattr(self, name))
        try:
            context.load_cert_chain(self.certificate, self.key, self._refuse_passphrase)
        except ssl.SSLError as error:
            raise ValueError(
                f"TLS: {self.certificate!r} and {self.key!r} are not a certificate and its key, "
                f"both in PEM format: {error}"
            ) from None
        try:
            context.load_verify_locations(self.authority)
        except ssl.SSLError as error:
            raise ValueError(
                f"TLS: {self.authority!r} is not an authority's certificate in PEM format: {error}"
            ) from None

    def _refuse_passphrase(self) -> str:
        # OpenSSL would ask at the terminal and wait.
        raise ValueError(f"TLS: the key {self.key!r} is encrypted: use a key without a passphrase")


def _check_readable(name: str, path: str) -> None:
    """Checks a file itself, because the `ssl` module does not name the file that it cannot read."""
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        text = f"TLS: the {name} cannot be read: {error.strerror}"
        raise type(error)(error.errno, text, path) from None


_KINDS: dict[str, Any] = {
    "init_method": str,
    "num_worker_threads": int,
    "secret": str | bytes | None,
    "host": str | None,
    "shared_memory": bool,
    "busy_wait": Real,
    "heartbeat_interval": Real,
    "heartbeat_timeout": Real,
    "connect_timeout": Real,
    "limits": Limits,
}
_KIND_NAMES = {
    "num_worker_threads": "whole number",
    "secret": "string or bytes",
    "host": "string",
    "init_method": "string",
    **dict.fromkeys(
        ("busy_wait", "heartbeat_interval", "heartbeat_timeout", "connect_timeout"),
        "number of seconds",
    ),
}


@dataclass(kw_only=True)
class RpcOptions:
    """Options of `init_rpc`. Every one has a default that suits a program on one machine.

    Args:
        rpc_timeout: default timeout of a call in seconds. 0, infinity, and anything above 2 million
            mean no limit. `init_rpc` waits as long for the meeting place, and for each worker.
        init_method: where the workers meet: `env://`, `tcp://host:port` or `file:///path`.
        num_worker_threads: threads that run asynchronous calls. If all of them are blocked, more
            are started: up to 64, or four times the number if that is more. Further calls wait.
            Nested calls have as many threads again at each depth.
        secret: workers prove to each other that they know it, and it keys the encryption of TCP
            connections. The default is `TELEGRAD_SECRET` of the environment. A group on one
            machine, or with a `file://` store, needs none: it uses one from a private file of the
            user.
        encrypt: whether TCP connections are encrypted. Without it, workers still prove the secret
            when they connect, but anyone with access to the packets can then read and change them,
            and so run code on the workers. Must be the same for all workers.
        transport: `auto` uses Unix sockets between processes of one host and TCP otherwise;
            `unix`, `tcp` and `inproc` use only that.
        tls: certificates for TCP connections. They also replace a secret.
        host: the address to listen at for other hosts. By default loopback if all workers are
            on this host, or else the address from which the meeting place is reached.
        shared_memory: whether large tensors go through shared memory on one host.
        busy_wait: how long, in seconds, a thread that waits for a message spins before it sleeps.
            It makes small calls several times faster where waking a processor is slow, as on
            virtual machines, and costs processor time. Connections that gain nothing from it stop
            doing it, and so do processes that share their processors with computing programs. 0
            turns it off.
        heartbeat_interval: seconds between signs of life to each peer.
        heartbeat_timeout: seconds of silence after which a peer counts as lost.
        connect_timeout: seconds to reach a peer and shake hands.
        limits: the largest accepted message.
        allow: what other workers may run here, and what their messages may build: functions,
            classes, modules, and prefixes of dotted names. Everything else is refused with
            `NotAllowed`. By default there is no limit. See "An allow-list" in the security guide.
        wrap_transport: wraps the network: in an instrument, such as `telegrad.observe.Traffic`, or
            in the faults of `telegrad.testing.faults`.
    """

    rpc_timeout: float = DEFAULT_RPC_TIMEOUT
    init_method: str = "env://"
    num_worker_threads: int = 16
    secret: str | bytes | None = field(default=None, repr=False)
    encrypt: bool = True
    transport: str = "auto"
    tls: TlsOptions | None = None
    host: str | None = None
    shared_memory: bool = True
    busy_wait: float = DEFAULT_WINDOW
    heartbeat_interval: float = 2.0
    heartbeat_timeout: float = 30.0
    connect_timeout: float = 10.0
    limits: Limits = field(default_factory=Limits)
    allow: Collection[Any] | None = None
    wrap_transport: Callable[[Transport], Transport] | None = None

    def __post_init__(self) -> None:
        self.rpc_timeout = checked_timeout(self.rpc_timeout, "rpc_timeout")
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            is_odd_bool = isinstance(value, bool) and kind is not bool
            if is_odd_bool or not isinstance(value, kind):
                wanted = _KIND_NAMES.get(name) or getattr(kind, "__name__", str(kind))
                raise TypeError(f"{name} must be a {wanted}, got {value!r}")
        if self.wrap_transport is not None and not callable(self.wrap_transport):
            raise TypeError(f"wrap_transport must be a function, got {self.wrap_transport!r}")
        if not self.busy_wait >= 0:
            raise ValueError(f"busy_wait must be 0 or more seconds, got {self.busy_wait}")
        if not self.connect_timeout > 0:
            raise ValueError(f"connect_timeout must be positive, got {self.connect_timeout}")
        if self.num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be positive, got {self.num_worker_threads}")
        if self.transport not in ("auto", "unix", "tcp", "inproc"):
            raise ValueError(
                f"transport must be 'auto', 'unix', 'tcp' or 'inproc', got {self.transport!r}"
            )
        if not isinstance(self.tls, TlsOptions | None):
            raise TypeError(f"tls must be a TlsOptions, got {self.tls!r}")
        if self.tls is not None and not self.encrypt:
            raise ValueError("certificates (tls) need encryption: leave out encrypt=False, or tls")
        if not 0 < self.heartbeat_interval < self.heartbeat_timeout:
            raise ValueError(
                "heartbeat_interval must be positive and below heartbeat_timeout, got "
                f"{self.heartbeat_interval} and {self.heartbeat_timeout}"
            )

        self.allow_list()

    def allow_list(self) -> AllowList | None:
        """The allow-list, if `allow` is given.

        Raises:
            TypeError, ValueError: `allow` is invalid.
        """
        return None if self.allow is None else AllowList(self.allow)

    def configured_secret(self) -> bytes | None:
        """The secret given to this process, if any."""
        secret = self.secret if self.secret is not None else os.environ.get("TELEGRAD_SECRET")
        if secret is None:
            return None
        if not secret:
            where = "TELEGRAD_SECRET" if self.secret is None else "RpcOptions(secret=...)"
            raise ValueError(f"{where} is set but empty: give a secret, or leave it out")
        return secret.encode() if isinstance(secret, str) else secret

    def tcp_security(self) -> tuple[str, ssl.SSLContext | None, ssl.SSLContext | None]:
        """The scheme of TCP addresses, and the TLS contexts of the listening and the connecting
        side. Workers with different settings have different schemes, so they notice that they do
        not match, and no address in the store makes a worker connect without encryption."""
        if self.tls is not None:
            return "tls", self.tls.server_context(), self.tls.client_context()
        if self.encrypt:
            return "tcp", *anonymous_contexts()
        return "plain", None, None
