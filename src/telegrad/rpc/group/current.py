"""The agent of this process: the one place where "the current agent" exists.

A thread that an agent has made acts for that agent; every other thread acts for the agent that
`init_rpc` has started. Only tests have more than one agent in a process.

A process that was forked from a worker's has none, until it calls `init_rpc` itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from telegrad.drop_in import torch_phrase
from telegrad.errors import NotInitialized

if TYPE_CHECKING:
    from telegrad.rpc.group.worker import Worker

__all__ = [
    "act_for",
    "acting",
    "current",
    "here",
    "is_set",
    "leave_to_parent",
    "not_initialized",
    "refuse_if_forked",
    "set_current",
]

_refusal: Callable[[], NotInitialized] | None = None  # if the worker is the parent process's
_has_shut_down = False  # there was a worker here before


class Here(threading.local):
    """What this thread acts for. The class has the worker of the process, and each thread that
    another one has made has its own."""

    worker: Worker | None = None


here = Here()


def act_for(worker: Worker | None) -> None:
    """Binds this thread to a worker; None leaves it to that of the process."""
    if worker is None:
        here.__dict__.pop("worker", None)
    else:
        here.worker = worker


def set_current(worker: Worker | None) -> None:
    global _refusal, _has_shut_down
    _has_shut_down = worker is None and (_has_shut_down or Here.worker is not None)
    Here.worker = worker
    if worker is not None:
        _refusal = None


def leave_to_parent(worker: Worker, refusal: Callable[[], NotInitialized]) -> None:
    """This process was forked from the worker's; from now on `refusal` says so."""
    global _refusal
    if here.worker is worker:
        _refusal = refusal
    if here.__dict__.get("worker") is worker:
        act_for(None)
    if Here.worker is worker:
        Here.worker = None


def refuse_if_forked() -> None:
    """
    Raises:
        NotInitialized: there is no worker here because it is that of the parent process.
    """
    if _refusal is not None and not is_set():
        raise _refusal()


def acting() -> Worker | None:
    """The worker this thread acts for, if there is one."""
    return here.worker


def is_set() -> bool:
    return here.worker is not None


def current() -> Worker:
    """
    Raises:
        NotInitialized: there is none.
    """
    worker = here.worker
    if worker is None:
        raise not_initialized()
    return worker


def not_initialized() -> NotInitialized:
    """Says why this process has no worker."""
    refuse_if_forked()
    if _has_shut_down:
        text = (
            "this worker has shut down: calls are possible only while telegrad.workers(...) runs, "
            "or between init_rpc and shutdown"
        )
    else:
        text = (
            "this process has not joined a group: call telegrad.workers(...), telegrad.join() or "
            "rpc.init_rpc(name) first"
        )
    phrase = (
        "RPC has not been initialized. Current RPC agent is not set! Did you initialize the RPC "
        "framework, e.g. by calling `rpc.init_rpc`?"
    )
    return NotInitialized(text + torch_phrase(phrase))
