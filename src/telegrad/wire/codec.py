"""Values to bytes and back, with the memory of large tensors beside the bytes.

The C pickler packs a value. Its tensors go into a table in front of the stream, and the memory of
large ones travels beside the payload as raw buffers, uncopied. A value without tensors is a bare
pickle. The most frequent values take a short cut: one small tensor, small tensors and simple values
as a call's arguments, small gradients, bytes. The first byte of a payload says which of these it
is.

The stream is trusted, because peers have proved the cluster's secret and may run any function
anyway, unless there is an allow-list (`allowed`). The table is not: every number in it is checked,
because a wrong one would read or write memory outside the message.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from telegrad.errors import NotAllowed, ProtocolError, SerializationError, TelegradError
from telegrad.wire.allowed.allow_list import AllowList, loads_data
from telegrad.wire.frames import Limits
from telegrad.wire.pickling import Reducer, ValuePickler
from telegrad.wire.tensor_table.layout import MAGIC
from telegrad.wire.tensor_table.pack import pack
from telegrad.wire.tensor_table.small import pack_small, unpack_small
from telegrad.wire.tensor_table.unpack import Attach, end_of_table, give_grad, unpack
from telegrad.wire.unsendable import describe_type, locate, missing_global

__all__ = ["Codec", "Encoded", "Packet", "Reducer", "References", "head_of_packet"]

_loads = pickle.loads
_dumps = pickle.dumps
# A pickler's memo keeps its largest size, and clearing it touches all of it. So a pickler that had
# a large value is dropped.
_POOLED_BYTES = 64 * 1024

# The first byte of a payload; that of a bare pickle is 0x80, that of a table and a pickle is MAGIC.
_PICKLE = 0x80
_SMALL = 0x53  # "S": a table of small tensors and a pickle
_TENSOR = 0x56  # "V": a table of one small tensor, which is the value
_ARGUMENTS = 0x41  # "A": a table of small tensors, which are a call's arguments
_MIXED = 0x4D  # "M": the same, and a pickle of the simple values between them
_LIST = 0x4C  # "L": a table of small tensors; the value is the list of these
_BYTES = 0x42  # "B": the value, which is bytes
_PACKET = 0x50  # "P": the length of a packet's head, the head, and the payload of its tensors

_SMALL_TABLES = (_SMALL, _TENSOR, _ARGUMENTS, _MIXED, _LIST)
_SMALL_TAG, _TENSOR_TAG, _ARGUMENTS_TAG, _MIXED_TAG, _LIST_TAG, _BYTES_TAG = (
    bytes([tag]) for tag in (_SMALL, _TENSOR, _ARGUMENTS, _MIXED, _LIST, _BYTES)
)
_PACKET_START = struct.Struct("<BI")  # tag, length of the head
_SIMPLE = frozenset((Tensor, int, float, bool, str, bytes, type(None)))


class References(Protocol):
    """The references in a message, which end if the message is not delivered."""

    def leave(self) -> None:
        """Call it when the message is about to be sent; then call `abandon` if that fails."""

    def abandon(self) -> None:
        """Call it when the message will not be unpacked."""


@dataclass(slots=True)
class Encoded:
    """An encoded value.

    Attributes:
        payload: tensor table and pickle stream.
        buffers: the bytes of each large span of tensor memory, in the table's order. They are the
            sender's memory itself, and keep it alive: send them before the tensors change.
        tensors: the tensors in the value that require grad, in the table's order: the originals,
            with their history.
        references: those in the value, if any.
    """

    payload: bytes
    buffers: list[memoryview]
    tensors: list[Tensor]
    references: References | None = None


@dataclass(slots=True)
class Packet:
    """A message of tensors behind a head of bytes: gradients travel in it.

    Tensors that require grad arrive as leaves. Tensors that share memory arrive as separate ones,
    because a program may change the gradient of one leaf in place and must not change another's.
    """

    head: bytes | memoryview
    tensors: list[Tensor]


class Codec:
    """Encodes and decodes values; safe to use from many threads.

    Args:
        reducers: how to reduce objects of further types and their subclasses. Each is called with
            the object and the id of the worker it goes to, and returns what `__reduce__` would.

    >>> codec = Codec()
    >>> message = codec.encode(([1, 2], {"a": torch.ones(2)}))
    >>> codec.decode(message.payload, message.buffers)
    ([1, 2], {'a': tensor([1., 1.])})
    """

    def __init__(self, reducers: Mapping[type, Reducer] | None = None) -> None:
        self.limits = Limits()
        """What the readers of its messages accept: larger values are not encoded."""
        self.allowed: AllowList | None = None
        """If set, decoding builds only what it allows."""
        self._reducers = dict(reducers or {})
        self._handlers: dict[type, Any] = {}
        self._idle: list[ValuePickler] = []

    def register(self, cls: type, reducer: Reducer) -> None:
        """Adds a reducer for values that are encoded from now on."""
        self._reducers[cls] = reducer
        self._handlers.clear()

    def encode(
        self,
        value: object,
        destination: int = -1,
        *,
        root: str = "value",
        labels: Sequence[str] | None = None,
    ) -> Encoded:
        """Encode `value` for the worker `destination`.

        Args:
            root: what error messages call the value.
            labels: what they call its items, if it is a tuple of a call: ``("args", "kwargs")``.

        Raises:
            SerializationError: something in the value cannot be sent; `path` says where. Or the
                value is larger than the limits allow.
        """
        kind = type(value)
        encoded: Encoded | None = None
        if kind is Tensor:
            encoded = _only_small(_TENSOR_TAG, (value,))
        elif kind is tuple and labels is not None:
            args, kwargs = value[0], value[-1]  # type: ignore[index]
            if (
                kwargs is None
                and type(args) is tuple
                and args
                and _SIMPLE.issuperset(map(type, args))
            ):
                encoded = _simple_arguments(args)
        elif kind is bytes:
            encoded = Encoded(_BYTES_TAG + value, [], [])  # type: ignore[operator]
        elif kind is Packet:
            root = "gradients"
            encoded = self._encode_packet(value, destination)  # type: ignore[arg-type]
        if encoded is None:
            encoded = self._encode_any(value, destination, root, labels)
        if encoded.buffers or len(encoded.payload) > self.limits.max_body:
            self._check_size(encoded, root if labels is None else "arguments")
        return encoded

    def _encode_packet(self, packet: Packet, destination: int) -> Encoded:
        head, tensors = packet.head, packet.tensors
        encoded = _only_small(_LIST_TAG, tensors, may_overlap=True)
        if encoded is None:
            encoded = self._encode_any(tensors, destination, "gradients", None, apart=True)
        start = _PACKET_START.pack(_PACKET, len(head))
        encoded.payload = b"".join((start, head, encoded.payload))
        return encoded

    def _encode_any(
        self,
        value: object,
        destination: int,
        root: str,
        labels: Sequence[str] | None,
        *,
        apart: bool = False,
    ) -> Encoded:
        # A pickler in use is in no list, so neither threads nor reducers that encode share one.
        try:
            pickler = self._idle.pop()
        except IndexError:
            pickler = ValuePickler(self._handlers, self._reducers)
        pickler.destination = destination
        try:
            pickler.dump(value)
            encoded = _assembled(pickler, apart)
        except Exception as error:
            explained = self._explain(value, error, root, labels)
            if explained is error:
                raise
            raise explained from error
        if len(encoded.payload) < _POOLED_BYTES:
            pickler.reset()
            self._idle.append(pickler)
        return encoded

    def _check_size(self, encoded: Encoded, root: str) -> None:
        limits = self.limits
        for name, size, limit in (
            ("max_body", len(encoded.payload), limits.max_body),
            ("max_buffers", len(encoded.buffers), limits.max_buffers),
            ("max_message", sum(b.nbytes for b in encoded.buffers), limits.max_message),
        ):
            if size > limit:
                verb = "are" if root.endswith("s") else "is"
                amounts = [
                    f"{count} large tensors" if name == "max_buffers" else _amount(count)
                    for count in (size, limit)
                ]
                raise SerializationError(
                    f"the {root} {verb} too large to send: {amounts[0]}, and the limit is "
                    f"{amounts[1]} (Limits.{name}). Send less at a time, or raise "
                    "RpcOptions(limits=...) on all workers"
                )

    def decode(
        self,
        payload: bytes | bytearray | memoryview,
        buffers: Sequence[Any] = (),
        attach: Attach | None = None,
    ) -> Any:
        """Rebuild a value. Its tensors use the memory of `buffers`, and keep it alive.

        Args:
            buffers: writable objects with the buffer protocol, each owning its memory.
            attach: called with the tensors that required grad on the sender, if any. They do not
                require it yet; it returns the tensors that take their places. Without it they
                become leaves.

        Raises:
            ProtocolError: the tensor table is damaged.
            SerializationError: the value cannot be rebuilt in this process.
        """
        if not len(payload):
            raise SerializationError("an empty payload cannot be decoded")
        tag = payload[0]
        view = memoryview(payload)
        if tag in _SMALL_TABLES:
            entries, need_grad, position = unpack_small(view, 1)
            if need_grad:
                give_grad(entries, need_grad, attach)
            if tag == _SMALL:
                return self._load(view[position:], entries)
            if tag == _MIXED:
                return self._mixed(view[position:], entries), None
            if position != len(view):
                raise ProtocolError("damaged message: it is longer than its tensors")
            if tag == _ARGUMENTS:
                return tuple(entries), None
            if tag == _LIST:
                return entries
            if len(entries) != 1:
                raise ProtocolError("damaged message: it holds several tensors instead of one")
            return entries[0]
        if tag == MAGIC:
            try:
                entries, position = unpack(view, buffers, attach)
            except SerializationError:
                self._not_decoded(view[end_of_table(view) :])
                raise
            return self._load(view[position:], entries)
        if tag == _PACKET:
            head = head_of_packet(view)
            tensors = self.decode(view[_PACKET_START.size + len(head) :], buffers)
            if type(tensors) is not list or not all(isinstance(each, Tensor) for each in tensors):
                raise ProtocolError("damaged packet: it holds something else than tensors")
            return Packet(head, tensors)
        if tag == _BYTES:
            return bytes(view[1:])
        return self._load(payload, ())

    def _load(self, stream: bytes | bytearray | memoryview, entries: Sequence[Any]) -> Any:
        try:
            if self.allowed is not None:
                return self.allowed.loads(stream, buffers=entries)
            return _loads(stream, buffers=entries)
        except NotAllowed:
            self._not_decoded(stream)
            raise
        except (TelegradError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a module that exits when it is imported, say
            self._not_decoded(stream)
            raise _decoding_error(stream, error) from error

    def _mixed(self, stream: memoryview, tensors: list[Tensor]) -> tuple[Any, ...]:
        """The arguments of a call: the tensors, and the others in the stream."""
        try:
            rest = _loads(stream) if self.allowed is None else loads_data(stream)
            given = iter(tensors)
            args = tuple([next(given) if arg is None else arg[0] for arg in rest])
        except Exception as error:
            raise ProtocolError(f"damaged arguments: {error!r}") from error
        if next(given, None) is not None:
            raise ProtocolError("damaged arguments: there are more tensors than places")
        return args

    def discard(self, payload: bytes | memoryview) -> None:
        """Ends the references in a value that will not be decoded."""
        tag = payload[0] if len(payload) else 0
        view = memoryview(payload)
        if tag == MAGIC:
            self._not_decoded(view[end_of_table(view) :])
        elif tag == _SMALL:
            self._not_decoded(view[unpack_small(view, 1)[2] :])
        elif tag == _PICKLE:
            self._not_decoded(view)

    def _not_decoded(self, stream: bytes | bytearray | memoryview) -> None:
        """Called with a pickle that was not loaded, or only in part."""

    def _explain(
        self, value: Any, error: Exception, root: str, labels: Sequence[str] | None
    ) -> Exception:
        if isinstance(error, TelegradError) and not isinstance(error, SerializationError):
            return error
        if isinstance(error, RecursionError):
            return SerializationError(f"{root} is nested too deeply to be sent", path=root)
        path, part, cause = locate(value, self._failure, root, labels)
        reason = str(cause or error) or type(error).__name__
        return SerializationError(
            f"{path} ({describe_type(part)}) cannot be sent: {reason}", path=path
        )

    def _failure(self, value: Any) -> Exception | None:
        pickler = ValuePickler({}, self._reducers)
        pickler.probing = True
        try:
            pickler.dump(value)
            pack(pickler.entries(), pickler.originals)
        except Exception as error:  # noqa: BLE001 - any failure is the answer
            return error
        return None


def _only_small(
    tag: bytes, tensors: Sequence[object], *, may_overlap: bool = False
) -> Encoded | None:
    """A value that is made of small tensors only; None if they do not fit into a small table."""
    small = pack_small(tensors, may_overlap=may_overlap)
    return None if small is None else Encoded(tag + small[0], [], small[1])


def _simple_arguments(args: tuple[Any, ...]) -> Encoded | None:
    """Small tensors and simple values as a call's arguments; None if they do not fit."""
    tensors = [arg for arg in args if type(arg) is Tensor]
    small = pack_small(tensors)
    if small is None:
        return None
    if len(tensors) == len(args):
        return Encoded(_ARGUMENTS_TAG + small[0], [], small[1])
    # A `ValuePickler` is slower, and has nothing to do for these.
    rest = _dumps([None if type(arg) is Tensor else (arg,) for arg in args], 5)
    return Encoded(b"".join((_MIXED_TAG, small[0], rest)), [], small[1])


