"""The handshake: both ends prove that they know the cluster's secret before a frame is read.

::

    client → server   "TGRD", version, client's nonce
    server → client   "TGRD", version, server's nonce
    client → server   identity, client's proof
    server → client   server's proof

A proof is an HMAC-SHA256 under the group's key over the role, both nonces, the identity and the
channel binding: bytes that only the two ends of one encrypted connection share. So a proof cannot
be replayed, reflected, used under another worker's name, or relayed: a relay has one connection to
each end, and their bindings differ. All messages have a fixed size and hold plain integers: what a
stranger sends is parsed in this file only, and never unpickled.

The server proves itself only after the client has, so a stranger who connects receives nothing that
depends on the secret. A client does prove itself to any listener. If that is an impostor, it can
try secrets offline; `derive_key` makes each try expensive unless the secret is a random one.

The server answers only clients that ask for its own incarnation. So the last message also proves
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
_GENERATED = re.compile(rb"[0-9a-fA-F]{64,}")  # at least 256 random bits: cannot be guessed
_SCRYPT_COST = 1 << 15  # 32 MiB and about a tenth of a second for each guess


class Purpose(IntEnum):
    """What a connection is used for."""

    LANE = 1
    """Calls one after another: the caller reads its own replies."""
    MULTIPLEX = 2
    """Many calls at once, answered in any order."""
    PROBE = 3
    """The handshake only, which shows that the worker is alive."""
    SECOND_MULTIPLEX = 4
    """A multiplex opened by a destructor or signal handler that has interrupted the opening of
    another one. Any other new multiplex means that the worker has lost the one before."""


class Identity(NamedTuple):
    """Who connects to whom. The incarnation tells a worker from earlier ones of the same name."""

    worker_id: int
    target_id: int
    purpose: Purpose
    incarnation: bytes
    target_incarnation: bytes


@functools.lru_cache(maxsize=8)
def derive_key(secret: bytes) -> bytes:
    """The key for the proofs. Stretches the secret unless it was generated: 64 or more hexadecimal
    digits."""
    if _GENERATED.fullmatch(secret):
        return hashlib.sha256(secret).digest()
    return hashlib.scrypt(
        secret, salt=b"telegrad", n=_SCRYPT_COST, r=8, p=1, maxmem=1 << 26, dklen=32
    )


def introduce(connection: Connection, key: bytes, identity: Identity) -> None:
    """The client's side.

    Raises:
        AuthenticationError: the server does not know the secret, or belongs to another user.
        ProtocolError: it is not a telegrad worker, or has another protocol version.
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
            "secret: it has ended, or its secret differs"
        ) from None
    if not hmac.compare_digest(proof, _prove(key, b"server", nonces, packed, binding)):
        raise AuthenticationError("the worker at this address does not know the cluster's secret")


def answer(connection: Connection, key: bytes, own_id: int, incarnation: bytes) -> Identity:
    """The server's side: returns who has connected.

    Raises:
        AuthenticationError: the client does not know the secret.
        ProtocolError: the client does not speak this version of telegrad's protocol, or asks for
            another worker than `own_id` in this `incarnation`.
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
        raise ProtocolError("the client asks for another worker")
    try:
        identity = Identity(worker, target, Purpose(purpose), its_incarnation, target_incarnation)
    except ValueError:
        raise ProtocolError(f"the client's connection has an unknown purpose ({purpose})") from None
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
    # All parts but the last have a fixed length, so different inputs give different bytes.
    return hmac.digest(key, b"telegrad:" + role + nonces + identity + binding, "sha256")
