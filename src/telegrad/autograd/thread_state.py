"""Values that belong to a thread: the context it is in, the wave it runs.

Python's own thread-local state is used where it is enough. It is not where torch has a device:
the engine then runs backward functions on threads of its own, and only torch's thread-local state
follows the work there. Torch's is not used without need, because whatever torch hands to any other
thread takes a copy of it along, and letting go of the copy needs the interpreter lock. A gloo
process group whose last owner is destroyed with that lock held waits for its threads, and they
would wait for the lock: a process with DistributedDataParallel can stand still for good that way.

A script function of TorchScript goes on, after a wait, on a thread of torch's. So its caller puts
into torch's state what is to follow it there (`carry`), and takes it away when the call has
returned: no other thread gets a copy than those that run the function. From then on torch's state,
where there is one, is that of the thread.

With torch's state there is one more trap. Torch lets go of the values when the thread ends. A
thread that ends while the interpreter shuts down does not get the lock: Python ends the thread
again, inside of torch's destructor, and the process aborts ("terminate called without an active
exception"). So no such thread may end during that time. Workers are closed before
(`Worker.close_at_exit`), which ends their threads. `threading` counts a thread as ended before that
point, so joining it is not enough: at exit we wait, a second at most, until the operating system
has ended those threads that Python has.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from typing import Any

import torch

from telegrad.forks import renewed

__all__ = ["carry", "drop", "is_torch_state_used", "peek", "stash", "swap", "wait_at_exit"]

_PATIENCE = 1.0
_MANY = 4096

_used_by: set[int] = set()
"""Threads that have such state, by their number in the operating system."""


_local = threading.local()


@functools.cache
def _has_device_threads() -> bool:
    return torch.accelerator.is_available()


_is_anything_carried = False  # ever, in this process
_deciding = renewed(
    threading.RLock()
)  # guards the changes of both: once carried, never plain again
_is_plain = False  # Python's state is all there is: no device threads, and nothing was carried


def stash(key: str, value: Any) -> None:
    """Sets a value of this thread, and of the device threads that torch runs its work on."""
    if _is_plain:
        _local.__dict__[key] = value
        return
    if not _has_device_threads():
        if _is_anything_carried and torch._C._is_key_in_tls(key):
            torch._C._stash_obj_in_tls(key, value)
        else:
            _local.__dict__[key] = value
            _settle()
        return
    torch._C._stash_obj_in_tls(key, value)
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
    if not _has_device_threads() and not (_is_anything_carried and torch._C._is_key_in_tls(key)):
        return _local.__dict__.get(key, default)
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else default


def swap(key: str, value: Any, default: Any) -> Any:
    """`stash`, and what was there before."""
    if _is_plain:
        values = _local.__dict__
        before = values.get(key, default)
        values[key] = value
        return before
    before = peek(key, default)
    stash(key, value)
    return before


def carry(key: str) -> bool:
    """Lets a value of this thread follow the work that torch hands to other threads from now on,
    until `drop`. False if it does so anyway, and nothing is to be dropped."""
    global _is_anything_carried, _is_plain
    if _has_device_threads() or torch._C._is_key_in_tls(key):
        return False
    torch._C._stash_obj_in_tls(key, _local.__dict__[key])
    with _deciding:
        _is_anything_carried = True
        _is_plain = False
    return True


def drop(key: str) -> None:
    """Ends what `carry` has begun on this thread."""
    torch._C._remove_obj_from_tls(key)


def is_torch_state_used() -> bool:
    """Whether any thread has had torch's state, and may not end after the interpreter."""
    return bool(_used_by)


def _note(thread: int) -> None:
    wait_at_exit()
    if len(_used_by) >= _MANY:
        for other in [other for other in _used_by.copy() if not _exists(other)]:
            _used_by.discard(other)
    _used_by.add(thread)


@functools.cache
def wait_at_exit() -> None:
    """To be called before a worker asks to be closed at exit: what is asked for last runs first."""
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
