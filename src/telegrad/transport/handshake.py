"""Both ends of a connection prove that they know the cluster's secret before a frame is read.

::

    client → server   "TGRD", version, client's nonce
    server → client   "TGRD", version, server's nonce
    client → server   identity, client's proof
    server → client   server's proof

A proof is an HMAC-SHA256 under the group's key over the role, both nonces, the identity and the
channel binding: bytes that only the two ends of one encrypted connection have in common. So a proof
cannot be replayed, reflected, moved to another worker's name, or relayed: a relay has a connection
of its own to each end, and these have different bindings. All messages have a fixed size and hold
plain integers: nothing that a stranger sends is parsed beyond this file, let alone unpickled.

The server proves nothing to a client that has not proved itself, so a stranger who connects gets
nothing that depends on the secret. A client does prove itself to whoever listens at an address. It
can be an impostor, who may then try secrets offline; `derive_key` makes each try expensive where
the secret could be one that a person thought up.

The server answers only a client that looks for its own incarnation. So the last message also proves
that the worker at this address is still the one that was published there.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
import secrets
import struct
from enum import IntEnum
from typing import NamedTuple

from telegrad.errors import AuthenticationError, ProtocolError
from telegrad.transport.base import Connection, ConnectionClosed
from telegrad.wire.frames import PROTOCOL_VERSION

__all__ = ["Identity", "Purpose", "answer", "derive_key", "introduce"]

_MAGIC = b"TGRD"
_NONCE = 16
_PROOF = 32
_HELLO = struct.Struct(f"<4sH{_NONCE}s")
_IDENTITY = struct.Struct("<IIB16s16s")
_GENERATED = re.compile(rb"[0-9a-fA-F]{64,}")  # at least 256 random bits: nobody guesses these
_SCRYPT_COST = 1 << 15  # 32 MiB and about a tenth of a second for each guess


class Purpose(IntEnum):
    """What a connection will be used for."""

    LANE = 1
    """Calls one after another: the caller reads its own replies."""
    MULTIPLEX = 2
    """Many calls at once, answered in any order."""
    PROBE = 3
    """Nothing but the handshake: it shows that the worker is alive."""
    SECOND_MULTIPLEX = 4
    """A multiplex opened by a destructor or a signal handler that interrupted the opening of one.
    Any other multiplex that a worker opens means that it has lost the one before."""


class Identity(NamedTuple):
    """Who connects to whom. An incarnation tells a worker from one that had its name before."""

    worker_id: int
    target_id: int
    purpose: Purpose
    incarnation: bytes
    target_incarnation: bytes


@functools.lru_cache(maxsize=8)
def derive_key(secret: bytes) -> bytes:
    """The key that proofs are made with. Stretches a secret unless it is a generated one: 64 or
    more hexadecimal digits."""
    if _GENERATED.fullmatch(secret):
        return hashlib.sha256(secret).digest()
    return hashlib.scrypt(
        secret, salt=b"telegrad", n=_SCRYPT_COST, r=8, p=1, maxmem=1 << 26, dklen=32
    )


def introduce(connection: Connection, key: bytes, identity: Identity) -> None:
    """The client's side.

    Raises:
        AuthenticationError: the server does not know the secret, or is another user's.
        ProtocolError: it is not a telegrad worker, or one of another protocol version.
        ConnectionClosed: the server has refused this client, or is not the worker that `identity`
            names.
    """
    binding = connection.channel_binding()
    nonce = secrets.token_bytes(_NONCE)
    connection.send_bytes(_HELLO.pack(_MAGIC, PROTOCOL_VERSION, nonce))
    nonces = nonce + _read_hello(connection)
    packed = _IDENTITY.pack(*identity)
    connection.send_bytes(packed + _prove(key, b"client", nonces, packed, binding))
    try:
        proof = connection.receive_bytes(_PROOF)
    except ConnectionClosed:
        raise ConnectionClosed(
            "the other end closed the connection without proving that it knows the cluster's "
            "secret: it has ended, or has another secret"
        ) from None
    if not hmac.compare_digest(proof, _prove(key, b"server", nonces, packed, binding)):
        raise AuthenticationError("the worker at this address does not know the cluster's secret")


def answer(connection: Connection, key: bytes, own_id: int, incarnation: bytes) -> Identity:
    """The server's side: returns who has connected.

    Raises:
        AuthenticationError: a stranger.
        ProtocolError: not telegrad's protocol, or another version of it, or a client that looks
            for another worker than `own_id` in this `incarnation`.
    """
    theirs = _read_hello(connection)
    binding = connection.channel_binding()
    nonce = secrets.token_bytes(_NONCE)
    connection.send_bytes(_HELLO.pack(_MAGIC, PROTOCOL_VERSION, nonce))
    nonces = theirs + nonce
    last = connection.receive_bytes(_IDENTITY.size + _PROOF)
    packed, proof = last[: _IDENTITY.size], last[_IDENTITY.size :]
    if not hmac.compare_digest(proof, _prove(key, b"client", nonces, packed, binding)):
        raise AuthenticationError("the other end does not know the cluster's secret")
    worker, target, purpose, its_incarnation, target_incarnation = _IDENTITY.unpack(packed)
    if target != own_id or target_incarnation != incarnation:
        raise ProtocolError("it looks for another worker")
    try:
        identity = Identity(worker, target, Purpose(purpose), its_incarnation, target_incarnation)
    except ValueError:
        raise ProtocolError(f"a connection for an unknown purpose ({purpose})") from None
    connection.send_bytes(_prove(key, b"server", nonces, packed, binding))
    return identity


def _read_hello(connection: Connection) -> bytes:
    magic, version, nonce = _HELLO.unpack(connection.receive_bytes(_HELLO.size))
    if magic != _MAGIC:
        raise ProtocolError("the other end does not speak telegrad's protocol")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the other end speaks version {version} of the protocol, this one {PROTOCOL_VERSION}: "
            "install the same telegrad on all workers"
        )
    return bytes(nonce)


def _prove(key: bytes, role: bytes, nonces: bytes, identity: bytes, binding: bytes) -> bytes:
    # All parts but the last have a fixed length, so no two inputs look the same.
    return hmac.digest(key, b"telegrad:" + role + nonces + identity + binding, "sha256")
