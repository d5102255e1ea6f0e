"""What torch's old profiler sees of a call: an event at the caller, under torch's name for it, and
what the callee has done for it.

Torch's old profiler (`torch.autograd.profiler_legacy.profile`) shows under torch's RPC what other
workers did for the calls that were made while it was on; its C++ adds their events to the
profile. Here a call that is profiled runs under a profile of its own at the callee, whose events
come back with the result, and `profile`, which `install()` puts in the place of torch's, adds them
when it ends.

Clocks of two machines have nothing in common, so the callee's events are put into the middle of the
time that the caller has waited.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._C._autograd import _profiler_enabled, _profiler_type
from torch._C._profiler import ActiveProfilerType
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.futures import Future

from telegrad import rpc as native
from telegrad.autograd.contexts.context import EnteredContext, thread_context
from telegrad.compat.rpc.internal import (
    RPCExecMode,
    _build_rpc_profiling_key,
    builtin_name,
)
from telegrad.rpc.calls.outcome import as_exception, fail
from telegrad.rpc.functions import async_execution, checked_future
from telegrad.rpc.group import current
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.references.records import OwnerEntry
from telegrad.rpc.references.rref import RRef
from telegrad.rpc.references.table import Call

__all__ = ["call", "call_within", "is_wanted", "of_table", "profile", "remote"]

_log = logging.getLogger("telegrad.rpc")

_OPTIONS = (
    "use_cuda",
    "record_shapes",
    "with_flops",
    "profile_memory",
    "with_stack",
    "with_modules",
)

_lock = threading.Lock()  # guards what follows, and the events of those that are on
_on: list[_server_process_global_profile] = []


def is_wanted() -> bool:
    """Whether torch's old profiler watches this thread; the new one is not told of calls, as with
    torch's own RPC."""
    return _profiler_enabled() and _profiler_type() == ActiveProfilerType.LEGACY


def call(
    mode: RPCExecMode, to: str | int | WorkerInfo, func: Callable[..., Any], *rest: Any
) -> Future[Any]:
    """Makes a call whose event ends when its future does.

    Args:
        rest: what else `rpc_async` takes: arguments, keywords, timeout.
    """
    key = _key(mode, to, func)
    with torch.autograd.profiler.record_function(key) as record:
        return _ending(record, call_within(key, to, func, *rest))


def call_within(
    key: str, to: str | int | WorkerInfo, func: Callable[..., Any], *rest: Any
) -> Future[Any]:
    """Makes the call itself, inside of its event."""
    watching = profile.of_this_thread()
    if watching is None:
        return native.rpc_async(to, func, *rest)
    return watching.call(key, to, func, *rest)


def remote(to: str | int | WorkerInfo, func: Callable[..., Any], *rest: Any) -> RRef[Any]:
    """Makes a remote value whose event ends when the owner has made it."""
    key = _key(RPCExecMode.REMOTE, to, func)
    watching = profile.of_this_thread()
    with torch.autograd.profiler.record_function(key) as record:
        if watching is None:
            rref = native.remote(to, func, *rest)
            rref._set_profiling_future(record._call_end_callbacks_on_future(rref._get_future()))
        else:
            rref, have_come = watching.remote(key, to, func, *rest)
            ended = record._call_end_callbacks_on_future(rref._get_future())
            rref._set_profiling_future(torch.futures.collect_all([ended, have_come]))
    return rref


def of_table(inner: Call) -> Call:
    """Calls that references make themselves: to methods of their values, and for their types."""

    def call(mode: str, owner: int, func: Callable[..., Any], *rest: Any) -> Any:
        if mode != "async" or not is_wanted():
            return inner(mode, owner, func, *rest)
        key = _key(RPCExecMode.ASYNC, owner, func)
        with torch.autograd.profiler.record_function(key) as record:
            return _ending(record, inner(mode, owner, func, *rest))

    return call


def _ending(record: Any, future: Future[Any]) -> Future[Any]:
    """Ends the event with the future; returns one that is done after that."""
    ended: Future[Any] = Future()

    def done(_: Future[Any]) -> None:
        try:
            value = future.value()
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            fail(ended, error)
        else:
            ended.set_result(value)

    # What torch returns here takes an exception that was set from Python for a value.
    record._call_end_callbacks_on_future(future).add_done_callback(done)
    return ended


