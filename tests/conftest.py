"""What every test is held to: nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from telegrad import rpc
from telegrad.testing.cluster import processes

PATIENCE = 5.0


def pytest_configure() -> None:
    """Ctrl-C is tested, also where it is ignored: by what a shell starts in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Starts the fork server and its companions before anything is counted."""
    process = processes.Process(target=_nothing)
    process.start()
    process.join()
    process.close()


def _nothing() -> None:
    pass


def threads() -> set[str]:
    return {
        t.name
        for t in threading.enumerate()
        if t is not threading.main_thread() and not t.name.startswith(("pytest_timeout", "Dummy"))
    }


def children() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return {int(pid) for pid in file.read().split()}


def descriptors() -> dict[str, int]:
    found: dict[str, int] = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the descriptor of the listing itself
        kind = target if target.startswith("/") else target.partition(":")[0]
        found[kind] = found.get(kind, 0) + 1
    return found


def settle(look: Callable[[], object], is_fine: Callable[[object], bool]) -> object:
    """What `look` sees, once it is fine or the patience is over: ends take a moment."""
    end = time.monotonic() + PATIENCE
    while True:
        seen = look()
        if is_fine(seen) or time.monotonic() > end:
            return seen
        gc.collect()
        time.sleep(0.01)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    had_threads, had_children, had_descriptors = threads(), children(), descriptors()
    yield
    left = settle(lambda: threads() - had_threads, lambda seen: not seen)
    assert not left, f"threads are left over: {left}"
    left = settle(lambda: children() - had_children, lambda seen: not seen)
    assert not left, f"processes are left over: {left}"
    left = settle(lambda: grown(had_descriptors, descriptors()), lambda seen: not seen)
    assert not left, f"descriptors are left over: {left}"


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_over_by_a_module(fork_server: None) -> Iterator[None]:
    """Threads, processes, descriptors and shared memory of a module's tests end with them."""
    with nothing_left():
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_over() -> Iterator[None]:
    """The same for each test, but where a module shares one running group between its tests."""
    if rpc.is_initialized():
        yield
    else:
        with nothing_left():
            yield


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {kind: n - before.get(kind, 0) for kind, n in after.items() if n > before.get(kind, 0)}


@pytest.fixture
def fonts() -> Iterator[None]:
    """Closes the files of the fonts that matplotlib has used: it keeps them open."""
    from matplotlib import font_manager

    yield
    font_manager._get_font.cache_clear()
    gc.collect()
