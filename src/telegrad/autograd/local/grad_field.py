"""Leaves whose hooks expect the gradient in `.grad`.

Those are the hooks of `register_post_accumulate_grad_hook`, and the reducer of
DistributedDataParallel, which copies `.grad` into its buckets and the reduced buckets back. The
`.grad` of such a leaf is lent to a wave: set aside, filled by torch itself, taken, and restored.
One wave at a time may borrow a leaf.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from telegrad.autograd.torch_internals import (
    has_post_accumulate_hooks,
    use_count,
)
from telegrad.errors import BackwardError

__all__ = ["GradLoan", "needs_grad_field"]

_returned = threading.Condition()  # guards the table below
_lent: dict[int, int] = {}  # leaves whose `.grad` a wave has borrowed, by id; the wave's thread


def needs_grad_field(tensor: torch.Tensor, may_be_of_ddp: bool) -> bool:
    """Whether hooks of this leaf expect its gradient in `.grad`."""
    if has_post_accumulate_hooks(tensor):
        return True
    return may_be_of_ddp and _ddp.manages(tensor)


class GradLoan:
    """`.grad` of some leaves, lent to one wave. Giving back undoes borrowing, even if Ctrl-C
    interrupted it."""

    def __init__(self) -> None:
        self.set_aside: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """The leaves, with what was in their `.grad`."""
        self._ids: set[int] = set()

    def borrow(self, leaves: Iterable[torch.Tensor]) -> None:
        """Sets `.grad` of the leaves aside. Waits while another wave has borrowed one of them;
        the wait ends with that wave.

        Raises:
            BackwardError: that wave runs on this thread, and would wait for this one.
        """
        leaves = list(leaves)
        ids = {id(leaf) for leaf in leaves}
        me = threading.get_ident()
        with _returned:
            while taken := ids & _lent.keys():
                if any(_lent[leaf] == me for leaf in taken):
                    raise BackwardError(
                        "a hook of a backward pass runs another one through a parameter whose "
                        "hooks look for its gradient in `.grad` (those of DistributedDataParallel "
                        "or register_post_accumulate_grad_hook), while the first one uses that "
                        "`.grad`: run the other pass when the first is over"
                    )
                _returned.wait()
            self._ids = ids  # no call, so no signal handler, between these two
            _lent.update(dict.fromkeys(ids, me))
        for leaf in leaves:
            self.set_aside.append((leaf, leaf.grad))
            leaf.grad = None

    def give_back(self) -> list[torch.Tensor | None]:
        """Puts `.grad` back, and returns what the wave left in it."""
        found: list[torch.Tensor | None] = []
        for leaf, grad in self.set_aside:
            gradient: Any = leaf.grad
            leaf.grad = grad
            if gradient is not None and gradient.layout is torch.strided:
                storage = gradient.untyped_storage()
                # A reducer's bucket, or a view of one: the next pass overwrites it.
                if use_count(gradient) > 1 or storage.nbytes() != gradient.nbytes:
                    gradient = gradient.clone()
            found.append(gradient)
        with _returned:
            for leaf_id in self._ids:
                _lent.pop(leaf_id, None)
            _returned.notify_all()
        return found


class _DdpParameters:
    """Finds the parameters that DistributedDataParallel modules manage.

    Nothing on a parameter or on its node tells, and modules may be older than the import of
    telegrad. But every instance refers to its class: the class's reference count changes with each
    new one, and only then the instances are looked up, which takes milliseconds.
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
