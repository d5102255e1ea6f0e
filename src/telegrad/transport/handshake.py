"""Who is there: both ends prove that they know the cluster's secret before a frame is read.

::

    client → server   "TGRD", version, client's nonce
    server → client   "TGRD", version, server's nonce, server's proof
    client → server   identity, client's proof

A proof is an HMAC-SHA256 under the secret over the role, both nonces and the identity, so it cannot
be replayed, reflected or moved to another worker's name. All three are of fixed size and of plain
integers: nothing that a stranger sends is ever parsed beyond this file, let alone unpickled. One
round trip; the client may send its first frame right after its proof.

The secret authenticates, it does not encrypt: for networks that others can read there is TLS.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from enum import IntEnum
from typing import NamedTuple

from telegrad.errors import AuthenticationError, ProtocolError
from telegrad.transport.base import Connection
from telegrad.wire.frames import PROTOCOL_VERSION

__all__ = ["Identity", "Purpose", "answer", "introduce"]

_MAGIC = b"TGRD"
_NONCE = 16
_PROOF = 32
_HELLO = struct.Struct(f"<4sH{_NONCE}s")
_IDENTITY = struct.Struct("<IIB16s16s")


class Purpose(IntEnum):
    """What a connection will be used for."""

    LANE = 1
    """Calls one after another: the caller reads its own replies."""
    MULTIPLEX = 2
    """Many calls at once, answered in any order."""


class Identity(NamedTuple):
    """Who connects to whom. An incarnation tells a worker from one that had its name before."""

    worker_id: int
    target_id: int
    purpose: Purpose
    incarnation: bytes
    target_incarnation: bytes


def introduce(connection: Connection, secret: bytes, identity: Identity) -> None:
    """The client's side.

    Raises:
        AuthenticationError: the server does not know the secret.
        ProtocolError: it is no telegrad worker, or one of another protocol version.
    """
    nonce = secrets.token_bytes(_NONCE)
    connection.send_bytes(_HELLO.pack(_MAGIC, PROTOCOL_VERSION, nonce))
    theirs = _read_hello(connection)
    proof = connection.receive_bytes(_PROOF)
    if not hmac.compare_digest(proof, _prove(secret, b"server", nonce, theirs, b"")):
        raise AuthenticationError("the worker at this address does not know the cluster's secret")
    packed = _IDENTITY.pack(*identity)
    connection.send_bytes(packed + _prove(secret, b"client", nonce, theirs, packed))


def answer(connection: Connection, secret: bytes) -> Identity:
    """The server's side: returns who has connected.

    Raises:
        AuthenticationError: a stranger.
        ProtocolError: not telegrad's protocol, or another version of it.
    """
    theirs = _read_hello(connection)
    nonce = secrets.token_bytes(_NONCE)
    connection.send_bytes(
        _HELLO.pack(_MAGIC, PROTOCOL_VERSION, nonce) + _prove(secret, b"server", theirs, nonce, b"")
    )
    last = connection.receive_bytes(_IDENTITY.size + _PROOF)
    packed, proof = last[: _IDENTITY.size], last[_IDENTITY.size :]
    if not hmac.compare_digest(proof, _prove(secret, b"client", theirs, nonce, packed)):
        raise AuthenticationError("the other end does not know the cluster's secret")
    worker, target, purpose, incarnation, target_incarnation = _IDENTITY.unpack(packed)
    try:
        return Identity(worker, target, Purpose(purpose), incarnation, target_incarnation)
    except ValueError:
        raise ProtocolError(f"a connection for an unknown purpose ({purpose})") from None


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


def _prove(secret: bytes, role: bytes, client: bytes, server: bytes, identity: bytes) -> bytes:
    return hmac.digest(secret, b"telegrad:" + role + client + server + identity, "sha256")
