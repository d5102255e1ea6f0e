"""telegrad: distributed autograd for PyTorch.

`telegrad.rpc` calls functions on other workers, `telegrad.autograd` runs one backward pass through
all of them. This module only puts the two together: each worker that `init_rpc` starts gets an
autograd engine, which records its calls. It also sees to it that both can be used in TorchScript,
and in what `torch.compile` compiles.
"""

from __future__ import annotations

from telegrad import autograd, rpc, tensors
from telegrad.autograd import plain
from telegrad.autograd.contexts.attachment import attach
from telegrad.compat.compilers import keep_out, watch
from telegrad.errors import TelegradError
from telegrad.launch.membership import Membership, join, manual_seed, name
from telegrad.launch.workers import Workers, workers
from telegrad.nn.module import module
from telegrad.nn.pipeline import Pipeline
from telegrad.remote_calls import RemoteFuture, call, object, submit

__all__ = [
    "Membership",
    "Pipeline",
    "RemoteFuture",
    "TelegradError",
    "Workers",
    "__version__",
    "autograd",
    "call",
    "install",
    "join",
    "manual_seed",
    "module",
    "name",
    "object",
    "rpc",
    "submit",
    "uninstall",
    "workers",
]

__version__ = "0.1.0"

attach()
plain.attach()
tensors.attach()
watch()
keep_out()


def install() -> None:
    """Puts telegrad in the place of `torch.distributed.rpc` and what belongs to it."""
    from telegrad import compat

    compat.install()


def uninstall() -> None:
    """Gives torch's own modules their places back."""
    from telegrad import compat

    compat.uninstall()