def _key(mode: RPCExecMode, to: str | int | WorkerInfo, func: Callable[..., Any]) -> str:
    name = builtin_name(func)
    if name is None:
        is_scripted = isinstance(func, torch.jit.ScriptFunction)
        name = torch._jit_internal._qualified_name(func) if is_scripted else func.__qualname__
    callee = to if isinstance(to, WorkerInfo) else native.get_worker_info(to)
    return _build_rpc_profiling_key(mode, name, native.get_worker_info().name, callee.name)


class _Thread(threading.local):
    profile: profile | None = None
    """The one that is on."""


_thread = _Thread()


class profile(profiler_legacy.profile):
    """In the place of `torch.autograd.profiler_legacy.profile`, with the events of other workers
    in calls that were made while it was on, and that have ended."""

    entered: bool
    function_events: Any

    def __init__(self, enabled: bool = True, **options: Any) -> None:
        super().__init__(enabled, **options)  # type: ignore[no-untyped-call]

    @staticmethod
    def of_this_thread() -> profile | None:
        """The one that is on, if it is of this class."""
        return _thread.profile if _profiler_enabled() else None

    def _start_trace(self) -> None:
        self._came: list[FunctionEvent] = []
        self._own_id: int | None = None
        self._note_own_id()
        # Before torch's first event: what is timed by this must not seem to come before that.
        self._begun = time.perf_counter()
        super()._start_trace()  # type: ignore[no-untyped-call]
        _thread.profile = self

    def __exit__(self, *error: Any) -> Any:
        if self.enabled:
            _thread.profile = None
        result = super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.enabled:
            self._note_own_id()
            if self._own_id is not None:
                self._merge(self._own_id)
        return result

    def _note_own_id(self) -> None:
        if self._own_id is None and native.is_initialized():
            self._own_id = native.get_worker_info().id

    def _merge(self, own_id: int) -> None:
        events = list(self.function_events)
        for event in events:
            event.node_id = own_id
            event.cpu_parent, event.cpu_children = None, []  # the tree is built anew
        events += self._came
        events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        self.function_events = EventList(  # type: ignore[no-untyped-call]
            events,
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
            with_flops=self.with_flops,
        )
        self.function_events._build_tree()

    # -- at the caller

    def call(self, key: str, to: Any, func: Callable[..., Any], *rest: Any) -> Future[Any]:
        """Makes a call that is profiled at the callee too, and has the name `key` here."""
        sent = self._send_time()
        ended: Future[Any] = Future()

        def answered(future: Future[Any]) -> None:
            try:
                outcome: _Outcome = future.value()
                self._add(key, sent, outcome.profiled)
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                fail(ended, error)
            else:
                ended.set_result(outcome.value)

        native.rpc_async(to, _Profiled(func, self.options), *rest).add_done_callback(answered)
        return ended

    def remote(
        self, key: str, to: Any, func: Callable[..., Any], *rest: Any
    ) -> tuple[RRef[Any], Future[Any]]:
        """Makes a remote value whose making is profiled at its owner; also returns a future that is
        done when the events have come, or will not come."""
        sent = self._send_time()
        have_come: Future[Any] = Future()

        def answered(future: Future[Any]) -> None:
            try:
                profiled: _ProfiledCall | None = future.value()
                if profiled is not None:
                    self._add(key, sent, profiled)
            except Exception as error:  # noqa: BLE001 - the owner is gone: the reference says so
                _log.debug("no events of %s have come: %s", key, error)
            have_come.set_result(None)

        ticket = (native.get_worker_info().id, next(_tickets))
        rref = native.remote(to, _Profiled(func, self.options, ticket), *rest)
        # No time limit: a value takes as long as it needs. It ends with the owner, at the latest.
        native.rpc_async(to, _events_of, (rref, ticket), timeout=0).add_done_callback(answered)
        return rref, have_come

    @property
    def options(self) -> dict[str, bool]:
        """What another one has to be made with to see the same."""
        return {name: getattr(self, name) for name in _OPTIONS}

    def _send_time(self) -> float:
        self._note_own_id()
        return self._now()

    def _now(self) -> float:
        return 1e6 * (time.perf_counter() - self._begun)

    def _add(self, key: str, sent: float, profiled: _ProfiledCall) -> None:
        """The events of a call have come: they lie in the middle of the time that it took."""
        shift = sent + max(self._now() - sent - profiled.took, 0.0) / 2
        for event in profiled.events:
            event.name = f"{key}#remote_op: {event.name}"
            event.trace_name = f"{key}#remote_op: {event.trace_name}"
            event.time_range.start += shift
            event.time_range.end += shift
            event.is_remote = True
            self._came.append(event)


