"""Threads that compute with as many processors as the program has asked for."""

from __future__ import annotations

import torch

__all__ = ["heed_num_threads"]


def heed_num_threads() -> None:
    """Makes `torch.set_num_threads` hold for this thread too; runs first in a thread that computes.

    OpenMP keeps the number for each thread, and torch copies the program's into a new thread only
    when that asks for it. A matrix product in one that has not asked is spread over all processors:
    with a number of 1, in a group of several processes on one host, they stand in each other's way.
    Measured with three trainers and a server on two processors: 3100 to 3700 µs a step without
    this, 2200 to 2800 with it.
    """
    torch.get_num_threads()
