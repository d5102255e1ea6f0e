"""Accepts connections to this worker from peers that prove that they know the cluster's secret.

A new connection is *pending* until its handshake is done. It has a few seconds for that, and the
number of pending connections is limited, so connections that stay silent cost little and cannot
keep peers out.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from telegrad.errors import AuthenticationError, ProtocolError
from telegrad.rpc.group.worker_info import WorkerInfo
from telegrad.transport.base import Connection, ConnectionClosed, Listener
from telegrad.transport.handshake import Identity, Purpose, answer

__all__ = ["Acceptor"]

_log = logging.getLogger("telegrad.rpc")

_HANDSHAKE_SECONDS = 5.0
_MOST_PENDING = 64
_MOST_WARNINGS = 1000


class _Pending(NamedTuple):
    """A connection whose handshake is not done yet."""

    connection: Connection
    since: float


class Acceptor:
    """
    Args:
        info, incarnation: of this worker. A peer that expects another one is refused.
        key: what peers must prove that they know.
        recognise: checks that a proved identity belongs to the group; raises `ProtocolError`. It
            may wait; the connection no longer counts as pending meanwhile.
        serve: runs an accepted connection to its end.
        spawn: starts a thread, named after its role.
    """

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: bytes,
        key: bytes,
        recognise: Callable[[Identity], None],
        serve: Callable[[Identity, Connection], None],
        spawn: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self._info = info
        self._incarnation = incarnation
        self._key = key
        self._recognise = recognise
        self._serve = serve
        self._spawn = spawn
        self._listeners: list[Listener] = []
        self._pending: collections.deque[_Pending] = collections.deque()
        self._warned: set[str] = set()
        self._is_closing = False

    def add(self, listener: Listener) -> None:
        """Listens there too, once it is open."""
        self._listeners.append(listener)

    @property
    def addresses(self) -> list[str]:
        return [listener.address for listener in self._listeners]

    def open(self) -> None:
        for listener in self._listeners:
            self._spawn("accept", partial(self._accept, listener))

    def tick(self, now: float) -> None:
        """Closes connections whose handshake takes too long."""
        for pending in list(self._pending):
            if now - pending.since > _HANDSHAKE_SECONDS:
                self._dismiss(pending)

    def close(self) -> None:
        """Accepts nothing more, and closes pending connections."""
        self._is_closing = True
        for listener in self._listeners:
            listener.close()
        for pending in list(self._pending):
            pending.connection.interrupt()

    def warn_once(self, text: str) -> None:
        """Logs a warning the first time: a thousand bad connections must not fill the disk."""
        if text not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(text)
            _log.warning("%s: %s (said once)", self._info.name, text)

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()  # ends by a connection or listener.close()
            except ConnectionClosed as error:
                if self._is_closing:
                    return
                # Out of descriptors, for instance. The listener still works: try again soon.
                self.warn_once(f"a connection could not be accepted: {error}")
                time.sleep(0.05)
                continue
            pending = _Pending(connection, time.monotonic())
            self._pending.append(pending)
            if self._is_closing:  # checked after it is listed, or else `close` could miss it
                connection.close()
                return
            for silent in list(self._pending)[:-_MOST_PENDING]:
                # The longest silent one is closed, so a crowd of them cannot keep peers out.
                self._dismiss(silent)
            try:
                self._spawn("lane", partial(self._admit, pending))
            except RuntimeError as error:  # the system has no thread left
                self.warn_once(f"a connection could not be served: {error}")
                self._forget(pending)
                connection.close()

    def _dismiss(self, pending: _Pending) -> None:
        if self._forget(pending):
            self.warn_once("refused a connection: it did not say who it is")
            pending.connection.interrupt()

    def _forget(self, pending: _Pending) -> bool:
        """False if it is no longer pending: it was identified or dismissed at this moment."""
        try:
            self._pending.remove(pending)
        except ValueError:
            return False
        return True

    def _admit(self, pending: _Pending) -> None:
        connection = pending.connection
        identity: Identity | None = None
        try:
            identity = self._identify(pending)
        finally:
            if identity is None:
                connection.close()
        if identity is not None:
            self._serve(identity, connection)

    def _identify(self, pending: _Pending) -> Identity | None:
        connection = pending.connection
        try:
            try:
                # Ends with an identity or, at the latest, when the clock dismisses it.
                identity = answer(connection, self._key, self._info.id, self._incarnation)
            finally:
                self._forget(pending)
            if identity.purpose is Purpose.PROBE:
                return None  # all it wanted to know is that this worker is alive
            self._recognise(identity)
            return identity
        except (AuthenticationError, ProtocolError) as error:
            self.warn_once(f"refused a connection: {error}")
        except ConnectionClosed as error:
            # One that sent nothing is a port scan, or a check whether this worker is alive.
            if connection.reads and not self._is_closing:
                self.warn_once(f"refused a connection: it did not introduce itself ({error})")
        return None
