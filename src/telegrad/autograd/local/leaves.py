"""What happens at the leaves: gradients go to the context, and `.grad` is left alone.

A prehook on the leaf's AccumulateGrad node takes the gradient and passes on nothing. So the node
runs, with all the hooks on it and on the tensor, and `.grad` stays as it is. Several passes, and
plain backward calls, may run through the same node at the same time: the prehook acts only in its
own wave, which it knows by torch's thread-local state.

Some hooks need the gradient in `.grad`, which is lent to them (`grad_field`). Leaves without hooks
(`unwatched`) take a shorter way, on which their nodes do not run at all.
"""

from __future__ import annotations

import sys

import torch

from telegrad.autograd.torch_internals import is_dense

__all__ = ["add", "adopt"]

_getrefcount = sys.getrefcount
_strided = torch.strided


def _count_in_a_call(value: object) -> int:
    return _getrefcount(value)


_OF_THE_CALL = _count_in_a_call(object())
"""The references to an argument of a function that come from the call, and from counting them.
Before Python 3.11 the caller's stack keeps one too."""


def adopt(gradient: torch.Tensor, leaf: torch.Tensor, references: int) -> torch.Tensor:
    """The gradient, or a copy of it if the context cannot own it.

    The rules are those of torch's AccumulateGrad: there must be no references to the tensor but the
    caller's, which are so many, and it must be laid out like the leaf, without overlaps.
    """
    # An owner in C++ counts as a reference, too.
    is_ours = _getrefcount(gradient) <= references + _OF_THE_CALL
    if (
        is_ours
        and gradient.layout is _strided
        and leaf.is_contiguous()
        and gradient.is_contiguous()
    ):
        return gradient  # the usual case
    if gradient.layout is torch.sparse_coo:
        is_whole = gradient._indices().is_contiguous() and gradient._values().is_contiguous()
        return gradient if is_ours and is_whole else gradient.clone()
    if gradient.layout is not torch.strided or gradient.is_mkldnn:
        return gradient if is_ours else gradient.clone()
    if leaf.is_contiguous() or is_dense(leaf):
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
