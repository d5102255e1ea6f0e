"""The agent of this process: the one place where "the current agent" exists.

A thread that an agent has made acts for that agent; every other thread acts for the agent that
`init_rpc` has started. Only tests have more than one agent in a process.

A process that was forked from a worker's has none, until it calls `init_rpc` itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from telegrad.errors import NotInitialized

if TYPE_CHECKING:
    from telegrad.rpc.worker import Worker

__all__ = [
    "act_for",
    "acting",
    "current",
    "is_set",
    "leave_to_parent",
    "refuse_if_forked",
    "set_current",
]

_process_worker: Worker | None = None
_refusal: Callable[[], NotInitialized] | None = None  # if the worker is the parent process's


class _Thread(threading.local):
    worker: Worker | None = None


_thread = _Thread()


def act_for(worker: Worker | None) -> None:
    """Binds this thread to a worker."""
    _thread.worker = worker


def set_current(worker: Worker | None) -> None:
    global _process_worker, _refusal
    _process_worker = worker
    if worker is not None:
        _refusal = None


def leave_to_parent(worker: Worker, refusal: Callable[[], NotInitialized]) -> None:
    """This process was forked from the worker's; from now on `refusal` says so."""
    global _process_worker, _refusal
    if acting() is worker:
        _refusal = refusal
    if _thread.worker is worker:
        _thread.worker = None
    if _process_worker is worker:
        _process_worker = None


def refuse_if_forked() -> None:
    """
    Raises:
        NotInitialized: there is no worker here because it is that of the parent process.
    """
    if _refusal is not None and not is_set():
        raise _refusal()


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
        refuse_if_forked()
        raise NotInitialized(
            "RPC has not been initialized. Call init_rpc first. (Current RPC agent is not set! "
            "Did you initialize the RPC framework, e.g. by calling `rpc.init_rpc`?)"
        )
    return worker
