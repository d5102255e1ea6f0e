"""How what a function did travels back: its result, or its exception with the remote traceback.

An exception is raised again at the caller as what it was, with its own type, arguments and
attributes, where it can be packed there and rebuilt here; its cause is a `RemoteError` that holds
the remote traceback as text. Where it cannot, the `RemoteError` itself is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from telegrad.errors import NotAllowed, RemoteError, SerializationError, TelegradError
from telegrad.rpc.calls.error_texts import text_of, traceback_of, type_name_of
from telegrad.rpc.calls.kept_errors import take_origin
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.wire.codec import Codec, Encoded
from telegrad.wire.frames import Kind

__all__ = [
    "Failure",
    "as_exception",
    "describe_call",
    "describe_function",
    "describe_message",
    "described_by_arguments",
    "is_described_by_arguments",
    "pack_failure",
    "rebuild_failure",
]


_SHORT = 2000  # characters of an exception that is too large to be sent whole


class Failure(NamedTuple):
    """What travels for an exception. `packed` is the exception itself, or None."""

    worker: str
    worker_id: int
    type_name: str
    text: str
    traceback: str
    packed: bytes | None


def pack_failure(codec: Codec, error: BaseException, worker: WorkerInfo) -> Encoded:
    """Packs an exception, whatever that does when it is looked at."""
    try:
        return _packed(codec, error, worker)
    except BaseException as another:  # noqa: BLE001 - a program's exception may do anything
        why = f"<it cannot be described: {type(another).__name__}>"
        return codec.encode(Failure(worker.name, worker.id, type_name_of(error), why, "", None))


def _packed(codec: Codec, error: BaseException, worker: WorkerInfo) -> Encoded:
    frames = take_origin(error) + traceback_of(error)
    text = text_of(error)
    # Twice packed, so that failing to rebuild it there costs nothing but its type.
    packed: bytes | None = None
    try:
        # TorchScript's error is no RuntimeError, and nothing but a text: a RemoteError serves
        # programs better, which catch that around their calls.
        if not isinstance(error, torch.jit.Error):
            encoded = codec.encode(error)  # causes and notes are in the text already
            packed = None if encoded.buffers else encoded.payload
    except BaseException:  # noqa: BLE001 - an exception may hold anything: then its text must do
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
    """What ended a function, as something that a future can hold."""
    try:
        if issubclass(error.__class__, Exception):
            return error  # type: ignore[return-value]
    except BaseException:  # noqa: BLE001 - a program's exception may do anything
        return TelegradError(
            f"the function raised {type_name_of(error)}, which cannot be looked at"
        )
    return TelegradError(f"the function ended by {type(error).__name__}: {text_of(error)}")


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
    """Lets a function, which must live for ever, go by its arguments in messages."""
    _described[id(func)] = describe


def is_described_by_arguments(func: object) -> bool:
    return id(func) in _described


def describe_call(func: object, args: Sequence[Any]) -> str:
    """What a call is, for messages."""
    if id(func) in _described:
        return _described[id(func)](args)
    return f"the call of {describe_function(func)}"


def describe_message(kind: Kind) -> str:
    """What is going on when workers send such a message, for messages to people."""
    purposes = (purpose for start, purpose in _PURPOSES if kind.name.startswith(start))
    return next(purposes, f"an exchange of {kind.name} messages")


def describe_function(func: object) -> str:
    """A name for messages."""
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None)
    if name is None:
        return repr(func)
    name = str(name).removeprefix("_VariableFunctionsClass.")  # of torch.add and its like
    module = getattr(func, "__module__", None)
    return f"{module}.{name}" if module else name
