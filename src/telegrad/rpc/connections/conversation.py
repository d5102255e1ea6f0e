"""A post whose sender waits for what comes back.

Often the handler of a post answers by posting to the sender: gradients go to a worker, which runs
its part of the backward pass and sends gradients back. Two one-way messages then cost two receipts,
and two thread wake-ups at the first sender: of the thread that gets the second message, and of the
one that has been waiting for it. In a conversation the sender waits on the lane itself, and what
the handler posts to it until it is done travels in the receipt.

The handler's side may end the conversation early, before it turns to something that has nothing to
do with it: what it posts afterwards travels by itself. Large tensors always do.

The sender's wait ends by the receipt, by the loss of the peer, or by an `Interruption`; then the
receipt is read by another thread, so nothing that it carries is lost.
"""

from __future__ import annotations

import io
import os
import select
import struct
import threading
from collections.abc import Callable

from telegrad.errors import WorkerLost
from telegrad.transport.base import ConnectionClosed, TransportTimeout
from telegrad.wire.codec import Encoded
from telegrad.wire.frames import Frame, Kind, kind_of

__all__ = ["Conversation", "Interruption", "messages_in"]

_PIECE = struct.Struct("<BI")


class Interruption:
    """Lets another thread end a wait on a descriptor. Costs nothing until somebody really waits."""

    __slots__ = ("_descriptors", "_is_interrupted", "_lock", "_pollers")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards what follows: a closed descriptor's number may be
        # Somebody else's; there is one at most. A file object closes it also if Ctrl-C loses it.
        self._descriptors: list[io.FileIO] = []
        self._is_interrupted = False
        self._pollers: dict[int, select.poll] = {}  # a pass mostly waits on the same few lanes

    def interrupt(self) -> None:
        with self._lock:
            self._is_interrupted = True
            for file in self._descriptors:
                os.eventfd_write(file.fileno(), 1)

    def wait_for(self, descriptor: int) -> bool:
        """Waits until `descriptor` can be read or has ended; False if interrupted before."""
        poller = self._pollers.get(descriptor)
        if poller is None:
            poller = self._pollers[descriptor] = select.poll()
            poller.register(descriptor, select.POLLIN)
            with self._lock:
                if not self._descriptors:
                    # Made and noted in one step: Ctrl-C in between would lose it.
                    start, flags = int(self._is_interrupted), os.EFD_NONBLOCK | os.EFD_CLOEXEC
                    descriptors = map(os.eventfd, (start,), (flags,))
                    self._descriptors.extend(map(io.FileIO, descriptors))
            poller.register(self._descriptors[0].fileno(), select.POLLIN)
        return any(ready == descriptor for ready, _ in poller.poll())

    def close(self) -> None:
        if not self._pollers:
            return  # nobody has waited
        with self._lock:
            for file in self._descriptors:
                file.close()
            self._descriptors.clear()


class Conversation:
    """The handler's side: collects what is posted to the one who waits.

    Args:
        send: answers on the lane.
        post: how a message that cannot go that way travels.
    """

    def __init__(
        self,
        source: int,
        frame: Frame,
        send: Callable[..., None],
        post: Callable[[Kind, bytes], None],
    ) -> None:
        self.source = source
        self._call_id = frame.call_id
        self._send = send
        self._post = post
        self._pieces: list[tuple[Kind, bytes]] = []
        self._is_over = False

    def take(self, kind: Kind, encoded: Encoded) -> bool:
        """Takes a message along, if it can."""
        if self._is_over or encoded.buffers:
            return False
        self._pieces.append((kind, encoded.payload))
        return True

    def end(self) -> None:
        """Sends the receipt; nothing is taken along from now on."""
        if self._is_over:
            return
        self._is_over = True
        body: list[bytes] = []
        for kind, payload in self._pieces:
            body += (_PIECE.pack(kind, len(payload)), payload)
        try:
            self._send(Kind.RECEIPT, 0, self._call_id, -1, -1, body)
        except (ConnectionClosed, TransportTimeout):
            # The lane is broken, maybe the worker lives: its messages must not be lost with it.
            for kind, payload in self._pieces:
                try:
                    self._post(kind, payload)
                except WorkerLost:
                    return  # told to all who watch


def messages_in(receipt: Frame) -> list[tuple[Kind, memoryview]]:
    """What a receipt has brought along."""
    body = memoryview(receipt.body)
    messages: list[tuple[Kind, memoryview]] = []
    position = 0
    while position < len(body):
        kind, length = _PIECE.unpack_from(body, position)
        position += _PIECE.size
        messages.append((kind_of(kind), body[position : position + length]))
        position += length
    return messages
