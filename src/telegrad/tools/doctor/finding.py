"""What the doctor says about one thing."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Finding", "Level"]


class Level(enum.Enum):
    OK = "ok"
    WARN = "warn"  # it works, but not as well as it could
    FAIL = "fail"  # it does not work


@dataclass(frozen=True, kw_only=True)
class Finding:
    """
    Args:
        subject: what was looked at.
        text: what was found.
        advice: what to do about it; empty if nothing need be done.
    """

    level: Level
    subject: str
    text: str
    advice: str = ""
