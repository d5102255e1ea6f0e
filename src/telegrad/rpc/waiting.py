"""Waiting for a future in Python, where Ctrl-C is heeded: torch's futures wait in C++."""

from __future__ import annotations

import threading
from typing import Any

from torch.futures import Future

__all__ = ["wait_for"]


def wait_for(future: Future[Any]) -> Any:
    """Ends as the future does: returns its value, or raises."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait()
    return future.value()
