"""References in messages: the one place that states how they are counted.

A reference that is packed into a message is one fork, which its owner or its parent counts from
then on. **Each such fork ends in exactly one way:**

=====================  ============================================================================
what becomes of it     what ends it
=====================  ============================================================================
received               `RRefTable.rebuild` makes a reference of it; that reference's end ends it.
                       A reply is unpacked even if its call was given up (`Agent.drop_late_reply`)
unreadable             something else in the message cannot be unpacked: `ReferenceCodec` finds the
                       references in its bytes, and lets them end at once
not packed             something after it cannot be packed: `ReferenceCodec` abandons it
not sent               `PackedReferences.abandon`, by the sender: for requests
                       `Agent.take_back_after`, for replies `Service.answer`
dropped before it was  Ctrl-C ended the call between packing and sending. No handler of exceptions
sent                   covers every instruction between them, but the message is dropped: a `Watch`
                       notes that for the housekeeper, which abandons the reference
sent and not read      Ctrl-C ended the call before it read its reply: it sends UNREAD, and the
                       callee abandons what the reply held (`rpc.sent_references`)
lost                   its receiver is lost: the protocol strikes off all forks of that worker
=====================  ============================================================================

To abandon a fork twice, or to unpack a message twice, changes nothing.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from telegrad.ids import ForkId, RRefId
from telegrad.rpc.references.rref import RRef, rebuild_rref
from telegrad.wire.codec import Codec, Encoded, Reducer
from telegrad.wire.unsendable import arguments_in

if TYPE_CHECKING:
    from telegrad.rpc.references.table import RRefTable

__all__ = ["Made", "PackedReferences", "ReferenceCodec", "Watch"]

_log = logging.getLogger("telegrad.rpc")

Made = tuple[RRefId, ForkId]
"""A packed reference, by its value and its own id."""


class Watch(weakref.ref[Any]):
    """Tells that a message with references is gone, and which references they were."""

    __slots__ = ("made",)

    made: list[Made]


class PackedReferences:
    """The references in one message, until it is sent.

    Its watch is a weak reference whose callback is the `put` of the housekeeper's queue: C code,
    which no signal interrupts.
    """

    __slots__ = ("__weakref__", "_table", "_watch", "made")

    def __init__(self, table: RRefTable) -> None:
        self.made: list[Made] = []
        self._table = table
        self._watch: Watch | None = Watch(self, table.housekeeper.note)
        self._watch.made = self.made
        table.housekeeper.unsent.add(self._watch)

    def leave(self) -> None:
        """The message is about to be sent; from now on its sender calls `abandon` if that fails."""
        watch = self._watch
        if watch is not None:
            self._table.housekeeper.unsent.discard(watch)
            self._watch = None

    def abandon(self) -> None:
        """The message will not be unpacked."""
        self._table.abandon(self.made)
        self.leave()


class ReferenceCodec(Codec):
    """The codec of a worker, which counts the references in messages."""

    table: RRefTable

    def __init__(self, reducers: Mapping[type, Reducer]) -> None:
        super().__init__({RRef: self._reduce, **reducers})
        self._thread = threading.local()

    def _reduce(self, rref: RRef[Any], destination: int) -> Any:
        return self.table.reduce(rref, destination, self.packed)

    @property
    def packed(self) -> PackedReferences:
        """The references packed so far in the message that this thread packs."""
        ours = self._thread.__dict__
        packed: PackedReferences | None = ours.get("packed")
        if packed is None:
            packed = ours["packed"] = PackedReferences(self.table)
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
        # Not None if a destructor makes a call while this thread packs another message.
        interrupted = ours.pop("packed", None)
        try:
            encoded = super()._encode_any(value, destination, root, labels, apart=apart)
            if "packed" in ours:
                encoded.references = ours["packed"]
                if labels is None:  # not a call's arguments: its sender does not call `leave`
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
                rebuild_rref(*arguments)  # and drops it at once
            except Exception as error:  # noqa: BLE001 - the message is damaged, which is raised
                _log.debug("a reference could not be unpacked: %s", error)
