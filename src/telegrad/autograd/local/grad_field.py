"""Leaves whose hooks look for the gradient in `.grad`.

Those are hooks of `register_post_accumulate_grad_hook`, and the reducer of DistributedDataParallel,
which copies `.grad` into its buckets and the reduced buckets back. For such leaves `.grad` is lent
to a wave: set aside, filled by torch itself, taken, and put back. One wave at a time may borrow a
leaf.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from telegrad.errors import BackwardError

__all__ = ["GradLoan", "is_ddp_possible", "needs_grad_field"]

_world = distributed_c10d._world

_returned = threading.Condition()  # guards the set below
_lent: dict[int, int] = {}  # leaves whose `.grad` a wave has borrowed, by id; its thread


def is_ddp_possible() -> bool:
    """Whether there may be modules of DistributedDataParallel: `torch.distributed.is_initialized`,
    without the three calls that this takes."""
    return _world._default_pg is not None


def needs_grad_field(tensor: torch.Tensor, may_be_of_ddp: bool) -> bool:
    """Whether hooks of this leaf look for its gradient in `.grad`."""
    if tensor._post_accumulate_grad_hooks:
        return True
    return may_be_of_ddp and _ddp.manages(tensor)


class GradLoan:
    """`.grad` of some leaves, lent to one wave. However far borrowing came, when Ctrl-C ended it
    say, giving back undoes it."""

    def __init__(self) -> None:
        self.set_aside: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """The leaves, with what was in their `.grad`."""
        self._ids: set[int] = set()

    def borrow(self, leaves: Iterable[torch.Tensor]) -> None:
        """Sets `.grad` of the leaves aside. Waits while another wave has borrowed one of them;
        that ends when that wave does, in a result or an error.

        Raises:
            BackwardError: that wave runs on this thread, and waits for this one.
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
            self._ids = ids  # signals are heeded at calls: nothing comes between these two
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
                # A reducer's bucket, or a view of one: the next pass writes to it.
                if gradient._use_count() > 1 or storage.nbytes() != gradient.nbytes:
                    gradient = gradient.clone()
            found.append(gradient)
        with _returned:
            for leaf_id in self._ids:
                _lent.pop(leaf_id, None)
            _returned.notify_all()
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
