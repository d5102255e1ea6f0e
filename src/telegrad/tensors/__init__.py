"""Remote tensors: tensors of torch whose numbers are on another worker.

    caller                                          worker
    remote_tensor ── operations      table ── operations
    special_operations                 │
          │                            │
        stream ──── batches, calls ────┘
          │                            │
     optimizers ─────── steps ─────────┘

`telegrad.nn.module` makes them: the parameters and buffers of modules on other workers. The doors
are `RemoteTensor`, what moves tensors between here and there, `Stream` for whatever has to run on
a worker after the operations that were sent before, and `synchronize`.
"""

from telegrad.tensors import special_operations  # noqa: F401 - registers itself
from telegrad.tensors.fetching import fetch
from telegrad.tensors.remote_tensor import RemoteTensor, moved_to, send
from telegrad.tensors.stream import Handle, Stream, attach, stream_to, synchronize

__all__ = [
    "Handle",
    "RemoteTensor",
    "Stream",
    "attach",
    "fetch",
    "moved_to",
    "send",
    "stream_to",
    "synchronize",
]
