"""What the launcher can be told."""

from __future__ import annotations

import os
from dataclasses import dataclass

from telegrad.ids import MAX_WORKER_ID
from telegrad.launch.program import Program

__all__ = ["MOST_WORKERS", "LaunchOptions"]

MOST_WORKERS = MAX_WORKER_ID + 1


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options of `launch`.

    Args:
        program: what each worker runs.
        workers: how many are started.
        master_port: where the workers meet; 0 takes a free one.
        grace: seconds between asking workers to end and killing them.
    """

    program: Program
    workers: int = 1
    master_port: int = 0
    grace: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MOST_WORKERS:
            raise ValueError(f"workers must be within 1 and {MOST_WORKERS}, got {self.workers}")
        if not 0 <= self.master_port < 1 << 16:
            raise ValueError(f"master_port must be within 0 and 65535, got {self.master_port}")
        if self.grace < 0:
            raise ValueError(f"grace must not be negative, got {self.grace}")

    @property
    def threads(self) -> int | None:
        """How many threads each worker's torch should use; None leaves it to torch.

        Every process would else start a thread for each core, and all of them would wait for each
        other: the cores are shared out instead. (torchrun gives every worker one.)
        """
        if self.workers == 1 or "OMP_NUM_THREADS" in os.environ:
            return None
        return max(1, len(os.sched_getaffinity(0)) // self.workers)