def _assembled(pickler: ValuePickler, apart: bool) -> Encoded:
    """The pickler's output, behind the table of its tensors."""
    chunks = pickler.chunks
    if not pickler.marked:
        payload = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        return Encoded(payload, [], [])
    entries = pickler.entries()
    small = None if pickler.originals else pack_small(entries)
    if small is not None:
        return Encoded(b"".join((_SMALL_TAG, small[0], *chunks)), [], small[1])
    table = pack(entries, pickler.originals, apart=apart)
    return Encoded(b"".join(table.pieces + chunks), table.buffers, table.tensors)


def head_of_packet(payload: bytes | memoryview) -> memoryview:
    """The head of an encoded packet, even if its tensors are damaged.

    Raises:
        ProtocolError: the payload is too short to have one.
    """
    view = memoryview(payload)
    if len(view) < _PACKET_START.size:
        raise ProtocolError("damaged packet: it is shorter than its head")
    _, length = _PACKET_START.unpack_from(view)
    end = _PACKET_START.size + length
    if end > len(view):
        raise ProtocolError("damaged packet: its head is longer than the message")
    return view[_PACKET_START.size : end]


def _amount(nbytes: int) -> str:
    """A number of bytes, in a readable unit."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} bytes"


def _decoding_error(
    stream: bytes | bytearray | memoryview, error: BaseException
) -> SerializationError:
    if isinstance(error, ImportError | AttributeError):
        missing = missing_global(bytes(stream))
        if missing is not None:
            module, name, reason = missing
            return SerializationError(
                f"the value needs {name!r} of module {module!r}, which the receiving worker cannot "
                f"find ({reason}). Make the module importable there, in the same version as on the "
                "sender, and define the function or class at its top level (not under "
                '"if rank == 0" or in a notebook cell)'
            )
    return SerializationError(
        f"the value could not be rebuilt on the receiving worker: {type(error).__name__}: {error}"
    )
