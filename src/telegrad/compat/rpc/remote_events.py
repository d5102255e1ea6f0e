"""What the callee does in a call, in the caller's profile.

Torch's old profiler (`torch.autograd.profiler_legacy.profile`) shows under torch's RPC what other
workers did for the calls that were made while it was on; its C++ adds their events to the
profile. Here a call that is profiled runs under a profile of its own at the callee, whose events
come back with the result, and `profile`, which `install()` puts in the place of torch's, adds them
when it ends.

Clocks of two machines have nothing in common, so the callee's events are put into the middle of the
time that the caller has waited.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch._C._autograd import _profiler_enabled
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.futures import Future

from telegrad import rpc as native
from telegrad.autograd.contexts.context import EnteredContext, thread_context
from telegrad.rpc.calls.kept_errors import fail
from telegrad.rpc.calls.outcome import as_exception
from telegrad.rpc.functions import async_execution, checked_future
from telegrad.rpc.references.records import OwnerEntry

__all__ = ["Options", "alone", "profile"]

_log = logging.getLogger("telegrad.rpc")

Options: TypeAlias = dict[str, bool]
_OPTIONS = (
    "use_cuda",
    "record_shapes",
    "with_flops",
    "profile_memory",
    "with_stack",
    "with_modules",
)


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

    def call(
        self,
        key: str,
        to: Any,
        func: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: dict[str, Any] | None,
        timeout: float,
    ) -> Future[Any]:
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

        runner = _Profiled(func, self.options)
        native.rpc_async(to, runner, args, kwargs, timeout).add_done_callback(answered)
        return ended

    def remote(
        self,
        key: str,
        to: Any,
        func: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: dict[str, Any] | None,
        timeout: float,
    ) -> tuple[native.RRef[Any], Future[Any]]:
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
        rref = native.remote(to, _Profiled(func, self.options, ticket), args, kwargs, timeout)
        # No time limit: a value takes as long as it needs. It ends with the owner, at the latest.
        native.rpc_async(to, _events_of, (rref, ticket), timeout=0).add_done_callback(answered)
        return rref, have_come

    @property
    def options(self) -> Options:
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
        self, func: Callable[..., Any], options: Options, ticket: _Ticket | None = None
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
                [alone(event) for event in made.function_events],
                1e6 * (time.perf_counter() - begun),
            )
        if self._ticket is None:
            return _Outcome(value, profiled)
        while len(_kept) >= _MOST_KEPT:  # whoever asked for them is gone
            del _kept[next(iter(_kept))]
        _kept[self._ticket] = profiled
        return value


def alone(event: FunctionEvent) -> FunctionEvent:
    """The event without those around it: the tree is built anew where it goes."""
    event.cpu_parent, event.cpu_children = None, []
    return event


_Ticket: TypeAlias = tuple[int, int]
"""A worker's id, and a number that it has chosen."""

_MOST_KEPT = 256
_tickets = itertools.count()
_kept: dict[_Ticket, _ProfiledCall] = {}


@async_execution
def _events_of(rref: native.RRef[Any], ticket: _Ticket) -> Future[_ProfiledCall | None]:
    """At the owner: what was kept, once the value has been made, or could not be."""
    found: Future[_ProfiledCall | None] = Future()
    entry = rref._record
    assert isinstance(entry, OwnerEntry)
    entry.add_done_callback(lambda _: found.set_result(_kept.pop(ticket, None)))
    return found
