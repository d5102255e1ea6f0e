"""Remote references on an agent: how `remote` is sent and run, and how values are fetched.

A REMOTE message names the reference and its creator's fork in front of the call. The owner
registers both, answers, and only then runs the function: the creator's reference is confirmed as
soon as it can be, however long the function takes, and what the function raises is kept in the
reference. A call with a timeout of its own is answered when the function is done: the timeout is
for that. A call of a method is answered when its value has been found, since at the answer the
caller lets go of it. A fetch waits at the owner without a thread until the value is there.

A worker that asks itself sends itself the same message. The value is what the function has returned
and not a copy of it: a module that it returns is the one that others use and train.
"""

from __future__ import annotations

import logging
import struct
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from telegrad.errors import RpcTimeout, RRefError
from telegrad.ids import ForkId, RRefId, first_of_life
from telegrad.locks import check_wait
from telegrad.rpc.calls.agent import Agent
from telegrad.rpc.calls.async_call import AsyncCall
from telegrad.rpc.calls.error_texts import timeout_text
from telegrad.rpc.calls.kept_errors import again, fail, without_frames
from telegrad.rpc.calls.outcome import as_exception, describe_function
from telegrad.rpc.calls.service import runs_without_gradients
from telegrad.rpc.connections.network import Send
from telegrad.rpc.functions import checked_future
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.references.in_messages import PackedReferences
from telegrad.rpc.references.proxy import call_owned, call_owned_async
from telegrad.rpc.references.records import OwnerEntry
from telegrad.rpc.references.rref import RRef, rebuild_rref
from telegrad.rpc.references.table import RRefTable
from telegrad.wire.codec import Codec, Encoded, Reducer
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.function_names import name_in, name_of
from telegrad.wire.unsendable import arguments_in

__all__ = ["REMOTE_HEAD", "RemoteReferences", "register_reducer"]

_log = logging.getLogger("telegrad.rpc")

_PATIENCE = 60.0  # seconds without any change, after which references will not end any more
_MOST_LEAKS = 10  # told of at shutdown, one by one

_reducers: dict[type, Reducer] = {}
_codecs: weakref.WeakSet[Codec] = weakref.WeakSet()  # of the workers of this process


def register_reducer(cls: type, reducer: Reducer) -> None:
    """Says how objects of a type, and of its subtypes, are packed for other workers.

    Args:
        reducer: takes the object and the id of the worker it goes to; returns what `__reduce__`
            would. What it returns may hold references.
    """
    _reducers[cls] = reducer
    for codec in list(_codecs):
        codec.register(cls, reducer)


REMOTE_HEAD = struct.Struct("<qqqq?")
"""The reference, its creator's fork, and whether to answer only when the function is done."""


_METHOD_CALLS = {name_of(call_owned), name_of(call_owned_async)}


