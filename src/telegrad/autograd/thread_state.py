"""Values that belong to a thread: the context it is in, the wave it runs.

Python's thread-local state is used where it suffices. It does not where torch has a device: the
engine then runs backward functions on its own threads, and only torch's thread-local state follows
the work there. torch's state is avoided otherwise, because torch copies it for whatever it hands to
another thread, and releasing the copy needs the interpreter lock. If the last owner of a gloo
process group is destroyed while that lock is held, the group waits for its threads and they wait
for the lock: a process with DistributedDataParallel can deadlock.

After a wait, a TorchScript function continues on one of torch's threads. So its caller puts what
has to follow it there into torch's state (`carry`), and removes it when the call has returned: only
the threads that run the function get a copy. From then on a value in torch's state takes
precedence.

torch's state has another trap. torch releases the values when the thread ends. A thread that ends
while the interpreter shuts down cannot get the lock: Python ends the thread again, inside torch's
destructor, and the process aborts ("terminate called without an active exception"). So no such
thread may end during that time. Workers are closed earlier (`Worker.close_at_exit`), which ends
their threads. `threading` counts a thread as ended before that point, so joining is not enough: at
exit this module waits, for at most a second, until the operating system has ended the threads that
Python has joined.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from typing import Any

import torch

from telegrad.autograd.torch_internals import (
    get_from_torch,
    is_in_torch,
    remove_from_torch,
    stash_in_torch,
)
from telegrad.forks import renewed

__all__ = ["carry", "drop", "is_torch_state_used", "peek", "stash", "swap", "wait_at_exit"]

_PATIENCE = 1.0
_MANY = 4096

_used_by: set[int] = set()
"""Threads that have torch's state, by their number in the operating system."""

_local = threading.local()


@functools.cache
def _has_device_threads() -> bool:
    return torch.accelerator.is_available()


_is_anything_carried = False  # ever, in this process
_is_plain = False  # Python's state is all there is: no device threads, and nothing was carried
_deciding = renewed(threading.RLock())  # guards changes of both: once carried, never plain again


def stash(key: str, value: Any) -> None:
    """Sets a value of this thread, and of the device threads that torch runs its work on."""
    if _is_plain:
        _local.__dict__[key] = value
        return
    if not _has_device_threads():
        if _is_anything_carried and is_in_torch(key):
            stash_in_torch(key, value)
        else:
            _local.__dict__[key] = value
            _settle()
        return
    stash_in_torch(key, value)
    thread = threading.get_native_id()
    if thread not in _used_by:
        _note(thread)


def _settle() -> None:
    global _is_plain
    with _deciding:
        _is_plain = not _is_anything_carried and not _has_device_threads()


def peek(key: str, default: Any) -> Any:
    if _is_plain:
        return _local.__dict__.get(key, default)
    if not _has_device_threads() and not (_is_anything_carried and is_in_torch(key)):
        return _local.__dict__.get(key, default)
    return get_from_torch(key) if is_in_torch(key) else default


def swap(key: str, value: Any, default: Any) -> Any:
    """Sets a value and returns the one before."""
    if _is_plain:
        values = _local.__dict__
        before = values.get(key, default)
        values[key] = value
        return before
    before = peek(key, default)
    stash(key, value)
    return before


def carry(key: str) -> bool:
    """Lets a value of this thread follow the work that torch hands to other threads, until `drop`.
    False if it does so anyway, and there is nothing to drop."""
    global _is_anything_carried, _is_plain
    if _has_device_threads() or is_in_torch(key):
        return False
    stash_in_torch(key, _local.__dict__[key])
    with _deciding:
        _is_anything_carried = True
        _is_plain = False
    return True


def drop(key: str) -> None:
    """Ends what `carry` began on this thread."""
    remove_from_torch(key)


def is_torch_state_used() -> bool:
    """Whether any thread has had torch's state, and so must end before the interpreter does."""
    return bool(_used_by)


def _note(thread: int) -> None:
    wait_at_exit()
    if len(_used_by) >= _MANY:
        for other in [other for other in _used_by.copy() if not _exists(other)]:
            _used_by.discard(other)
    _used_by.add(thread)


@functools.cache
def wait_at_exit() -> None:
    """Call it before a worker registers its own exit function: the last registered runs first."""
    atexit.register(_wait_for_ended_threads)


def _wait_for_ended_threads() -> None:
    running = {thread.native_id for thread in threading.enumerate()}
    running.add(threading.get_native_id())  # after a fork `threading` has its number from before
    ending = [thread for thread in _used_by.copy() if thread not in running]
    give_up = time.monotonic() + _PATIENCE
    while any(_exists(thread) for thread in ending) and time.monotonic() < give_up:
        time.sleep(0.0005)


def _exists(thread: int) -> bool:
    return os.path.exists(f"/proc/self/task/{thread}")
