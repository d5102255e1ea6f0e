"""Serving the lanes that other workers have opened to this one.

Each lane has a thread of its own, which reads a request, runs it and answers. A function may block
without keeping anybody else waiting.
"""

from __future__ import annotations

from collections.abc import Callable

from telegrad.rpc.connections.begun_requests import BegunRequests
from telegrad.transport.base import Connection
from telegrad.wire.frames import Flags, Frame, Kind

__all__ = ["Serve", "serve_lane"]

Serve = Callable[[int, Frame, Callable[..., None]], None]
"""Runs and answers a request of a worker."""


def serve_lane(source: int, lane: Connection, begun: BegunRequests, serve: Serve) -> None:
    """Serves a lane until it ends, which is raised. Waits for a request; that ends by a request, by
    the loss of the peer, or by `interrupt`.

    Args:
        begun: the requests of worker `source` that have begun here.
    """
    try:
        while True:
            frame = lane.receive()
            if begun.loss_told is not None:
                begun.wait_until_told()
            begun.last[lane] = frame.call_id
            is_copied = frame.flags & Flags.RESENT or frame.call_id in begun.resent
            if is_copied and not begun.may_begin(lane, frame):
                lane.send(Kind.RECEIPT, Flags.RESENT, frame.call_id)
            else:
                serve(source, frame, lane.send)
                if frame.flags & Flags.NO_ANSWER:
                    lane.send(Kind.RECEIPT, 0, frame.call_id)
            del frame  # its tensors must not live until the next request comes
    finally:
        begun.ended(lane)