class RemoteReferences:
    """Connects the table of references with an agent. The codec comes first: the agent needs it,
    and the table needs the agent."""

    table: RRefTable

    def __init__(self) -> None:
        self.codec = _ReferenceCodec({RRef: self._reduce, **_reducers})
        _codecs.add(self.codec)
        self._being_made: dict[RRefId, OwnerEntry] = {}
        """What this worker has asked itself for, until it runs."""

    def connect(self, agent: Agent) -> None:
        self._agent = agent
        self.table = RRefTable(
            agent,
            fetch=self._fetch,
            call=self._call,
            bound_here=agent.bound_here,
            worker_info=self._worker_info,
            first_id=first_of_life(agent.directory.life),
        )
        self.codec.new_references = self.table.new_references
        self.table.start()
        agent.handle(Kind.RREF_FETCH, self._on_fetch)
        agent.service.handle_frame(Kind.REMOTE, self._on_remote, REMOTE_HEAD.size)
        agent.service.admit = self._admit

    def _reduce(self, rref: RRef[Any], destination: int) -> Any:
        return self.table.reduce(rref, destination, self.codec.packed)

    def _worker_info(self, worker_id: int) -> WorkerInfo:
        return WorkerInfo(self._agent.name_of(worker_id), worker_id)

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
            # Noted in the step that makes it: Ctrl-C between two would leave it half made.
            made.extend(map(self.table.new_user, (to,)))
            rref_id, fork_id, rref = made[0]
            ids = REMOTE_HEAD.pack(*rref_id, *fork_id, bool(timeout))
            on_answer = partial(self._created, fork_id)
            self._send(ids, to, func, args, kwargs, timeout, on_answer, calls)
        except BaseException as error:
            # A request that has begun to leave is answered, and the reference settled by that.
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
            calls: gets the call that is made.
        """
        agent = self._agent
        head, encoded, context, message = agent.pack_call(to, func, args, kwargs)
        call = AsyncCall(agent, to, context, lambda: f"remote({describe_function(func)})")
        call.future.add_done_callback(on_answer)
        if calls is not None:
            calls.append(call)
        agent.take_back_if_unread(call, encoded)
        body = (ids, head, encoded.payload)
        agent.dispatch(call, Kind.REMOTE, context, message, body, encoded.buffers, timeout)

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
        except Exception as error:  # noqa: BLE001 - whatever it is, the reference tells it
            self.table.creation_failed(fork_id, without_frames(error))
        else:
            self.table.creation_finished(fork_id)

    def _fetch(self, owner: int, rref_id: RRefId, fork_id: ForkId, timeout: float) -> Any:
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
            if not isinstance(found, torch._C.Future):  # that would be taken for a deferred answer
                return found
        value: Future[Any] = Future()

        def done(entry: OwnerEntry) -> None:
            try:
                value.set_result(entry.value_to_send())
            except Exception as error:  # noqa: BLE001 - what made the value fail, told to the user
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
                frame.buffers = []
                try:
                    if runs_without_gradients(frame):
                        torch._C._set_grad_enabled(False)
                    value = func(*args, **kwargs)
                finally:
                    torch._C._set_grad_enabled(True)  # a function may have left it off
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
        """Between unpacking a call and running it: waits until the owners know of the references
        among its arguments, for a function may rely on it that each of them keeps its value. Ends
        by the owners' answers, by their loss, or when the table is closed."""
        unconfirmed = self.table.take_unconfirmed()
        if unconfirmed:
            confirmed = threading.Event()
            self.table.when_confirmed(unconfirmed, confirmed.set)
            confirmed.wait()

    # -- the end

    def flush(self, timeout: float, *, others_stay: bool = False) -> None:
        """For a graceful end: no reference crosses this worker's border any more.

        Args:
            others_stay: this worker leaves alone; what others hold of its values is lost to them.

        Raises:
            RRefError: the time was over before that.
        """
        self.table.drain()
        leaks = self.table.leak_report()
        if leaks:
            # No error: references that live as long as their program are common.
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
                "%s shuts down with references that did not end: a message that held them was "
                "never unpacked, or a worker has hung: %s",
                self._agent.info.name,
                "; ".join(still_open[:_MOST_LEAKS]),
            )
        elif still_open:
            raise RRefError("remote references were still open: " + "; ".join(still_open))

    def close(self) -> None:
        self.table.close()


class _ReferenceCodec(Codec):
    """A codec that takes references back which were packed into a message that is not sent,
    because something after them in it cannot be packed; and ends those in a message that cannot be
    unpacked."""

    new_references: Callable[[], PackedReferences]

    def __init__(self, reducers: Mapping[type, Reducer]) -> None:
        super().__init__(reducers)
        self._thread = threading.local()

    @property
    def packed(self) -> PackedReferences:
        """What the message that this thread packs has taken so far."""
        ours = self._thread.__dict__
        packed: PackedReferences | None = ours.get("packed")
        if packed is None:
            packed = ours["packed"] = self.new_references()
        return packed

    def _encode_any(
        self,
        value: object,
        destination: int,
        root: str,
        labels: Sequence[str] | None,
        *,
        apart: bool = False,
    ) -> Encoded:
        ours = self._thread.__dict__
        # Of a message that is just being packed, if a destructor has interrupted that to call.
        interrupted = ours.pop("packed", None)
        try:
            encoded = super()._encode_any(value, destination, root, labels, apart=apart)
            if "packed" in ours:
                encoded.references = ours["packed"]
                if labels is None:  # no arguments of a call: whoever sends it tells nothing of it
                    ours["packed"].leave()
            return encoded
        except BaseException:
            if "packed" in ours:
                ours["packed"].abandon()
            raise
        finally:
            ours.pop("packed", None)
            if interrupted is not None:
                ours["packed"] = interrupted

    def _not_decoded(self, stream: bytes | bytearray | memoryview) -> None:
        for arguments in arguments_in(stream, rebuild_rref):
            try:
                rebuild_rref(*arguments)  # and nobody keeps it; unpacking one twice does no harm
            except Exception as error:  # noqa: BLE001 - the message is damaged: it is an error anyway
                _log.debug("a reference could not be unpacked: %s", error)


def _fail_if_unsent(entry: OwnerEntry, future: Future[Any]) -> None:
    """A worker's message to itself was answered, or could not be served, as when it closes."""
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
