"""Remote calls, as `torch.distributed.rpc` has them.

Every function acts for the worker that `init_rpc` has started in this process.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch.futures
from torch._C._distributed_c10d import Store
from torch.futures import Future

from telegrad.errors import RpcTimeout, TelegradError
from telegrad.forks import renewed
from telegrad.rpc.calls.arguments import checked_call
from telegrad.rpc.group import current
from telegrad.rpc.group.options import UNSET_RPC_TIMEOUT, RpcOptions, checked_timeout
from telegrad.rpc.group.worker import Worker, start_worker
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.rpc.references.rref import RRef

__all__ = [
    "UNSET_RPC_TIMEOUT",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_initialized",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_log = logging.getLogger("telegrad.rpc")

_init_lock = renewed(threading.Lock())  # one thread starts or ends the process's worker
_collecting = threading.local()


def init_rpc(
    name: str,
    backend: None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcOptions | None = None,
    *,
    store: Store | None = None,
) -> None:
    """Makes this process a worker, which can call others and be called.

    Returns when all workers of the group have joined; in an open group at once.

    Args:
        name: unique in the group; letters, digits, `_`, `:` and `-`.
        backend: must be None; there is only one.
        rank: the worker's id, from 0. By default `RANK` of the environment.
        world_size: the size of the group. None takes `WORLD_SIZE` of the environment if no rank is
            given either; otherwise it means an open group, which workers join and leave.
        rpc_backend_options: see `RpcOptions`.
        store: where the workers meet, instead of `init_method`.

    Raises:
        TelegradError: this process is a worker already, the name is invalid, or the group did not
            come together within `RpcOptions.rpc_timeout`.
        TypeError, ValueError: an argument or option is invalid.
    """
    if isinstance(backend, RpcOptions):
        raise TypeError("pass options by name: init_rpc(name, rpc_backend_options=RpcOptions(...))")
    if backend is not None:
        raise TypeError(
            f"telegrad has one backend: leave backend=None, got a {type(backend).__name__}"
        )
    options = rpc_backend_options if rpc_backend_options is not None else RpcOptions()
    if not isinstance(options, RpcOptions):
        raise TypeError(
            f"rpc_backend_options must be an RpcOptions, got a {type(options).__name__}: write "
            "RpcOptions(...), or call telegrad.install() first to use the options of torch's RPC"
        )
    options = replace(options)  # checks them again, since they can be changed
    WorkerInfo(name, rank)  # refuses an invalid name before it meets other workers
    with _init_lock:
        if current.is_set():
            raise TelegradError("RPC is already initialized: call shutdown() first")
        current.set_current(start_worker(name, rank, world_size, options, store))


def is_initialized() -> bool:
    """Whether this process is a worker now."""
    return current.is_set()


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Ends this process's part in the group. Afterwards `init_rpc` may be called again.

    Args:
        graceful: wait until all living workers have called it and no work is left anywhere.
            Otherwise this worker ends at once: calls from others to it, and its own calls, fail.
        timeout: seconds that a graceful end may take; 0 means no limit.

    Raises:
        RpcTimeout: it took longer. The worker has ended nevertheless.
    """
    timeout = checked_timeout(timeout)
    with _init_lock:
        worker = current.current()
        try:
            worker.shutdown(graceful=graceful, timeout=timeout)
        finally:
            current.set_current(None)


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    **misplaced: NoReturn,
) -> Any:
    """Runs `func` on worker `to` and returns its result.

    Args:
        to: a worker's name, rank or `WorkerInfo`; also this worker itself.
        func: a function, method, class, torch builtin or TorchScript function. Lambdas and closures
            work, but are sent by value, which is slower.
        args, kwargs: its arguments: a tuple or list, and a mapping. One argument is `args=(x,)`.
            Tensors in them arrive as copies.
        timeout: seconds; 0 or infinity means no limit. The default, or -1, is
            `RpcOptions.rpc_timeout`.

    Raises:
        RpcTimeout: the reply did not come in time; the function may still be running.
        WorkerLost: the worker has died or cannot be reached.
        SerializationError: an argument or the result cannot be sent; the error says which.
        TypeError: `func`, `args` or `kwargs` is not of the right type; nothing was sent.
        TypeError, ValueError: the timeout is not a number, or negative.
        Exception: raised by the function; its cause holds the remote traceback.
    """
    worker, worker_id, args, kwargs, seconds = _prepared(
        "rpc_sync", to, func, args, kwargs, timeout, misplaced
    )
    return worker.agent.call(worker_id, func, args, kwargs, seconds)


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    **misplaced: NoReturn,
) -> Future[Any]:
    """Like `rpc_sync`, but returns a future at once. The future's `wait` raises what `rpc_sync`
    would
    raise, except that an argument that cannot be sent raises here."""
    worker, worker_id, args, kwargs, seconds = _prepared(
        "rpc_async", to, func, args, kwargs, timeout, misplaced
    )
    future = worker.agent.call_async(worker_id, func, args, kwargs, seconds)
    collected: list[Future[Any]] | None = getattr(_collecting, "futures", None)
    if collected is not None:
        collected.append(future)
    return future


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    **misplaced: NoReturn,
) -> RRef[Any]:
    """Runs `func` on worker `to`, which keeps the result, and returns a reference to it at once.

    Args:
        timeout: seconds within which the value must be made. After that, new uses of the reference
            raise an `RRefError`; the function may still be running. 0 means no limit. By default
            the owner must register the call within `RpcOptions.rpc_timeout`, and the function has
            no limit.
    """
    worker, worker_id, args, kwargs, seconds = _prepared(
        "remote", to, func, args, kwargs, timeout, misplaced
    )
    return worker.references.remote(worker_id, func, args, kwargs, seconds)


