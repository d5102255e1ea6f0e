"""Calling methods of a remote value: `rref.rpc_sync().method(...)` and its kin.

The call names the value by its id, and does not send the reference. The caller's own fork keeps the
value while the call is open, so no control message is needed. (Upstream sends the reference, which
costs a fork and its end per call.)

The first call through a reference fetches the value's type, for two reasons: a missing attribute is
the caller's mistake and raises there, even from `remote()`; and a method marked `async_execution`
must be known as such. The fetch waits at the owner, without a thread, until the value is made, so
the call itself never blocks a thread there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from telegrad.errors import SerializationError
from telegrad.ids import RRefId
from telegrad.rpc.calls.arguments import in_words_of_caller
from telegrad.rpc.calls.futures import CallFuture
from telegrad.rpc.calls.outcome import described_by_arguments, fail
from telegrad.rpc.group.current import current_table
from telegrad.rpc.group.options import UNSET_RPC_TIMEOUT, checked_timeout
from telegrad.rpc.references.texts import no_method, not_callable

if TYPE_CHECKING:
    from telegrad.rpc.references.records import OwnerEntry
    from telegrad.rpc.references.rref import RRef

__all__ = ["ASYNC_MARK", "RRefProxy", "type_of_owned"]

ASYNC_MARK = "_wrapped_async_rpc_function"
"""Marks a function that returns a future of its result."""

_PLACES = {"args[2]": "args", "args[3]": "kwargs"}
"""The places of a method's arguments among those of `call_owned`."""


class RRefProxy:
    """Each attribute is a method that calls that of the remote value.

    Args:
        mode: "sync", "async" or "remote".
    """

    def __init__(self, rref: RRef[Any], mode: str, timeout: float) -> None:
        self._rref = rref
        self._mode = mode
        self._timeout = checked_timeout(timeout) if timeout != UNSET_RPC_TIMEOUT else timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _RemoteMethod(_invoke, self._rref, self._mode, name, self._timeout)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise not_callable("remote" if self._mode == "remote" else f"rpc_{self._mode}")


class _RemoteMethod(partial[Any]):
    """A method of a remote value, before it is called."""

    def __repr__(self) -> str:
        rref, _, name, _ = self.args
        return f"<method {name!r} of a value on worker {rref.owner_name()!r}: call it>"


def _invoke(
    rref: RRef[Any], mode: str, name: str, timeout: float, /, *args: Any, **kwargs: Any
) -> Any:
    type_future = rref._get_type(timeout=timeout, blocking=False)
    if type_future.done():
        return _call(rref, mode, name, timeout, args, kwargs, type_future.value())
    rref._table.refuse_if_forked()
    if mode != "async":
        return _call(rref, mode, name, timeout, args, kwargs, type_future.wait())
    result: CallFuture[Any] = CallFuture()
    what = f"{_describe((None, name))} of worker {rref.owner_name()!r}"

    def finish(future: torch.futures.Future[Any]) -> None:
        try:
            result.set_result(future.value())
        except Exception as error:  # noqa: BLE001 - raised by the future
            result.fail(error, what)

    def start(future: torch.futures.Future[Any]) -> None:
        try:
            call = _call(rref, mode, name, timeout, args, kwargs, future.value())
        except Exception as error:  # noqa: BLE001 - raised by the future
            result.fail(error, what)
        else:
            call.add_done_callback(finish)

    # Another call may have fetched the type, in another autograd context.
    type_future.add_done_callback(rref._table.remote.bound_here(start))
    return result


def _call(
    rref: RRef[Any],
    mode: str,
    name: str,
    timeout: float,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    value_type: type,
) -> Any:
    function: Callable[..., Any] = call_owned
    is_scripted = issubclass(value_type, (torch.jit.ScriptModule, torch._C.ScriptModule))
    if not is_scripted:
        try:
            method = getattr(value_type, name)
        except AttributeError:
            raise no_method(value_type.__name__, name, rref.owner_name()) from None
        if hasattr(method, ASYNC_MARK):
            function = call_owned_async
    call_args = (rref.rref_id, name, args, kwargs)
    try:
        result = rref._table.remote.call(mode, rref._owner_id, function, call_args, {}, timeout)
    except SerializationError as error:
        raise in_words_of_caller(error, _PLACES) from error.__cause__
    if mode == "async":
        result.add_done_callback(lambda _: rref)  # keeps the fork until the call is over
    elif mode == "remote":
        # Keeps the fork until the owner has found the value, and so has answered.
        result._get_future().add_done_callback(lambda _: rref)
    return result


# --- At the owner --------------------------------------------------------------------------------


def call_owned(
    owned: RRefId | OwnerEntry, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a method of a value that this worker owns."""
    entry = current_table().entry(owned) if isinstance(owned, tuple) else owned
    return getattr(entry.wait(), name)(*args, **kwargs)


def call_owned_async(
    owned: RRefId | OwnerEntry, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The same for a method that returns a future of its result."""
    return call_owned(owned, name, args, kwargs)


def _describe(args: Sequence[Any]) -> str:
    return f"the call of method {args[1]!r} of a remote value"


for _method in (call_owned, call_owned_async):
    described_by_arguments(_method, _describe)


def _rref_typeof_on_owner(rref_id: RRefId) -> torch.futures.Future[type]:
    """The type of a value that this worker owns, once the value is made."""
    result: torch.futures.Future[type] = torch.futures.Future()

    def finish(entry: OwnerEntry) -> None:
        try:
            result.set_result(type(entry.result()))
        except Exception as error:  # noqa: BLE001 - raised by the future
            fail(result, error)

    current_table().entry(rref_id).add_done_callback(finish)
    return result


type_of_owned = _rref_typeof_on_owner  # torch's profiler suites look for that name

for _function in (call_owned_async, _rref_typeof_on_owner):
    setattr(_function, ASYNC_MARK, _function)
