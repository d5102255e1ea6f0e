"""A post whose sender waits for what the handler posts back.

Gradients go to a worker, which runs its part of the backward pass and posts gradients back. As two
separate posts that costs two receipts and two thread wake-ups at the first sender. In a
conversation the sender waits on the lane itself, and what the handler posts to it travels in the
receipt.

The handler may end the conversation early; what it posts afterwards travels separately, as large
tensors always do.

The sender's wait ends with the receipt, with the loss of the peer, or with an `Interruption`. In
that case another thread reads the receipt, so nothing in it is lost.
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
    """Lets another thread end a wait on a descriptor. Costs nothing until a thread waits."""

    __slots__ = ("_descriptors", "_is_interrupted", "_lock", "_pollers")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards what follows: a closed descriptor's number can be
        # reused. At most one; a file object closes it also if Ctrl-C loses it.
        self._descriptors: list[io.FileIO] = []
        self._is_interrupted = False
        self._pollers: dict[int, select.poll] = {}  # by lane: a pass waits on few lanes, many times

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
            return  # no thread has waited
        with self._lock:
            for file in self._descriptors:
                file.close()
            self._descriptors.clear()


class Conversation:
    """The handler's side: collects what it posts to the sender that waits.

    Args:
        send: answers on the lane.
        post: sends a message separately.
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
        """Puts a message into the receipt; False if it has to travel separately."""
        if self._is_over or encoded.buffers:
            return False
        self._pieces.append((kind, encoded.payload))
        return True

    def end(self) -> None:
        """Sends the receipt."""
        if self._is_over:
            return
        self._is_over = True
        body: list[bytes] = []
        for kind, payload in self._pieces:
            body += (_PIECE.pack(kind, len(payload)), payload)
        try:
            self._send(Kind.RECEIPT, 0, self._call_id, -1, -1, body)
        except (ConnectionClosed, TransportTimeout):
            # The lane broke, but the worker may be alive: the messages must not be lost.
            for kind, payload in self._pieces:
                try:
                    self._post(kind, payload)
                except WorkerLost:
                    return  # the watchers are told


def messages_in(receipt: Frame) -> list[tuple[Kind, memoryview]]:
    """The messages in a receipt."""
    body = memoryview(receipt.body)
    messages: list[tuple[Kind, memoryview]] = []
    position = 0
    while position < len(body):
        kind, length = _PIECE.unpack_from(body, position)
        position += _PIECE.size
        messages.append((kind_of(kind), body[position : position + length]))
        position += length
    return messages
