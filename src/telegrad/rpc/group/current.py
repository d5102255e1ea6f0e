"""The worker of this process: the one place where "the current worker" exists.

A thread of an agent acts for that agent's worker; every other thread acts for the worker that
`init_rpc` has started. Only tests have more than one worker in a process.

A process forked from a worker has no worker until it calls `init_rpc` itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from telegrad.drop_in import torch_phrase
from telegrad.errors import NotInitialized

if TYPE_CHECKING:
    from telegrad.rpc.group.worker import Worker
    from telegrad.rpc.references.table import RRefTable

__all__ = [
    "InParent",
    "act_for",
    "acting",
    "current",
    "current_table",
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
    """The worker that this thread acts for. The class attribute is the worker of the process; a
    thread of another worker has an attribute of its own."""

    worker: Worker | None = None


here = Here()


def act_for(worker: Worker | None) -> None:
    """Binds this thread to a worker; None binds it to the worker of the process."""
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
    """This process was forked from a worker; `refusal` makes the error that says so."""
    global _refusal
    if here.worker is worker:
        _refusal = refusal
    if here.__dict__.get("worker") is worker:
        act_for(None)
    if Here.worker is worker:
        Here.worker = None


class InParent:
    """In a forked process, replaces an object that only the parent may use."""

    def __init__(self, refusal: Callable[[], NotInitialized]) -> None:
        self._refusal = refusal

    def __getattr__(self, name: str) -> NoReturn:
        raise self._refusal()


def refuse_if_forked() -> None:
    """
    Raises:
        NotInitialized: the only worker is the parent process's.
    """
    if _refusal is not None and not is_set():
        raise _refusal()


def acting() -> Worker | None:
    """The worker that this thread acts for, if there is one."""
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


def current_table() -> RRefTable:
    """The table of references of the worker that this thread acts for.

    Raises:
        NotInitialized: there is no worker.
    """
    return current().references.table


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
