"""What stands in front of a call's arguments: the name of the function.

A name has its length in front; without one the function travels with the arguments.
"""

from __future__ import annotations

import struct

__all__ = ["name_in", "pack_call_head"]

_LENGTH = struct.Struct("<H")


def pack_call_head(name: bytes) -> bytes:
    return _LENGTH.pack(len(name)) + name


def name_in(body: bytes, offset: int) -> tuple[bytes, int]:
    """The name in the call at `offset`, and where its arguments begin.

    Raises:
        struct.error: the body is too short for one.
    """
    (length,) = _LENGTH.unpack_from(body, offset)
    start = offset + _LENGTH.size
    end = start + length
    return body[start:end], end
