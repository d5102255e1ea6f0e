"""Remote references on an agent: how `remote` is sent and run, and how values are fetched.

In a REMOTE message, the ids of the reference and of its creator's fork precede the call. The owner
registers both, answers, and only then runs the function. So the creator's reference is confirmed at
once, however long the function takes, and the reference keeps what the function raises. There are
two exceptions: a call with its own timeout is answered when the function is done, since the timeout
is for that; and the call of a method is answered when its value is found, since the caller drops
its reference at the answer. A fetch waits at the owner, without a thread, until the value is made.

A worker that calls itself sends itself the same message. The value is the function's result, not a
copy of it: a module that it returns is the one that others use and train.
"""

from __future__ import annotations

import logging
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from telegrad.errors import RpcTimeout, RRefError
from telegrad.ids import ForkId, RRefId, first_of_life
from telegrad.locks import check_wait
from telegrad.rpc.calls.agent import Agent
from telegrad.rpc.calls.async_call import AsyncCall
from telegrad.rpc.calls.outcome import (
    again,
    as_exception,
    describe_function,
    fail,
    timeout_text,
    without_frames,
)
from telegrad.rpc.calls.service import run_function
from telegrad.rpc.connections.network import Send
from telegrad.rpc.functions import checked_future
from telegrad.rpc.references.in_messages import ReferenceCodec
from telegrad.rpc.references.proxy import call_owned, call_owned_async
from telegrad.rpc.references.records import OwnerEntry
from telegrad.rpc.references.rref import RRef
from telegrad.rpc.references.table import Call, RRefTable
from telegrad.wire.codec import Codec, Reducer
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.function_names import name_in, name_of

__all__ = ["REMOTE_HEAD", "RemoteReferences", "register_reducer"]

_log = logging.getLogger("telegrad.rpc")

_PATIENCE = 60.0  # seconds without any change, after which references count as stuck
_MOST_LEAKS = 10  # listed at shutdown

_reducers: dict[type, Reducer] = {}
_codecs: weakref.WeakSet[Codec] = weakref.WeakSet()  # of the workers of this process


def register_reducer(cls: type, reducer: Reducer) -> None:
    """Registers how objects of a type, and of its subtypes, are packed for other workers.

    Args:
        reducer: takes the object and the id of its destination; returns a value like that of
            `__reduce__`, which may hold references.
    """
    _reducers[cls] = reducer
    for codec in list(_codecs):
        codec.register(cls, reducer)


REMOTE_HEAD = struct.Struct("<qqqq?")
"""The reference, its creator's fork, and whether to answer only when the function is done."""

_METHOD_CALLS = {name_of(call_owned), name_of(call_owned_async)}


