"""Everything telegrad raises, besides `TypeError` and `ValueError` for arguments that cannot be.

::

    RuntimeError
    └── TelegradError
        ├── RpcTimeout             (also a TimeoutError) a call's deadline passed
        ├── WorkerLost             (also a ConnectionError) the peer died or stopped answering
        │   └── ReplyLost          a connection to it broke; the worker itself is alive
        ├── RemoteError            the function raised, and its exception could not be rebuilt here
        ├── ContextError           no such autograd context, or one too many
        ├── BackwardError          a backward pass failed on some worker
        ├── RRefError              a remote reference was misused, or its value could not be made
        ├── SerializationError     a value could not be packed or unpacked
        ├── NotAllowed             the callee's allow-list does not name a function or a type
        ├── AuthenticationError    the other end did not prove the cluster's secret
        ├── ProtocolError          the other end broke the rules of the wire
        ├── NotInitialized         no agent runs in this process
        └── LaunchError            workers could not be started

All of them are `RuntimeError`, because programs written for torch's RPC catch that. The facts are
fields; the text is made from them, so that a program never has to parse a message.
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
    """The root: catch this to catch all that goes wrong between workers."""


class RpcTimeout(TelegradError, TimeoutError):
    """A call's deadline passed before its reply came.

    The work may still be going on at the other end; its reply will be dropped. Only if `was_sent`
    is false, it has certainly not begun: no connection could be opened in time, say.
    """

    def __init__(
        self, message: str, *, worker: str = "", seconds: float = 0.0, was_sent: bool = True
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.seconds = seconds
        self.was_sent = was_sent


class WorkerLost(TelegradError, ConnectionError):
    """The worker died, left, or stopped answering; whether the call ran is not known."""

    def __init__(self, message: str, *, worker: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.reason = reason


class ReplyLost(WorkerLost):
    """A connection broke while a call was running, and its reply is lost. The worker is alive, and
    so are the references to its values; how much of the call was done there is not known."""


class RemoteError(TelegradError):
    """The remote function raised an exception whose own type could not be rebuilt here."""

    def __init__(self, message: str, *, worker: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.traceback = traceback


class ContextError(TelegradError):
    """There is no such autograd context on this worker, or there already is one on this thread."""


class BackwardError(TelegradError):
    """A backward pass failed; the context stays usable.

    `worker` is the id of the worker where it happened, `traceback` what was raised there.
    """

    def __init__(self, message: str, *, worker: int = -1, traceback: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.traceback = traceback


class RRefError(TelegradError):
    """A remote reference was used where it cannot be, or its value could not be made."""


class SerializationError(TelegradError):
    """A value could not be packed for the wire, or unpacked from it.

    `path` says where in the arguments or in the result the culprit stands: `args[1]['hook']`.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class NotAllowed(TelegradError):
    """`RpcOptions(allow=...)` of a worker does not name a function that it was asked to run, or
    something that a message to it would build. `name` says what, if it has a name."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class AuthenticationError(TelegradError):
    """The other end of a connection did not prove that it knows the cluster's secret."""


class ProtocolError(TelegradError):
    """Bytes came that the protocol does not allow; the connection is closed."""


class NotInitialized(TelegradError):
    """No agent runs in this process: `init_rpc` was not called, or `shutdown` was, or it was forked
    from a worker's."""


class LaunchError(TelegradError):
    """Workers could not be started: there is no such program, or no port or process for them."""
