"""What goes to one worker, in order: the caller's side of remote tensors.

Operations are gathered into batches. A batch leaves when it is full, or with the next call to the
worker that needs an answer. Batches are numbered, and the worker runs them in that order, each
once (see `telegrad.tensors.table`). So a batch whose message may not have arrived is sent again.

Threads share a stream. Its lock is never held while anything is sent or waited for.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from telegrad.errors import NotInitialized, TelegradError, WorkerLost
from telegrad.locks import is_held_here
from telegrad.rpc.calls.agent import Agent
from telegrad.rpc.group import current
from telegrad.rpc.group.worker import extensions
from telegrad.rpc.seams import Timer
from telegrad.tensors.operations import Operation
from telegrad.tensors.table import (
    EXTENSION,
    Batch,
    Before,
    Failure,
    TableKey,
    Tables,
    answer,
    close_table,
    named,
    open_table,
    run_batch,
    run_call,
)

__all__ = ["Handle", "Stream", "attach", "stream_of_device", "stream_to", "synchronize"]

_log = logging.getLogger("telegrad.tensors")

_FULL = 32  # operations in a batch
_AHEAD = 16  # batches under way; a program that is faster than the worker waits
_RELEASE = 1.0  # seconds after which ids that are not needed are released, if nothing else is sent


class Stream:
    """
    Args:
        worker: the id of the worker at the other end; also this process's own.
    """

    def __init__(self, agent: Agent, worker: int, number: int) -> None:
        self.worker = worker
        self.worker_name = agent.name_of(worker)
        self.device = torch.device("cpu", worker + 1)  # cpu:0 is this process's own, for torch
        self.released: deque[int] = deque()
        """Ids of what is not needed any more. Destructors append to it: it needs no lock."""
        self.version = 0
        """Changes with everything that is sent."""
        self.is_recording = True
        """Whether the last call of a module there was made with gradients on."""
        self._agent = agent
        self.key = TableKey(agent.worker_id, agent.directory.life, number)
        self._ids = itertools.count(1)
        self._lock = threading.RLock()  # guards changes of the one below
        self._batches: tuple[tuple[Batch, ...], Batch] = ((), Batch(0, [], []))
        """Those that may not have arrived yet, and the one that gathers operations."""
        self._leaving: set[int] = set()
        """Numbers of those that are being sent, or are sent and not answered."""
        self._under_way: deque[Future[Failure | None]] = deque()
        self._end: TelegradError | None = None
        self._failure: Failure | None = None  # known here, and not raised yet
        self._raised = -1  # failures up to this batch have been raised
        agent.call(worker, open_table, (self.key,))
        self._timer: Timer = agent.call_later(_RELEASE, self._release_in_time)

    def new_id(self) -> int:
        return next(self._ids)

    # -- without an answer

    def put(self, operation: Operation) -> None:
        """Sends an operation, sooner or later.

        Raises:
            WorkerLost: the worker is gone. Other failures are raised by the next wait.
        """
        if self._end is not None:
            raise self._ended()
        with self._lock:
            self._batches[1].operations.append(operation)
            self.version += 1
            is_full = len(self._batches[1].operations) >= _FULL
        if is_full:
            self.flush()

    def flush(self) -> None:
        """Sends what there is. Waits if the worker is far behind: until it has caught up, or its
        loss."""
        while len(self._under_way) >= _AHEAD:
            try:
                oldest = self._under_way.popleft()
            except IndexError:  # another thread was here
                break
            oldest.wait()
        for batch in self._to_send():
            self._send(batch)

    def _to_send(self) -> list[Batch]:
        """What has gathered becomes a batch; it, and those that nobody is sending though they have
        not arrived: whoever was to send them was interrupted."""
        if self._end is not None:
            raise self._ended()
        if not is_held_here(self._lock):  # else a destructor has interrupted this very section
            with self._lock:
                sealed, gathered = self._batches
                # Whatever an id that is released here was used for has been put before.
                with contextlib.suppress(IndexError):  # until there are none left
                    while True:
                        gathered.released.append(self.released.popleft())
                if gathered.operations or gathered.released:
                    made = (*sealed, gathered), Batch(gathered.number + 1, [], [])
                    self._batches = made  # in one step: Ctrl-C loses no batch, and no number
        return [batch for batch in self._batches[0] if batch.number not in self._leaving]

    def _send(self, batch: Batch) -> None:
        try:
            self._leaving.add(batch.number)
            answer = self._agent.call_async(self.worker, run_batch, (self.key, batch), timeout=0)
        except TelegradError as error:
            self.end(error)
            raise
        except BaseException:  # Ctrl-C: the next to send anything sends it again
            self._leaving.discard(batch.number)
            raise
        self._under_way.append(answer)
        answer.add_done_callback(partial(self._answered, batch))

    def _arrived(self, batch: Batch) -> None:
        with self._lock:
            sealed, gathered = self._batches
            left = tuple([other for other in sealed if other is not batch])
            self._batches = left, gathered
        self._leaving.discard(batch.number)

    def _answered(self, batch: Batch, answer: Future[Failure | None]) -> None:
        try:
            failure = answer.value()
        except Exception as error:  # noqa: BLE001 - what it did is not known: nothing can follow it
            self.end(error if isinstance(error, TelegradError) else TelegradError(repr(error)))
            return
        self._arrived(batch)
        if failure is not None and failure.batch > self._raised:
            self._failure = failure
        if self._under_way and self._under_way[0] is answer:
            with contextlib.suppress(IndexError):  # a thread in `flush` was faster
                self._under_way.popleft()

    def _release_in_time(self) -> None:
        """On the agent's clock."""
        if self._end is None:
            if self.released:
                self._agent.run_aside(self._release)
            self._timer = self._agent.call_later(_RELEASE, self._release_in_time)

    def _release(self) -> None:
        try:
            self.flush()
        except TelegradError as error:
            _log.debug("values on worker %r could not be released: %s", self.worker_name, error)

    # -- with an answer

    def ask(self, func: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        """What `func(table, *args)` returns there, after everything that was sent before.

        Ends with the reply, at the loss of the worker, or at the call's timeout.

        Raises:
            RemoteError: an operation that was sent before has failed.
        """
        with self.before() as before:
            return self._agent.call(
                self.worker, run_call, (before, named(func), args), timeout=timeout
            )

    @contextlib.contextmanager
    def before(self) -> Iterator[Before]:
        """What a call to the worker, made inside, has to bring along and wait for there."""
        waiting = self._to_send()
        for batch in waiting[:-1]:
            self._send(batch)
        carried = waiting[-1] if waiting else None
        before = Before(self.key, self._batches[1].number, carried)
        self.version += 1
        self._failure = None  # the call raises it
        self._raised = before.batches - 1
        if carried is None:
            yield before
            return
        try:
            self._leaving.add(carried.number)
            yield before
        except BaseException:
            # The call may have failed before its message left. The numbers must have no gap.
            self._leaving.discard(carried.number)
            if self._end is None:
                with contextlib.suppress(TelegradError):  # which ends the stream
                    self._send(carried)
            raise
        self._arrived(carried)

    def after_all(self) -> Before:
        """What a call that is not waited for has to come after: everything is sent here."""
        self.flush()
        before = Before(self.key, self._batches[1].number, None)
        self._failure = None  # the call raises it
        self._raised = before.batches - 1
        return before

    # -- the end

    def end(self, reason: TelegradError) -> None:
        """Nothing can be sent any more. Waits of this side end by themselves: their calls fail."""
        if self._end is not None:
            return
        self._end = reason
        self._timer.cancel()
        self._batches = (), Batch(self._batches[1].number, [], [])
        self.released.clear()
        if self._failure is not None:
            _log.warning(
                "an operation on remote tensors failed on worker %r, and no call has raised it: %s",
                self.worker_name,
                self._failure.text,
            )
        if not isinstance(reason, WorkerLost | NotInitialized):
            with contextlib.suppress(
                TelegradError
            ):  # it hears of this process's end, at the latest
                self._agent.call_async(self.worker, close_table, (self.key,), timeout=0)

    def _ended(self) -> TelegradError:
        text = f"modules and tensors on worker {self.worker_name!r} cannot be used any more: "
        acting = current.acting()
        if acting is None or acting.agent is not self._agent:
            # The workers may have left first: then they were lost, for this stream.
            return NotInitialized(
                f"{text}the group of that worker has been closed. Save what is needed before it "
                "is, and make modules again on workers that are running"
            )
        text += f"{self._end}. Make them again, on a worker that is running"
        if isinstance(self._end, WorkerLost):
            return WorkerLost(text, worker=self.worker_name, reason=self._end.reason)
        if isinstance(self._end, NotInitialized):
            return NotInitialized(text)
        return TelegradError(text)


class Handle:
    """This end of something on a worker, which lives as long. Tensors that are one tensor there
    (`detach`) share it."""

    __slots__ = ("id", "stream")

    def __init__(self, stream: Stream, id_: int | None = None) -> None:
        self.stream = stream
        self.id = stream.new_id() if id_ is None else id_

    def __del__(self) -> None:
        self.stream.released.append(self.id)  # this may run anywhere: see `telegrad.locks`


class _Tensors:
    """What each worker gets: streams to others, tables for others."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.tables = Tables()
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count()
        agent.watch_losses(self._worker_lost)

    def stream_to(self, worker: int) -> Stream:
        stream = self._streams.get(worker)
        if stream is None:
            new = Stream(self._agent, worker, next(self._numbers))
            stream = self._streams.setdefault(worker, new)
            if stream is not new:  # another thread was faster
                new.end(TelegradError("there is another stream"))
        return stream

    def _worker_lost(self, worker: int, reason: str) -> None:
        stream = self._streams.pop(worker, None)
        if stream is not None:
            name = stream.worker_name
            stream.end(WorkerLost(f"worker {name!r} is lost: {reason}", worker=name, reason=reason))
        self.tables.close_all(worker)

    def synchronize(self) -> None:
        for stream in list(self._streams.values()):
            stream.ask(_nothing)

    def close(self) -> None:
        while self._streams:
            _, stream = self._streams.popitem()
            stream.end(NotInitialized("this process has left the group"))
        self.tables.close_all()

    def needs_close(self) -> bool:
        return bool(self._streams)


@answer
def _nothing(table: object) -> None:
    """Waits for what was sent before."""


def attach() -> None:
    """Lets every worker that starts from now on have remote tensors, and keep those of others."""
    extensions[EXTENSION] = _Tensors


def _here() -> _Tensors:
    found = current.current().extensions[EXTENSION]
    assert isinstance(found, _Tensors)
    return found


def stream_to(worker: int) -> Stream:
    """The stream from this process to a worker.

    Raises:
        WorkerLost: the worker is gone.
    """
    return _here().stream_to(worker)


def stream_of_device(device: torch.device) -> Stream:
    """The stream of the tensors that have this device."""
    return stream_to(device.index - 1)


def synchronize() -> None:
    """Waits until every operation that this process has sent to remote tensors is done.

    Raises:
        RemoteError: one of them failed; those after it were skipped.
        WorkerLost: a worker is lost while this waits.
        NotInitialized: this process belongs to no group.

    Example::

        start = time.perf_counter()
        optimizer.step()  # does not wait
        telegrad.tensors.synchronize()
        print(time.perf_counter() - start)
    """
    _here().synchronize()
