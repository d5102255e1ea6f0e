"""The end of a process in which script functions wait for calls.

When a worker is closed at exit, its open calls fail, and their futures wake script functions on
threads that are torch's. Those threads need the interpreter lock, to convert what a future holds
and to let Python objects go. A thread that asks for it while the interpreter shuts down is ended by
Python inside of C++, which aborts the process. So the end waits for them: until what was settled is
converted and no call of a script function is under way, and then until no thread is running any
more. Each of the two takes ten seconds at most; a process without script calls does not wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_PATIENCE = 10.0
_QUIET_LOOKS = 5
_GRACE = 0.05
_THREADS = "/proc/self/task"

_lock = threading.Lock()  # guards the two counts
_expected = 0
_converted = 0
_calls = 0  # of script functions, that are under way


def call_begins() -> None:
    global _calls
    with _lock:
        _calls += 1


def call_ends() -> None:
    global _calls
    with _lock:
        _calls -= 1


def will_convert() -> None:
    """A call was made whose result will be converted by one of torch's threads."""
    global _expected
    with _lock:
        _expected += 1


def converted(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`convert`, counted."""

    def counted(value: Any) -> Any:
        global _converted
        with _lock:
            _converted += 1
        return convert(value)

    return counted


def _begin_anew() -> None:
    """A forked process has none of its parent's calls."""
    global _expected, _converted, _calls, _lock
    _lock = threading.Lock()
    _expected = _converted = _calls = 0


os.register_at_fork(after_in_child=_begin_anew)


def finish() -> None:
    """Waits for torch's threads; the worker must have been closed."""
    if not _expected and not _calls:
        return
    give_up = time.monotonic() + _PATIENCE
    while (_converted < _expected or _calls > 0) and time.monotonic() < give_up:
        time.sleep(0.0005)
    if not os.path.isdir(_THREADS):  # a system that does not tell
        time.sleep(_GRACE)
        return
    give_up = time.monotonic() + _PATIENCE
    quiet = 0
    while quiet < _QUIET_LOOKS and time.monotonic() < give_up:
        time.sleep(0.002)  # lets the interpreter lock go: who waits for it runs now
        quiet = 0 if any(state == "R" for state in _other_threads()) else quiet + 1


def _other_threads() -> Iterator[str]:
    """The states of this process's other threads, as the system names them."""
    me = str(threading.get_native_id())
    for thread in os.listdir(_THREADS):
        if thread != me:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                with open(f"{_THREADS}/{thread}/stat", encoding="utf-8") as file:
                    yield file.read().rpartition(")")[2].split()[0]
