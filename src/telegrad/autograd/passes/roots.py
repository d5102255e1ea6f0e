"""Checks of what a program passes to `backward`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from telegrad.autograd.contexts.context import check_context_id
from telegrad.autograd.torch_internals import Future
from telegrad.drop_in import torch_phrase
from telegrad.errors import BackwardError
from telegrad.rpc.references.rref import RRef

__all__ = ["check_roots", "tensors_of"]


def check_roots(context_id: object, roots: object) -> None:
    """
    Raises:
        TypeError: these are not the id of a context and a list of tensors.
        BackwardError: a root cannot be differentiated.
    """
    tensors = tensors_of("backward", context_id, roots)
    if not tensors:
        raise BackwardError(
            "backward(): roots is empty: write backward(context_id, [loss])"
            + torch_phrase("No tensors provided for gradient computation.")
        )
    for number, root in enumerate(tensors):
        name = f"root {number} (the loss)" if len(tensors) == 1 else f"root {number}"
        if not root.requires_grad:
            raise BackwardError(
                f"{name} does not depend on anything that requires grad: are all parameters "
                "frozen, or was it computed under no_grad() or from detach()ed tensors?"
                + torch_phrase(f"requires_grad not set on root {number}")
            )
        if root.numel() != 1:
            raise BackwardError(
                f"{name} must be a scalar, and has the shape {tuple(root.shape)}: reduce it by "
                "sum() or mean()"
                + torch_phrase(f"root {number} is not a scalar, all roots need to be scalar")
            )
        if root.is_complex():
            raise BackwardError(
                f"{name} must be real, and is of {root.dtype}: take its abs() or .real"
                + torch_phrase(f"root {number} is complex, all roots need to be real")
            )
        if root.grad_fn is None:
            raise BackwardError(
                f"{name} is a leaf: nothing leads from it to parameters. If it came from another "
                "worker, make that call inside the context"
                + torch_phrase(f"root {number} does not have a valid gradient function")
            )


def tensors_of(caller: str, context_id: object, roots: object) -> Sequence[torch.Tensor]:
    """The roots, if they are tensors.

    Raises:
        TypeError: these are not the id of a context and a list of tensors.
    """
    phrase = torch_phrase(
        "incompatible function arguments: expected (context_id: int, roots: list[Tensor], "
        f"retain_graph: bool = False), got ({type(context_id).__name__}, {type(roots).__name__})"
    )
    check_context_id(context_id, phrase)
    if not isinstance(roots, (list, tuple)):
        raise TypeError(
            f"{caller}(): roots must be a list of tensors, got a {type(roots).__name__}: write "
            f"{caller}(context_id, [loss]){phrase}"
        )
    for number, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            what = f"must be a tensor, got a {type(root).__name__}"
            if isinstance(root, Future):
                what = "is a future: call .wait() on it first"
            elif isinstance(root, RRef):
                what = "is an RRef: call .to_here() on it first, or rref.backward(context_id)"
            raise TypeError(f"{caller}(): roots[{number}] {what}{phrase}")
    return roots
