"""The agent of this process: the one place where "the current agent" exists.

A thread that an agent has made acts for that agent; every other thread acts for the agent that
`init_rpc` has started. Only tests have more than one agent in a process.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from telegrad.errors import NotInitialized

if TYPE_CHECKING:
    from telegrad.rpc.worker import Worker

__all__ = ["act_for", "acting", "current", "is_set", "set_current"]

_process_worker: Worker | None = None


class _Thread(threading.local):
    worker: Worker | None = None


_thread = _Thread()


def act_for(worker: Worker | None) -> None:
    """Binds this thread to a worker."""
    _thread.worker = worker


def set_current(worker: Worker | None) -> None:
    global _process_worker
    _process_worker = worker


def acting() -> Worker | None:
    """The worker this thread acts for, if there is one."""
    return _thread.worker or _process_worker


def is_set() -> bool:
    return acting() is not None


def current() -> Worker:
    """
    Raises:
        NotInitialized: there is none.
    """
    worker = _thread.worker or _process_worker
    if worker is None:
        raise NotInitialized(
            "RPC has not been initialized. Call init_rpc first. (Current RPC agent is not set! "
            "Did you initialize the RPC framework, e.g. by calling `rpc.init_rpc`?)"
        )
    return worker
