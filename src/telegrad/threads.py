"""The number of threads that torch computes with."""

from __future__ import annotations

import torch

__all__ = ["heed_num_threads"]


def heed_num_threads() -> None:
    """Applies `torch.set_num_threads` to this thread; every thread that computes calls it first.

    OpenMP keeps the number per thread, and torch copies the program's number into a new thread only
    when that thread asks for it. Otherwise a matrix product there uses all processors, and several
    processes on one host obstruct each other.
    """
    torch.get_num_threads()