def _prepared(
    caller: str,
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: dict[str, Any] | None,
    timeout: float,
    misplaced: dict[str, NoReturn],
) -> tuple[Worker, int, Sequence[Any], dict[str, Any] | None, float | None]:
    """This worker, the id of the other one, and the checked arguments and timeout of a call."""
    if type(args) is not tuple or kwargs is not None or misplaced or not callable(func):
        args, kwargs = checked_call(caller, func, args, kwargs, misplaced)
    seconds = None if timeout == UNSET_RPC_TIMEOUT else checked_timeout(timeout)
    worker = current.current()
    if isinstance(to, WorkerInfo):
        return worker, to.id, args, kwargs, seconds
    members = worker.agent.network.members
    worker_id = members.id_of(to) if isinstance(to, str) else None
    if worker_id is None:
        worker_id = members.named(to).id
    return worker, worker_id, args, kwargs, seconds


def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """A worker's name and id; without an argument, this worker's."""
    worker = current.current()
    if worker_name is None:
        return worker.info
    return worker.agent.network.members.named(worker_name)


def get_rpc_timeout() -> float:
    """Seconds after which a call fails that says nothing else; 0 is never."""
    return current.current().agent.rpc_timeout


def _set_rpc_timeout(seconds: float) -> None:
    current.current().agent.rpc_timeout = checked_timeout(seconds)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Waits, at its end, for all futures that `rpc_async` returned to this thread within it."""
    _collecting.futures = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_collecting.futures)
        finally:
            del _collecting.futures


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """The objects that the workers have passed to this function, by worker name; all must call it.

    Args:
        worker_names: the participants, including this worker; by default all.
        timeout: seconds; by default that of calls, 0 means no limit.

    Raises:
        RpcTimeout, WorkerLost
    """
    if timeout != UNSET_RPC_TIMEOUT:
        timeout = checked_timeout(timeout)
    worker = current.current()
    group = worker.agent.network.members
    members = group.infos()
    if worker_names is not None:
        members = [group.named(name) for name in sorted(set(worker_names))]
    seconds = worker.agent.rpc_timeout if timeout < 0 else timeout
    try:
        found = worker.gatherings.gather([m.id for m in members], obj, timeout=seconds)
    except RpcTimeout as error:
        raise RpcTimeout(
            f"workers timed out in _all_gather after {seconds:.2f} seconds: {error}",
            worker=error.worker,
            seconds=seconds,
        ) from None
    return {member.name: found[member.id] for member in members}


def _barrier(worker_names: Iterable[str]) -> None:
    """Waits until each of the workers has called it. Logs failures, as upstream does."""
    try:
        _all_gather(None, worker_names)
    except TelegradError:
        _log.exception("Failed to complete barrier")


def _rref_context_get_debug_info() -> dict[str, str]:
    """How many references and values this worker keeps."""
    return current.current().references.table.debug_info()
