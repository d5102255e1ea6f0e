"""What a function did, on its way back: its result, or its exception with the remote traceback.

**At the caller** an exception is raised again with its own type, arguments and attributes, if it
can be packed there and rebuilt here; its cause is a `RemoteError` with the remote traceback as
text. Otherwise the `RemoteError` itself is raised. An exception's own methods may raise anything,
often because a message needs an attribute that is missing. The caller learns of the failure all the
same.

**Exceptions that are kept**, in a future or in place of a value, would keep everything that they
have passed through: raising one records every frame on the way, and a frame keeps its local
variables: tensors, the future that was waited for. A future would keep them forever: torch's
futures are C++ objects, and the garbage collector cannot see the cycle. So each use raises a copy,
and what is kept has no frames, only the text of where it was raised.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.futures import Future

from telegrad.drop_in import torch_phrase
from telegrad.errors import NotAllowed, RemoteError, SerializationError, TelegradError
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.wire.codec import Codec, Encoded
from telegrad.wire.frames import Kind

__all__ = [
    "Failure",
    "again",
    "as_exception",
    "describe_call",
    "describe_function",
    "describe_message",
    "described_by_arguments",
    "fail",
    "is_described_by_arguments",
    "pack_failure",
    "rebuild_failure",
    "take_origin",
    "text_of",
    "timeout_text",
    "traceback_of",
    "type_name_of",
    "without_frames",
]

_ORIGIN = "__telegrad_origin__"
_SHORT = 2000  # characters that are sent of an exception that is too large
_E = TypeVar("_E", bound=BaseException)


# -- exceptions on their way back


class Failure(NamedTuple):
    """What is sent for an exception. `packed` is the exception itself, or None."""

    worker: str
    worker_id: int
    type_name: str
    text: str
    traceback: str
    packed: bytes | None


def pack_failure(codec: Codec, error: BaseException, worker: WorkerInfo) -> Encoded:
    """Packs an exception; succeeds even if its methods raise."""
    try:
        return _packed(codec, error, worker)
    except BaseException as another:  # noqa: BLE001 - a program's exception may do anything
        why = f"<it cannot be described: {type(another).__name__}>"
        return codec.encode(Failure(worker.name, worker.id, type_name_of(error), why, "", None))


def _packed(codec: Codec, error: BaseException, worker: WorkerInfo) -> Encoded:
    frames = take_origin(error) + traceback_of(error)
    text = text_of(error)
    # Packed twice: if the caller cannot rebuild it, only its type is lost.
    packed: bytes | None = None
    try:
        # TorchScript's error is not a RuntimeError and holds only a text. Programs that catch
        # RuntimeError around their calls are better served by a RemoteError.
        if not isinstance(error, torch.jit.Error):
            encoded = codec.encode(error)  # causes and notes are in the text already
            packed = None if encoded.buffers else encoded.payload
    except BaseException:  # noqa: BLE001 - an exception may hold anything: send its text only
        packed = None
    failure = Failure(worker.name, worker.id, type_name_of(error), text, frames, packed)
    try:
        return codec.encode(failure)
    except SerializationError:  # it is too large
        short = failure._replace(text=text[:_SHORT], traceback=frames[-_SHORT:], packed=None)
        return codec.encode(short)


def rebuild_failure(codec: Codec, failure: Failure) -> BaseException:
    """The exception to raise at the caller."""
    hint = ""
    if failure.type_name == "SystemExit":
        hint = " (sys.exit in a called function does not end the worker)"
    remote = RemoteError(
        f"on worker {failure.worker!r}: {failure.type_name}: {failure.text}{hint}\n\n"
        f"Original exception on remote side was:\n{failure.traceback}",
        worker=failure.worker,
        traceback=failure.traceback,
    )
    if failure.packed is None:
        return remote
    try:
        error = codec.decode(failure.packed, [])
    except (SerializationError, NotAllowed):
        return remote
    if not isinstance(error, Exception):
        return remote  # a SystemExit there must not end this process
    if isinstance(error, SerializationError):  # of the arguments or the result, over there
        error.args = (f"on worker {failure.worker!r}: {error}",)
    error.__cause__ = remote
    return error


def as_exception(error: BaseException) -> Exception:
    """What ended a function, as an exception that a future can hold."""
    try:
        if issubclass(error.__class__, Exception):
            return error  # type: ignore[return-value]
    except BaseException:  # noqa: BLE001 - a program's exception may do anything
        return TelegradError(
            f"the function raised {type_name_of(error)}, which cannot be looked at"
        )
    return TelegradError(f"the function ended by {type(error).__name__}: {text_of(error)}")


# -- exceptions that are kept


def fail(future: Future[Any], error: BaseException) -> None:
    """Like `future.set_exception`, without keeping the exception's frames."""
    future._set_unwrap_func(_raise_again)
    future.set_result(without_frames(error))