class RemoteReferences:
    """Remote references on an agent. The codec is made first: the agent needs it, and the table
    needs the agent.

    Attributes:
        call: calls a function at a value's owner. The legacy profiler wraps it.
    """

    table: RRefTable

    def __init__(self) -> None:
        self.codec = ReferenceCodec(_reducers)
        self.call: Call = self._call
        _codecs.add(self.codec)
        self._being_made: dict[RRefId, OwnerEntry] = {}
        """Values of `remote` calls to this worker itself that do not run yet."""

    def connect(self, agent: Agent) -> None:
        self._agent = agent
        self.table = RRefTable(agent, self, first_id=first_of_life(agent.directory.life))
        self.codec.table = self.table
        self.table.start()
        agent.handle(Kind.RREF_FETCH, self._on_fetch)
        agent.service.handle_frame(Kind.REMOTE, self._on_remote, REMOTE_HEAD.size)
        agent.service.admit = self._admit

    # -- for the table

    def bound_here(self, work: Callable[[Any], None]) -> Callable[[Any], None]:
        return self._agent.bound_here(work)

    # -- at the user

    def remote(
        self,
        to: int,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> RRef[Any]:
        """Runs `func` on worker `to`, which keeps the result; returns a reference to it at once."""
        agent = self._agent
        if to == agent.worker_id:
            entry, rref = self.table.new_owned()
            self._being_made[entry.rref_id] = entry
            ids = REMOTE_HEAD.pack(*entry.rref_id, *entry.rref_id, False)
            try:
                self._send(ids, to, func, args, kwargs, 0, partial(_fail_if_unsent, entry))
            except BaseException:
                self._being_made.pop(entry.rref_id, None)
                raise
            if timeout:
                timer = agent.call_later(timeout, partial(self._expire, entry, timeout, func))
                entry.add_done_callback(lambda _: timer.cancel())  # it keeps the value until then
            return rref
        made: list[tuple[RRefId, ForkId, RRef[Any]]] = []
        calls: list[AsyncCall] = []
        try:
            # Noted in the step that makes it, so that Ctrl-C cannot come in between.
            made.extend(map(self.table.new_user, (to,)))
            rref_id, fork_id, rref = made[0]
            ids = REMOTE_HEAD.pack(*rref_id, *fork_id, bool(timeout))
            on_answer = partial(self._created, fork_id)
            self._send(ids, to, func, args, kwargs, timeout, on_answer, calls)
        except BaseException as error:
            # If sending the request has started, its reply settles the reference.
            if made and not any(call.begun or call.future.done() for call in calls):
                self.table.creation_failed(made[0][1], again(as_exception(error)))
            raise
        return rref

    def _send(
        self,
        ids: bytes,
        to: int,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: float | None,
        on_answer: Callable[[Future[Any]], None],
        calls: list[AsyncCall] | None = None,
    ) -> None:
        """
        Args:
            calls: the call is appended to it.
        """
        agent = self._agent
        head, encoded, context, message = agent.pack_call(to, func, args, kwargs)
        call = AsyncCall(agent, to, context, lambda: f"remote({describe_function(func)})")
        call.future.add_done_callback(on_answer)
        if calls is not None:
            calls.append(call)
        agent.take_back_if_unread(call, encoded)
        body = (ids, head, encoded.payload)
        agent.async_calls.send(call, Kind.REMOTE, context, message, body, encoded.buffers, timeout)

    def _expire(self, entry: OwnerEntry, seconds: float, func: Callable[..., Any]) -> None:
        if not entry.is_done:
            entry.creation_failed(
                RpcTimeout(
                    timeout_text(
                        "this worker itself", f"remote({describe_function(func)})", seconds
                    ),
                    worker=self._agent.info.name,
                    seconds=seconds,
                )
            )

    def _created(self, fork_id: ForkId, future: Future[Any]) -> None:
        try:
            future.wait()  # it is done
        except Exception as error:  # noqa: BLE001 - kept in the reference for its users
            self.table.creation_failed(fork_id, without_frames(error))
        else:
            self.table.creation_finished(fork_id)

    def fetch(self, owner: int, rref_id: RRefId, timeout: float) -> Any:
        check_wait("the value of a reference")
        return self._agent.exchange(
            owner,
            Kind.RREF_FETCH,
            tuple(rref_id),
            timeout if timeout >= 0 else None,
            lambda: "RRef.to_here()",
        )

    def _call(
        self,
        mode: str,
        owner: int,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Any:
        seconds = timeout if timeout >= 0 else None
        if mode == "sync":
            return self._agent.call(owner, func, args, kwargs, seconds)
        if mode == "async":
            return self._agent.call_async(owner, func, args, kwargs, seconds)
        return self.remote(owner, func, args, kwargs, seconds)

    # -- at the owner

    def _on_fetch(self, source: int, body: tuple[int, int]) -> Any:
        entry = self.table.entry(RRefId(*body))
        if entry.is_done:
            found = entry.value_to_send()
            if not isinstance(found, torch._C.Future):  # a future would count as a deferred answer
                return found
        value: Future[Any] = Future()

        def done(entry: OwnerEntry) -> None:
            try:
                value.set_result(entry.value_to_send())
            except Exception as error:  # noqa: BLE001 - raised to the user
                fail(value, error)

        entry.add_done_callback(done)
        return value

    def _on_remote(self, source: int, frame: Frame, send: Send) -> None:
        service = self._agent.service
        *ids, answers_when_done = REMOTE_HEAD.unpack_from(frame.body)
        if source == self._agent.worker_id:
            entry = self._being_made.pop(RRefId(*ids[:2]))
        else:
            entry = self.table.owner_created(RRefId(*ids[:2]), ForkId(*ids[2:]), source)
        name, _ = name_in(frame.body, REMOTE_HEAD.size)
        is_method = name in _METHOD_CALLS
        if answers_when_done:
            entry.add_done_callback(lambda _: service.answer(source, frame, send, None))
        elif not is_method:
            service.answer(source, frame, send, None)
        try:
            with service.context_of(frame):
                try:
                    func, args, kwargs = service.unpack_call(source, frame, REMOTE_HEAD.size)
                    if is_method:
                        args = (self.table.entry(args[0]), *args[1:])
                finally:
                    if is_method and not answers_when_done:
                        service.answer(source, frame, send, None)
                value = run_function(frame, func, args, kwargs)
                if hasattr(func, "_wrapped_async_rpc_function"):
                    checked_future(func, value).add_done_callback(partial(_fill, entry))
                    return
        except BaseException as error:  # noqa: BLE001 - kept in the reference for its users
            if service.on_failure is not None:
                service.on_failure(error)
            entry.set_error(as_exception(error))
            return
        entry.set_value(value)

    def _admit(self) -> None:
        """Between unpacking a call and running it, waits until the owners count the references
        among its arguments, since the function may rely on them to keep their values. Ends with the
        owners' answers, their loss, or the end of the table."""
        unconfirmed = self.table.take_unconfirmed()
        if unconfirmed:
            confirmed = threading.Event()
            self.table.when_confirmed(unconfirmed, confirmed.set)
            confirmed.wait()

    # -- the end

    def flush(self, timeout: float, *, others_stay: bool = False) -> None:
        """For a graceful shutdown: ends all references between this worker and others.

        Args:
            others_stay: only this worker leaves; others lose its values.

        Raises:
            RRefError: references were left at the timeout.
        """
        self.table.drain()
        leaks = self.table.leak_report()
        if leaks:
            # Not an error: references that live as long as their program are common.
            _log.info(
                "%d references to values of %s were still held by others when it shut down: %s%s",
                len(leaks),
                self._agent.info.name,
                "; ".join(leaks[:_MOST_LEAKS]),
                "; ..." if len(leaks) > _MOST_LEAKS else "",
            )
        still_open = self.table.flush(timeout or None, _PATIENCE, others_stay=others_stay)
        if still_open and not timeout:
            _log.warning(
                "%s shuts down with references that did not end, because a message that held them "
                "was never unpacked, or a worker hangs: %s",
                self._agent.info.name,
                "; ".join(still_open[:_MOST_LEAKS]),
            )
        elif still_open:
            raise RRefError("remote references were still open: " + "; ".join(still_open))

    def close(self) -> None:
        self.table.close()


def _fail_if_unsent(entry: OwnerEntry, future: Future[Any]) -> None:
    """Fails the value of a message to this worker itself that was not served, as when it closes."""
    try:
        future.wait()  # it is done
    except Exception as error:  # noqa: BLE001 - kept in the reference for its users
        entry.set_error(error)


def _fill(entry: OwnerEntry, future: Future[Any]) -> None:
    try:
        value = future.wait()  # it is done
    except Exception as error:  # noqa: BLE001 - kept in the reference for its users
        entry.set_error(error)
    else:
        entry.set_value(value)
