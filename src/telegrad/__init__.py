"""telegrad: distributed autograd for PyTorch.

`telegrad.rpc` calls functions on other workers, `telegrad.autograd` runs one backward pass through
all of them. This module only puts the two together: each worker that `init_rpc` starts gets an
autograd engine, which records its calls. It also sees to it that both can be used in TorchScript,
and in what `torch.compile` compiles.
"""

from __future__ import annotations

from telegrad import autograd, rpc
from telegrad.autograd.attachment import attach
from telegrad.compat.compiler import keep_out
from telegrad.compat.torchscript.watch import watch
from telegrad.errors import TelegradError

__all__ = ["TelegradError", "__version__", "autograd", "install", "rpc", "uninstall"]

__version__ = "0.1.0"

attach()
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