def _raise_again(error: BaseException) -> None:
    raise again(error)


def again(error: _E) -> _E:
    """A copy of the exception, to be raised."""
    try:
        new = copy.copy(error)
    except BaseException:  # noqa: BLE001 - its constructor takes other arguments than it keeps
        new = error
    if type(new) is not type(error) or new is error:
        new = type(error).__new__(type(error), *error.args)
        new.__dict__.update(error.__dict__)
    new.__cause__, new.__context__ = error.__cause__, error.__context__
    new.__suppress_context__ = error.__suppress_context__
    return new.with_traceback(None)


def without_frames(error: _E) -> _E:
    """The exception itself, after removing the frames from it and from its causes."""
    if error.__traceback__ is not None:
        error.__dict__.setdefault(_ORIGIN, traceback_of(error))
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        each = todo.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            todo += (each.__cause__, each.__context__)
            each.__traceback__ = None
    return error


def take_origin(error: BaseException) -> str:
    """The text of where a kept exception was raised; empty if `error` was not kept."""
    origin: str = error.__dict__.pop(_ORIGIN, "")
    return origin


# -- texts


def timeout_text(worker: str, what: str, seconds: float, *, was_sent: bool = True) -> str:
    """The text of an `RpcTimeout`.

    Args:
        what: was asked of the worker: "the call of module.function".
        was_sent: whether the worker may have started it.
    """
    if was_sent:
        text = f"{worker} did not answer {what} within {seconds:g} s; it may still be running there"
    else:
        text = f"{what} could not be sent to {worker} within {seconds:g} s"
    phrase = f"RPC ran for more than set timeout ({seconds * 1000:.0f} ms)"
    return f"{text} (timeout=, or RpcOptions.rpc_timeout, sets the limit)" + torch_phrase(phrase)


def type_name_of(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")


def text_of(error: BaseException) -> str:
    """Its message."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - it may raise anything
        return "<its message could not be made>"


def traceback_of(error: BaseException) -> str:
    """Where it was raised, as Python shows it."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001 - it may raise anything
        where = "".join(traceback.format_tb(error.__traceback__))
        return f"Traceback (most recent call last):\n{where}{type_name_of(error)}\n"


_PURPOSES = (  # by how the kind's name begins
    ("RREF_FETCH", "RRef.to_here()"),
    ("RREF_", "the bookkeeping of references"),
    ("GRADIENTS", "a backward pass"),
    ("PASS_", "a backward pass"),
    ("PLAIN_GRADIENTS", "a backward pass"),
    ("PLAIN_", "the release of what plain calls have left"),
    ("CONTEXT_", "the release of an autograd context"),
    ("GATHER", "a meeting of all workers"),
    ("MEMBERS", "an exchange about who is in the group"),
)

_described: dict[int, Callable[[Sequence[Any]], str]] = {}


def described_by_arguments(func: object, describe: Callable[[Sequence[Any]], str]) -> None:
    """Makes error texts name a function, which must live forever, by the arguments of its call."""
    _described[id(func)] = describe


def is_described_by_arguments(func: object) -> bool:
    return id(func) in _described


def describe_call(func: object, args: Sequence[Any]) -> str:
    """A call, in error texts."""
    if id(func) in _described:
        return _described[id(func)](args)
    return f"the call of {describe_function(func)}"


def describe_message(kind: Kind) -> str:
    """What workers do when they send such a message, in error texts."""
    purposes = (purpose for start, purpose in _PURPOSES if kind.name.startswith(start))
    return next(purposes, f"an exchange of {kind.name} messages")


def describe_function(func: object) -> str:
    """A function's name, in error texts."""
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None)
    if name is None:
        return repr(func)
    name = str(name).removeprefix("_VariableFunctionsClass.")  # of torch.add and its like
    module = getattr(func, "__module__", None)
    return f"{module}.{name}" if module else name
