"""Results that a worker computed with gradients and returned outside any context.

Such a result arrives as a leaf, without a path to the worker that computed it. As with torch's RPC
that is allowed, since a program may only want the numbers. But if a backward pass reaches it, the
worker's parameters get no gradient, and the program trains fewer parameters than it seems to. So
a backward pass that reaches one warns.
"""

from __future__ import annotations

import sys
import warnings

import torch

__all__ = ["as_marked_leaf"]


def as_marked_leaf(tensor: torch.Tensor, worker: str) -> torch.Tensor:
    """Makes a tensor from `worker` a leaf that warns when a gradient reaches it."""
    tensor.requires_grad_()
    tensor.register_hook(_Warning(worker))  # type: ignore[no-untyped-call]
    return tensor


class _Warning:
    """A hook that warns. By default Python shows the warning once per line that runs such a
    pass."""

    __torch_unserializable__ = True  # torch.save leaves the hook out without a warning

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def __call__(self, gradient: torch.Tensor) -> None:
        warnings.warn(
            f"a gradient stops at a tensor that worker {self._worker!r} returned outside a "
            f"dist_autograd.context(): parameters on {self._worker!r} get none from it. Make the "
            "call inside the context; another thread joins it by "
            "dist_autograd.join_context(context_id)",
            UserWarning,
            stacklevel=_level_of_program(),
        )


def _level_of_program() -> int:
    """The `stacklevel` of the program's own line, as the caller passes it to `warnings.warn`."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(("telegrad.", "torch.")):
        if frame.f_back is None:
            return 1  # a thread of the worker's own: no program line
        frame = frame.f_back
        level += 1
    return level
