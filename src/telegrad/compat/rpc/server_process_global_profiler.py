"""In the place of `torch.distributed.rpc.server_process_global_profiler`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler_util import EventList, FunctionEvent

from telegrad.compat.rpc.remote_events import alone, profile
from telegrad.rpc.group import current

__all__: list[str] = []

_lock = threading.Lock()  # guards what follows, and the events of those that are on
_on: list[_server_process_global_profile] = []


class _server_process_global_profile(profile):
    """Profiles every function that this worker runs for others, on whichever thread. While several
    are on, the options of the latest count, and all of them get the events.

    Attributes:
        function_events: all of them.
        process_global_function_events: a list for each call.
    """

    def __enter__(self) -> Any:
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        self.entered = True
        self.process_global_function_events: list[list[FunctionEvent]] = []
        service = current.current().agent.service
        with _lock:
            _on.append(self)
            service.stand_in = _watched
        return self

    def __exit__(self, *error: Any) -> Any:
        if not self.enabled:
            return None
        with _lock:
            if self in _on:
                _on.remove(self)
            if not _on and current.is_set():
                current.current().agent.service.stand_in = None
        self.function_events = EventList(  # type: ignore[no-untyped-call]
            [event for events in self.process_global_function_events for event in events],
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
        )
        self.function_events._build_tree()
        return False


def _watched(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, run under a profile; of an asynchronous one, what it does at once."""

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        watching = tuple(_on)
        if not watching or _profiler_enabled():  # the caller's profile gets the events, say
            return func(*args, **kwargs)
        with profile(**watching[-1].options) as made:
            value = func(*args, **kwargs)
        events = [alone(event) for event in made.function_events]
        with _lock:
            for each in watching:
                if each in _on:
                    each.process_global_function_events.append(events)
        return value

    return run
