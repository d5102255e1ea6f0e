"""What happens at the leaves: gradients go to the context, and `.grad` is left alone.

A prehook on the leaf's AccumulateGrad node takes the gradient and passes on nothing, so the node
runs, with all the hooks that anybody registered on it or on the tensor, and `.grad` stays as it
is. Hooks are on nodes, and other passes and plain backward calls may run through the same node at
the same time: the prehook acts only in its own wave, which it knows by torch's thread-local state.

Some hooks need the gradient in `.grad`: `register_post_accumulate_grad_hook`, and the reducer of
DistributedDataParallel, which copies `.grad` into its buckets and the reduced buckets back. For
such leaves `.grad` is lent: set aside, filled by torch itself, taken, and put back. One wave at a
time may borrow a leaf.

Leaves that nobody watches (`unwatched`) take a shorter way, on which their nodes do not run at all.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Loans", "add", "adopt", "needs_grad_field"]


def needs_grad_field(tensor: torch.Tensor, is_ddp_possible: bool) -> bool:
    """Whether hooks of this leaf look for its gradient in `.grad`."""
    if tensor._post_accumulate_grad_hooks:
        return True
    return is_ddp_possible and _ddp.manages(tensor)


def adopt(gradient: torch.Tensor, leaf: torch.Tensor, references: int) -> torch.Tensor:
    """The gradient, or a copy of it if it cannot be the context's own.

    The rules are those of torch's AccumulateGrad: nobody else may hold the tensor (`references`
    is how many the caller knows of), and it must be laid out like the leaf, without overlaps.
    """
    counted: Any = gradient
    # Two references are our names, one the call of getrefcount.
    is_ours = sys.getrefcount(gradient) <= references + 3 and counted._use_count() <= 1
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


class Loans:
    """The leaves whose `.grad` some wave has borrowed."""

    def __init__(self) -> None:
        self._returned = threading.Condition()
        self._lent: set[int] = set()

    def borrow(self, leaves: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, Any]]:
        """Sets `.grad` of the leaves aside. Waits while another wave has borrowed one of them;
        that ends when that wave does, in a result or an error."""
        leaves = list(leaves)
        ids = {id(leaf) for leaf in leaves}
        with self._returned:
            self._returned.wait_for(lambda: not ids & self._lent)
            self._lent |= ids
        before = [(leaf, leaf.grad) for leaf in leaves]
        for leaf, _ in before:
            leaf.grad = None
        return before

    def give_back(self, before: list[tuple[torch.Tensor, Any]]) -> list[torch.Tensor | None]:
        """Puts `.grad` back, and returns what the wave left in it."""
        found: list[torch.Tensor | None] = []
        for leaf, grad in before:
            gradient = leaf.grad
            if gradient is not None and gradient.layout is torch.strided:
                storage = gradient.untyped_storage()
                if storage.nbytes() != gradient.nbytes:  # a view of a reducer's bucket
                    gradient = gradient.clone()
            found.append(gradient)
            leaf.grad = grad
        with self._returned:
            self._lent -= {id(leaf) for leaf, _ in before}
            self._returned.notify_all()
        return found


class _DdpParameters:
    """Finds the parameters that some DistributedDataParallel module manages.

    Nothing on a parameter or on its node tells, and modules may have been made before telegrad was
    imported. But every instance holds a reference to its class: the class's reference count
    changes when one is made, and only then the instances are looked up, which takes milliseconds.
    """

    def __init__(self) -> None:
        self._seen_count = -1
        self._modules: list[weakref.ref[Any]] = []
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}

    def manages(self, tensor: torch.Tensor) -> bool:
        count = sum(sys.getrefcount(cls) for cls in _with_subclasses(DistributedDataParallel))
        if count != self._seen_count or any(ref() is None for ref in self._modules):
            self._look()
            self._seen_count = sum(
                sys.getrefcount(cls) for cls in _with_subclasses(DistributedDataParallel)
            )
        found = self._parameters.get(id(tensor))
        return found is not None and found() is tensor

    def _look(self) -> None:
        modules: list[Any] = []
        for cls in _with_subclasses(DistributedDataParallel):
            modules += [
                thing
                for thing in gc.get_referrers(cls)
                if type(thing) is cls and "module" in thing.__dict__.get("_modules", ())
            ]
        self._modules = [weakref.ref(module) for module in modules]
        self._parameters = {
            id(parameter): weakref.ref(parameter)
            for module in modules
            for parameter in module.parameters()
        }


def _with_subclasses(cls: Any) -> list[Any]:
    found = [cls]
    for subclass in cls.__subclasses__():
        found += _with_subclasses(subclass)
    return found


_ddp = _DdpParameters()
