"""All cases that are timed in rounds."""

from __future__ import annotations

from telegrad.tools.bench import calls, passes, plain, scripts
from telegrad.tools.bench.harness import Case

__all__ = ["all_cases"]


def all_cases() -> list[Case]:
    return [*calls.CASES, *scripts.CASES, *passes.CASES, *plain.CASES]
