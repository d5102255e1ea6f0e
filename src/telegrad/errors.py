"""Everything telegrad raises, besides `TypeError` and `ValueError` for invalid arguments.

::

    RuntimeError
    └── TelegradError
        ├── RpcTimeout             (also a TimeoutError) a call's deadline passed
        ├── WorkerLost             (also a ConnectionError) the peer died or stopped answering
        │   └── ReplyLost          a connection to it broke; the worker is alive
        ├── RemoteError            the function raised an exception that cannot be rebuilt here
        ├── ContextError           no such autograd context, or a second one
        ├── BackwardError          a backward pass failed on some worker
        ├── RRefError              a remote reference was misused, or its value was not made
        ├── SerializationError     a value could not be packed or unpacked
        ├── NotAllowed             the callee's allow-list does not name a function or a type
        ├── AuthenticationError    the other end did not prove that it knows the cluster's secret
        ├── ProtocolError          the other end violated the protocol
        ├── NotInitialized         no agent runs in this process
        └── LaunchError            workers could not be started

All of them are `RuntimeError`, because programs written for torch's RPC catch that. The facts are
fields, so a program need not parse a message.
"""

from __future__ import annotations

__all__ = [
    "AuthenticationError",
    "BackwardError",
    "ContextError",
    "LaunchError",
    "NotAllowed",
    "NotInitialized",
    "ProtocolError",
    "RRefError",
    "RemoteError",
    "ReplyLost",
    "RpcTimeout",
    "SerializationError",
    "TelegradError",
    "WorkerLost",
]


class TelegradError(RuntimeError):
    """The base class of all errors between workers."""


class RpcTimeout(TelegradError, TimeoutError):
    """A call's deadline passed before its reply came.

    The work may still be going on at the other end; its reply will be dropped. If `was_sent` is
    false, it has not begun: no connection could be opened in time, say.
    """

    def __init__(
        self, message: str, *, worker: str = "", seconds: float = 0.0, was_sent: bool = True
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.seconds = seconds
        self.was_sent = was_sent


class WorkerLost(TelegradError, ConnectionError):
    """The worker died, left, or stopped answering; it is unknown whether the call ran."""

    def __init__(self, message: str, *, worker: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.reason = reason


class ReplyLost(WorkerLost):
    """A connection broke while a call was running, and its reply is lost. The worker and the
    references to its values are alive; it is unknown how much of the call was done."""


class RemoteError(TelegradError):
    """The remote function raised an exception that cannot be rebuilt here with its own type."""

    def __init__(self, message: str, *, worker: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.traceback = traceback


class ContextError(TelegradError):
    """This worker has no such autograd context, or this thread already has one."""


class BackwardError(TelegradError):
    """A backward pass failed; the context stays usable.

    `worker` is the id of the worker where it failed, `traceback` what was raised there.
    """

    def __init__(self, message: str, *, worker: int = -1, traceback: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.traceback = traceback


class RRefError(TelegradError):
    """A remote reference was used in a wrong place, or its value was not made."""


class SerializationError(TelegradError):
    """A value could not be packed for the wire, or unpacked from it.

    `path` says where in the arguments or the result the cause is: `args[1]['hook']`.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class NotAllowed(TelegradError):
    """`RpcOptions(allow=...)` of a worker does not name a function that it should run, or a type
    that a message to it would build. `name` is its name, if it has one."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class AuthenticationError(TelegradError):
    """The other end of a connection did not prove that it knows the cluster's secret."""


class ProtocolError(TelegradError):
    """The other end sent bytes that the protocol does not allow; the connection is closed."""


class NotInitialized(TelegradError):
    """No agent runs in this process: `init_rpc` was not called, `shutdown` was called, or the
    process was forked from a worker."""


class LaunchError(TelegradError):
    """Workers could not be started: the program, a port or a process is missing."""
