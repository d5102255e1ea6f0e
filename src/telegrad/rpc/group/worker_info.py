"""`WorkerInfo`: a worker's name and id."""

from __future__ import annotations

import re
from dataclasses import dataclass

from telegrad.errors import TelegradError

__all__ = ["WorkerInfo"]

_NAME = re.compile(r"[A-Za-z0-9_:\-]+")
_MAX_LENGTH = 128


@dataclass(frozen=True, slots=True, repr=False)
class WorkerInfo:
    """A worker's name and id (its rank). Passing it to a call saves looking up the name.

    Raises:
        TelegradError: the name is empty, too long, or has characters other than letters, digits,
            underscore, colon and dash.
        TypeError: it is not a string.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a worker's name must be a string, got {self.name!r}")
        if not self.name:
            raise TelegradError("Worker name must be non-empty")
        if len(self.name) >= _MAX_LENGTH:
            raise TelegradError(
                f"Worker name must be shorter than {_MAX_LENGTH} characters, got {len(self.name)}"
            )
        if not _NAME.fullmatch(self.name):
            raise TelegradError(
                f"Worker name must match {_NAME.pattern} (letters, digits, '_', ':', '-'), "
                f"got {self.name!r}"
            )

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"
