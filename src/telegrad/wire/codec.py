"""Values to bytes and back, with tensors beside the bytes.

A value is pickled by the C pickler; its tensors go into a table in front of the stream, and their
memory, where it is large, beside the payload as raw buffers: never through pickle, never copied on
this side. A value without tensors is a bare pickle. What most calls of a training step consist of
needs no pickle at all: small tensors as the arguments, a small tensor as the result, gradients.
The first byte of a payload says which of these it is.

What is trusted: the stream, since peers have proved the cluster's secret and may run any function
anyway, unless there is an allow-list (`allowed`). What is not: the table, whose every number is
checked, because a mistake in it would be memory that is not ours instead of an exception.
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
from telegrad.wire.tensor_table.layout import MAGIC, is_plain
from telegrad.wire.tensor_table.pack import pack
from telegrad.wire.tensor_table.small import pack_small, unpack_small
from telegrad.wire.tensor_table.unpack import Attach, end_of_table, give_grad, unpack
from telegrad.wire.unsendable import describe_type, locate, missing_global

__all__ = ["Codec", "Encoded", "Packet", "Reducer", "References", "head_of_packet"]

_loads = pickle.loads
_dumps = pickle.dumps
# A pickler's memo keeps the size it grew to, and clearing it touches all of it: one that had a
# large value is not worth keeping.
_POOLED_BYTES = 64 * 1024

# The first byte of a payload; that of a bare pickle is 0x80, that of a table and a pickle is MAGIC.
_SMALL = 0x53  # "S": a table of small tensors and a pickle
_TENSOR = 0x56  # "V": such a table, of the one tensor that is the value
_ARGUMENTS = 0x41  # "A": such a table, of the tensors that are a call's only arguments
_MIXED = 0x4D  # "M": a call's only arguments: such a table, and a pickle of all that is no tensor
_BYTES = 0x42  # "B": bytes
_PLAIN_PACKET = 0x47  # "G": a packet's head and a table
_PICKLED_PACKET = 0x48  # "H": a packet's head and a value
_SMALL_PACKET = 0x49  # "I": a packet's head and a table of small tensors
_PACKETS = (_PLAIN_PACKET, _PICKLED_PACKET, _SMALL_PACKET)
_PICKLE = 0x80
_SMALL_TABLES = (_SMALL, _TENSOR, _ARGUMENTS, _MIXED)

_SMALL_TAG, _TENSOR_TAG, _ARGUMENTS_TAG, _MIXED_TAG, _BYTES_TAG = (
    bytes([tag]) for tag in (_SMALL, _TENSOR, _ARGUMENTS, _MIXED, _BYTES)
)
_PACKET = struct.Struct("<BI")  # kind, length of the head
_NO_ORIGINALS: dict[int, Tensor] = {}
_TENSORS_ONLY = frozenset((Tensor,))
_SIMPLE = frozenset((Tensor, int, float, bool, str, bytes, type(None)))


class References(Protocol):
    """What a message holds that ends if the message is not sent."""

    def leave(self) -> None:
        """The message is about to be sent; from now on its sender calls `abandon` if it fails."""

    def abandon(self) -> None:
        """The message will not be unpacked."""


@dataclass(slots=True)
class Encoded:
    """An encoded value.

    Attributes:
        payload: tensor table and pickle stream.
        buffers: the bytes of each large span of tensor memory, in the table's order. They are the
            sender's memory itself, and keep it alive: send them before the tensors are changed.
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
    """A message that says nothing but what its sender wrote into the head, and tensors.

    It is what gradients travel in: where all its tensors are plain it needs no pickle. What
    requires grad in it arrives as a leaf. Tensors that share memory arrive as separate ones: a
    program may change the gradient of one leaf in place, and means that leaf.
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
        """What the readers of its messages accept: anything larger is not encoded."""
        self.allowed: AllowList | None = None
        """What is decoded builds nothing else, if set."""
        self._reducers = dict(reducers or {})
        self._handlers: dict[type, Any] = {}
        self._idle: list[ValuePickler] = []

    def register(self, cls: type, reducer: Reducer) -> None:
        """Adds a reducer, for what is encoded from now on."""
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
            labels: what they call its items instead, if it is a tuple: ``("args", "kwargs")``.

        Raises:
            SerializationError: something in the value cannot be sent; `path` says where. Or it is
                larger than the limits allow.
        """
        if type(value) is Tensor:
            small = pack_small((value,))
            if small is not None:
                return self._packed(_TENSOR_TAG + small[0], small[1], root)
        elif type(value) is Packet:
            return self._encode_packet(value, destination)
        elif type(value) is bytes:
            return self._packed(_BYTES_TAG + value, [], root)
        return self._encode_any(value, destination, root, labels)

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
        if encoded.buffers or len(encoded.payload) > self.limits.max_body:
            self._check_size(encoded, root)
        return encoded

    def encode_arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None, destination: int = -1
    ) -> Encoded:
        """Encode the arguments of a call; they are decoded as a tuple of both.

        Raises:
            SerializationError
        """
        if not kwargs and args and type(args) is tuple:
            kinds = {*map(type, args)}
            if kinds == _TENSORS_ONLY:
                small = pack_small(args)
                if small is not None:
                    return self._packed(_ARGUMENTS_TAG + small[0], small[1], "args")
            elif kinds <= _SIMPLE:
                small = pack_small([arg for arg in args if type(arg) is Tensor])
                if small is not None:
                    # The pickler of all other values would find nothing to do in these.
                    rest = _dumps([None if type(arg) is Tensor else (arg,) for arg in args], 5)
                    return self._packed(b"".join((_MIXED_TAG, small[0], rest)), small[1], "args")
        return self.encode((args, kwargs or None), destination, labels=("args", "kwargs"))

    def _encode_packet(self, packet: Packet, destination: int) -> Encoded:
        head, tensors = packet.head, packet.tensors
        small = pack_small(tensors, may_overlap=True)
        if small is not None:
            start = _PACKET.pack(_SMALL_PACKET, len(head))
            return self._packed(b"".join((start, head, small[0])), small[1], "gradients")
        if all(map(is_plain, tensors)):
            start = _PACKET.pack(_PLAIN_PACKET, len(head))
            table = pack(tensors, _NO_ORIGINALS, apart=True)
            payload = b"".join((start, head, *table.pieces))
            encoded = Encoded(payload, table.buffers, table.tensors)
            self._check_size(encoded, "gradients")
            return encoded
        encoded = self._encode_any(tensors, destination, "gradients", None, apart=True)
        start = _PACKET.pack(_PICKLED_PACKET, len(head))
        encoded.payload = b"".join((start, head, encoded.payload))
        return encoded

    def _decode_packet(self, payload: memoryview, buffers: Sequence[Any]) -> Packet:
        head = head_of_packet(payload)
        start = _PACKET.size + len(head)
        if payload[0] == _SMALL_PACKET:
            values, need_grad, position = unpack_small(payload, start)
            if need_grad:
                give_grad(values, need_grad, None)
        elif payload[0] == _PICKLED_PACKET:
            return Packet(head, self.decode(payload[start:], buffers))
        else:
            values, position = unpack(payload[start:], buffers, None)
            position += start
            if not all(map(_is_tensor, values)):
                raise ProtocolError("damaged packet: something else than tensors is in it")
        if position != len(payload):
            raise ProtocolError("damaged packet: something else than tensors is in it")
        return Packet(head, values)

    def _packed(self, payload: bytes, tensors: list[Tensor], root: str) -> Encoded:
        """What needs nothing but a payload."""
        encoded = Encoded(payload, [], tensors)
        if len(payload) > self.limits.max_body:
            self._check_size(encoded, root)
        return encoded

    def _check_size(self, encoded: Encoded, root: str) -> None:
        limits = self.limits
        for name, size, limit in (
            ("max_body", len(encoded.payload), limits.max_body),
            ("max_buffers", len(encoded.buffers), limits.max_buffers),
            ("max_message", sum(b.nbytes for b in encoded.buffers), limits.max_message),
        ):
            if size > limit:
                what = {"args": "arguments are"}.get(root, f"{root} is")
                amounts = [
                    f"{count} large tensors" if name == "max_buffers" else _amount(count)
                    for count in (size, limit)
                ]
                raise SerializationError(
                    f"the {what} too large to send: {amounts[0]}, and the limit is {amounts[1]} "
                    f"(Limits.{name}). Send less at a time, or raise RpcOptions(limits=...) on all "
                    "workers"
                )

    def decode(
        self,
        payload: bytes | bytearray | memoryview,
        buffers: Sequence[Any] = (),
        attach: Attach | None = None,
    ) -> Any:
        """Rebuild a value. Its tensors alias `buffers`, and keep them alive.

        Args:
            buffers: writable objects with the buffer protocol, each owning its memory.
            attach: is given the tensors that required grad on the sender, which they do not yet,
                and returns those that are to stand in their places. Not called if there are none;
                without it they become leaves.

        Raises:
            ProtocolError: the tensor table is damaged.
            SerializationError: the value cannot be rebuilt in this process.
        """
        if not len(payload):
            raise SerializationError("an empty payload cannot be decoded")
        tag = payload[0]
        stream: bytes | bytearray | memoryview = payload
        entries: list[Any] = []
        if tag != _PICKLE:
            view = memoryview(payload)
            if tag in _SMALL_TABLES:
                entries, need_grad, position = unpack_small(view, 1)
                if need_grad:
                    if attach is not None and len(need_grad) == len(entries):
                        entries = list(attach(entries))
                    else:
                        give_grad(entries, need_grad, attach)
                if tag == _MIXED:
                    return self._mixed(view[position:], entries), None
                if tag != _SMALL:
                    if position != len(view):
                        raise ProtocolError("damaged message: it is longer than its tensors")
                    if tag == _ARGUMENTS:
                        return tuple(entries), None
                    if len(entries) != 1:
                        raise ProtocolError("damaged message: it is not one tensor")
                    return entries[0]
            elif tag == MAGIC:
                try:
                    entries, position = unpack(view, buffers, attach)
                except SerializationError:
                    self._not_decoded(view[end_of_table(view) :])
                    raise
            elif tag in _PACKETS:
                return self._decode_packet(view, buffers)
            elif tag == _BYTES:
                return bytes(view[1:])
            else:
                position = 0
            stream = view[position:]
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

    def discard(self, payload: bytes | memoryview) -> None:
        """A value is not going to be decoded: lets go of what it refers to."""
        tag = payload[0] if len(payload) else 0
        view = memoryview(payload)
        if tag == MAGIC:
            self._not_decoded(view[end_of_table(view) :])
        elif tag == _SMALL:
            self._not_decoded(view[unpack_small(view, 1)[2] :])
        elif tag == _PICKLE:
            self._not_decoded(view)

    def _mixed(self, stream: memoryview, tensors: list[Tensor]) -> tuple[Any, ...]:
        """The arguments of a call: all that are no tensors, and the tensors between them."""
        try:
            rest = _loads(stream) if self.allowed is None else loads_data(stream)
            given = iter(tensors)
            args = tuple([next(given) if arg is None else arg[0] for arg in rest])
        except Exception as error:
            raise ProtocolError(f"damaged arguments: {error!r}") from error
        if next(given, None) is not None:
            raise ProtocolError("damaged arguments: there are more tensors than places")
        return args

    def _not_decoded(self, stream: bytes | bytearray | memoryview) -> None:
        """A pickle could not be loaded, or only in part."""

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
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            return error
        return None


