"""Results that a worker computed with gradients, and returned outside of any context.

Such a result arrives as a leaf: nothing leads from it to the worker that computed it. As with
torch's RPC that is allowed, since a program may only want the numbers. But if a backward pass
reaches it, the worker's parameters get no gradient, and the program trains less than it seems to.
So it warns.
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
    """A hook. Python's filters decide how often it is shown: by default once for each line that
    runs such a pass."""

    __torch_unserializable__ = True  # torch.save need not say that it leaves the hook out

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def __call__(self, gradient: torch.Tensor) -> None:
        warnings.warn(
            f"a gradient stops at a tensor that worker {self._worker!r} returned outside of a "
            f"dist_autograd.context(): parameters on {self._worker!r} get none from it. Make the "
            "call inside of the context; another thread joins it by "
            "dist_autograd.join_context(context_id)",
            UserWarning,
            stacklevel=_level_of_program(),
        )


def _level_of_program() -> int:
    """How far up the stack the program's own line is, as `warnings.warn` counts for the caller."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(("telegrad.", "torch.")):
        if frame.f_back is None:
            return 1  # a worker's own thread: there is none
        frame = frame.f_back
        level += 1
    return level
