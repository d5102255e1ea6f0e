"""What happens at the leaves: gradients go to the context, and `.grad` is left alone.

A prehook on the leaf's AccumulateGrad node takes the gradient and passes on nothing, so the node
runs, with all the hooks that anybody registered on it or on the tensor, and `.grad` stays as it
is. Hooks are on nodes, and other passes and plain backward calls may run through the same node at
the same time: the prehook acts only in its own wave, which it knows by torch's thread-local state.

Some hooks need the gradient in `.grad`; to them it is lent (`grad_loans`). Leaves that nobody
watches (`unwatched`) take a shorter way, on which their nodes do not run at all.
"""

from __future__ import annotations

import sys

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false

__all__ = ["add", "adopt"]

_getrefcount = sys.getrefcount
_strided = torch.strided


def _count_in_a_call(value: object) -> int:
    return _getrefcount(value)


_OF_THE_CALL = _count_in_a_call(object())
"""The references to an argument of a function that come from the call, and from counting them.
Before Python 3.11 the caller's stack keeps one, too."""


def adopt(gradient: torch.Tensor, leaf: torch.Tensor, references: int) -> torch.Tensor:
    """The gradient, or a copy of it if it cannot be the context's own.

    The rules are those of torch's AccumulateGrad: nobody else may hold the tensor (`references`
    is how many the caller knows of), and it must be laid out like the leaf, without overlaps.
    """
    # If anything of torch's refers to the tensor, that counts as another reference.
    is_ours = _getrefcount(gradient) <= references + _OF_THE_CALL
    if (
        is_ours
        and gradient.layout is _strided
        and leaf.is_contiguous()
        and gradient.is_contiguous()
    ):
        return gradient  # as most are
    if gradient.layout is torch.sparse_coo:
        is_whole = gradient._indices().is_contiguous() and gradient._values().is_contiguous()
        return gradient if is_ours and is_whole else gradient.clone()
    if gradient.layout is not torch.strided or gradient.is_mkldnn:
        return gradient if is_ours else gradient.clone()
    if leaf.is_contiguous() or is_non_overlapping_and_dense_or_false(leaf):
        if is_ours and gradient.stride() == leaf.stride():
            return gradient
        copy = torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False)
        return copy.copy_(gradient)
    if is_ours and gradient.is_contiguous():
        return gradient
    return gradient.clone(memory_format=torch.contiguous_format)


def add(total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients of one leaf, either of which may be sparse."""
    if total.layout is torch.sparse_coo and gradient.layout is torch.strided:
        return gradient + total  # torch adds sparse to dense, not dense to sparse
    return total + gradient
