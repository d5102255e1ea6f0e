"""Where others connect to this worker: lets in whoever proves the cluster's secret.

A connection that has not proved itself yet is a stranger. It has a few seconds to do so, and there
is room for some of them only, so whoever knocks and says nothing costs little and keeps no friend
out.
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

__all__ = ["Door"]

_log = logging.getLogger("telegrad.rpc")

_HANDSHAKE_SECONDS = 5.0
_MOST_STRANGERS = 64
_MOST_COMPLAINTS = 1000


class _Stranger(NamedTuple):
    """A connection that has not proved itself yet."""

    connection: Connection
    since: float


class Door:
    """
    Args:
        info, incarnation: this worker's; nobody who looks for another one is let in.
        key: what others must prove that they know.
        recognise: checks that an identity, proved already, belongs here; raises `ProtocolError`.
            Whoever it keeps waiting is no stranger any more.
        welcome: runs a connection that was let in, to its end.
        spawn: starts a thread, by the name of its role.
    """

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: bytes,
        key: bytes,
        recognise: Callable[[Identity], None],
        welcome: Callable[[Identity, Connection], None],
        spawn: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self._info = info
        self._incarnation = incarnation
        self._key = key
        self._recognise = recognise
        self._welcome = welcome
        self._spawn = spawn
        self._listeners: list[Listener] = []
        self._strangers: collections.deque[_Stranger] = collections.deque()
        self._complaints: set[str] = set()
        self._is_closing = False

    def add(self, listener: Listener) -> None:
        """One more way in, once the door is open."""
        self._listeners.append(listener)

    @property
    def addresses(self) -> list[str]:
        return [listener.address for listener in self._listeners]

    def open(self) -> None:
        for listener in self._listeners:
            self._spawn("accept", partial(self._accept, listener))

    def tick(self, now: float) -> None:
        """Sends those away that have not said who they are in time."""
        for stranger in list(self._strangers):
            if now - stranger.since > _HANDSHAKE_SECONDS:
                self._dismiss(stranger)

    def close(self) -> None:
        """Nobody else comes in, and whoever has not said who it is goes."""
        self._is_closing = True
        for listener in self._listeners:
            listener.close()
        for stranger in list(self._strangers):
            stranger.connection.interrupt()

    def complain(self, text: str) -> None:
        """Says it once: whoever knocks a thousand times must not fill the disk."""
        if text not in self._complaints and len(self._complaints) < _MOST_COMPLAINTS:
            self._complaints.add(text)
            _log.warning("%s: %s (said once)", self._info.name, text)

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()  # ends by a connection or listener.close()
            except ConnectionClosed as error:
                if self._is_closing:
                    return
                # Out of descriptors, say. The listener is still there: try again in a moment.
                self.complain(f"a connection could not be accepted: {error}")
                time.sleep(0.05)
                continue
            stranger = _Stranger(connection, time.monotonic())
            self._strangers.append(stranger)
            if self._is_closing:  # asked when it can be seen there: nobody would dismiss it later
                connection.close()
                return
            for silent in list(self._strangers)[:-_MOST_STRANGERS]:
                # Whoever is silent longest goes: a crowd of strangers cannot shut friends out.
                self._dismiss(silent)
            try:
                self._spawn("lane", partial(self._admit, stranger))
            except RuntimeError as error:  # no thread to be had
                self.complain(f"a connection could not be served: {error}")
                self._forget(stranger)
                connection.close()

    def _dismiss(self, stranger: _Stranger) -> None:
        if self._forget(stranger):
            self.complain("refused a connection: it did not say who it is")
            stranger.connection.interrupt()

    def _forget(self, stranger: _Stranger) -> bool:
        """False if it is none any more: it has proved itself, or was dismissed, in this moment."""
        try:
            self._strangers.remove(stranger)
        except ValueError:
            return False
        return True

    def _admit(self, stranger: _Stranger) -> None:
        connection = stranger.connection
        identity: Identity | None = None
        try:
            identity = self._identify(stranger)
        finally:
            if identity is None:
                connection.close()
        if identity is not None:
            self._welcome(identity, connection)

    def _identify(self, stranger: _Stranger) -> Identity | None:
        connection = stranger.connection
        try:
            try:
                # Ends in an identity or, at the latest, when the clock dismisses it.
                identity = answer(connection, self._key, self._info.id, self._incarnation)
            finally:
                self._forget(stranger)
            if identity.purpose is Purpose.PROBE:
                return None  # it knows now that this worker is alive
            self._recognise(identity)
            return identity
        except (AuthenticationError, ProtocolError) as error:
            self.complain(f"refused a connection: {error}")
        except ConnectionClosed as error:
            # One that said nothing just looked in: a port scan, or a check whether we are alive.
            if connection.reads and not self._is_closing:
                self.complain(f"refused a connection: it did not introduce itself ({error})")
        return None