# -- at the callee


class _ProfiledCall(NamedTuple):
    events: list[FunctionEvent]
    took: float  # microseconds


class _Outcome(NamedTuple):
    value: Any
    profiled: _ProfiledCall


class _Profiled:
    """Runs a function under a profile. What it returns has the events with it, unless they are to
    be kept until somebody comes with the ticket.

    In errors it goes by the name of the function.
    """

    def __init__(
        self, func: Callable[..., Any], options: dict[str, bool], ticket: _Ticket | None = None
    ) -> None:
        self._func = func
        self._options = options
        self._ticket = ticket
        self.__module__ = getattr(func, "__module__", None) or type(self).__module__
        self.__qualname__ = getattr(func, "__qualname__", None) or repr(func)
        if hasattr(func, "_wrapped_async_rpc_function"):
            self._wrapped_async_rpc_function = func._wrapped_async_rpc_function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_wrapped_async_rpc_function"):
            return self._run(partial(self._func, *args, **kwargs))
        # A profile belongs to a thread, and this one must not wait for the function's future.
        done: Future[Any] = Future()
        work = partial(self._run_aside, thread_context(), done, args, kwargs)
        threading.Thread(target=work, name="telegrad-profiled", daemon=True).start()
        return done

    def _run_aside(self, context: int, done: Future[Any], args: Any, kwargs: Any) -> None:
        func = self._func
        try:
            with EnteredContext(context):
                # The wait ends with the future that the function has made.
                value = self._run(lambda: checked_future(func, func(*args, **kwargs)).wait())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
            fail(done, as_exception(error))
        else:
            done.set_result(value)

    def _run(self, function: Callable[[], Any]) -> Any:
        if _profiler_enabled():  # by somebody on this worker, whose profile gets the events
            value, profiled = function(), _ProfiledCall([], 0.0)
        else:
            begun = time.perf_counter()
            with profile(**self._options) as made:
                value = function()
            profiled = _ProfiledCall(
                [_alone(event) for event in made.function_events],
                1e6 * (time.perf_counter() - begun),
            )
        if self._ticket is None:
            return _Outcome(value, profiled)
        while len(_kept) >= _MOST_KEPT:  # whoever asked for them is gone
            del _kept[next(iter(_kept))]
        _kept[self._ticket] = profiled
        return value


def _alone(event: FunctionEvent) -> FunctionEvent:
    """The event without those around it: the tree is built anew where it goes."""
    event.cpu_parent, event.cpu_children = None, []
    return event


_Ticket: TypeAlias = tuple[int, int]
"""A worker's id, and a number that it has chosen."""

_MOST_KEPT = 256
_tickets = itertools.count()
_kept: dict[_Ticket, _ProfiledCall] = {}


@async_execution
def _events_of(rref: RRef[Any], ticket: _Ticket) -> Future[_ProfiledCall | None]:
    """At the owner: what was kept, once the value has been made, or could not be."""
    found: Future[_ProfiledCall | None] = Future()
    entry = rref._record
    assert isinstance(entry, OwnerEntry)
    entry.add_done_callback(lambda _: found.set_result(_kept.pop(ticket, None)))
    return found


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
        events = [_alone(event) for event in made.function_events]
        with _lock:
            for each in watching:
                if each in _on:
                    each.process_global_function_events.append(events)
        return value

    return run