def _assembled(pickler: ValuePickler, apart: bool) -> Encoded:
    """What a pickler has written, with its tensors in front."""
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
    """The head of an encoded packet, whatever state its tensors are in.

    Raises:
        ProtocolError: the payload is too short to have one.
    """
    view = memoryview(payload)
    if len(view) < _PACKET.size:
        raise ProtocolError("damaged packet: it is shorter than its head")
    _, length = _PACKET.unpack_from(view)
    end = _PACKET.size + length
    if end > len(view):
        raise ProtocolError("damaged packet: its head is longer than the message")
    return view[_PACKET.size : end]


def _amount(nbytes: int) -> str:
    """Bytes as people say them, if there are many."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes} bytes"


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _decoding_error(
    stream: bytes | bytearray | memoryview, error: BaseException
) -> SerializationError:
    if isinstance(error, ImportError | AttributeError):
        missing = missing_global(bytes(stream))
        if missing is not None:
            module, name, reason = missing
            return SerializationError(
                f"the value needs {name!r} of module {module!r}, which the worker that unpacks it "
                f"cannot find ({reason}); make the module importable there, in the same version as "
                "on the sender, and define the function or class at its top level (not under "
                '"if rank == 0" or in a notebook cell)'
            )
    return SerializationError(
        f"the value could not be rebuilt where it was unpacked: {type(error).__name__}: {error}"
    )
