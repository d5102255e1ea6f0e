"""Tensors of one message that share memory: which are views of which.

In one process, torch relates tensors over the same memory in two ways. All views of a tensor, and
what `detach()` gives, have one *version counter*, by which torch notices that something saved for
backward has changed. Views that autograd knows have one *base*: an operation in place on one of
them becomes part of the history of the base and of all its views.

Both relations are rebuilt on arrival. Tensors on one span get one version counter. Those that have
one base become real views of one received tensor, their *root*: the base, if it is in the message,
or else a flat tensor over the memory that they use of it, which is nobody's value. The root alone
is recorded, on both sides: its gradient is that of all its views, and goes to the base.

That is right only for views whose gradient goes to the base unchanged. One that has hooks or
`retain_grad`, or came out of a Python function, keeps a history of its own; then, and where views
cannot be rebuilt (another dtype, a base with gaps), the tensors of that base arrive with memory of
their own, as `clone()` would give them. (A hook on an intermediate view that is not in the message
cannot be seen from here, and does not run.)

`.data` cannot be told from `detach()`, so its changes are noticed as those are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false

from telegrad.wire.tensor_table.layout import Entry, is_leaf, keeps_grad
from telegrad.wire.tensor_table.spans import Region, Span, bytes_spanned

__all__ = ["Relations", "relate"]

_LONGEST_CHAIN: Final = 64  # views of views: more are treated as none
_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_PythonNode = torch.autograd.function.BackwardCFunction


@dataclass(slots=True)
class Root:
    """A root that is nobody's value: a flat tensor, and where it lies in the span at `start`."""

    tensor: Tensor
    start: int
    offset: int


@dataclass(slots=True)
class Relations:
    """What is known about the entries of a table that share memory."""

    root_of: dict[int, int] = field(default_factory=dict)
    """By the index of a view, that of its root. Roots that are nobody's value count on from the
    last entry."""
    apart: set[int] = field(default_factory=set)
    """Entries that get memory of their own."""
    hidden: list[Root] = field(default_factory=list)


def relate(
    entries: Sequence[Entry],
    regions: Sequence[Region],
    shared: Mapping[int, Span],
    original_of: Callable[[Tensor], Tensor],
) -> Relations:
    """How the entries on shared spans are related."""
    families: dict[tuple[int, int], list[Region]] = {}
    for region in regions:
        index = region[2]
        span = shared.get(index)
        if span is not None and type(entries[index]) is Tensor:
            base = _base_of(original_of(region[3]))
            families.setdefault((span[0], id(base)), []).append(region)
    relations = Relations()
    for (start, _), family in families.items():
        if len(family) > 1:
            span = shared[family[0][2]]
            if not _join(family, start, span[1], len(entries), original_of, relations):
                relations.apart.update(index for _, _, index, _ in family)
    return relations


def _base_of(tensor: Tensor) -> Tensor:
    base = tensor._base if tensor._is_view() else None
    if base is None or (tensor.requires_grad and not base.requires_grad):
        return tensor  # a leaf that is a view has a gradient of its own
    return base


def _join(
    family: Sequence[Region],
    start: int,
    end: int,
    count: int,
    original_of: Callable[[Tensor], Tensor],
    relations: Relations,
) -> bool:
    """Makes tensors views of one root; False if they have to go apart."""
    originals = {index: original_of(tensor) for _, _, index, tensor in family}
    base = _base_of(originals[family[0][2]])
    first, after = _extent(base)
    if (
        base.layout is not torch.strided
        or not is_non_overlapping_and_dense_or_false(base)
        or base.is_conj()
        or base.is_neg()
        or any(region[0] < first or region[1] > after for region in family)
    ):
        return False
    for _, _, index, tensor in family:
        original = originals[index]
        if original is base:
            continue
        has_grad = keeps_grad(original)
        if not _can_be_viewed(base.dtype, tensor, has_grad):
            return False
        if has_grad and not _is_plain_view(original, base):
            return False
    root = next((index for index, original in originals.items() if original is base), None)
    if root is None:
        size = base.itemsize
        lowest = min(region[0] for region in family)
        lowest -= (lowest - first) % size
        highest = max(region[1] for region in family)
        highest += -(highest - first) % size
        if lowest < start or highest > end or (lowest - start) % size:
            return False
        offset = base.storage_offset() + (lowest - first) // size
        is_recorded = any(map(keeps_grad, originals.values()))
        with torch.set_grad_enabled(is_recorded):
            flat = base.as_strided(((highest - lowest) // size,), (1,), offset)
        root = count + len(relations.hidden)
        relations.hidden.append(Root(flat, start, lowest - start))
    for index in originals:
        if index != root:
            relations.root_of[index] = root
    return True


def _extent(tensor: Tensor) -> tuple[int, int]:
    address = tensor.data_ptr()
    return address, address + (bytes_spanned(tensor) if tensor.numel() else 0)


def _can_be_viewed(dtype: torch.dtype, view: Tensor, has_grad: bool) -> bool:
    """Whether what arrives can be made a view of a root of that type."""
    if view.dtype is dtype or not has_grad:
        return True
    if dtype.is_complex:
        return view.dtype is dtype.to_real()
    return view.dtype.is_complex and view.dtype.to_real() is dtype


def _is_plain_view(view: Tensor, base: Tensor) -> bool:
    """Whether all that happens to the gradient of a view is that it becomes the base's."""
    if view.retains_grad or view._backward_hooks:
        return False
    node: Any = view.grad_fn
    leaf = is_leaf(base)
    target = None if leaf else (base.grad_fn, base.output_nr)
    for _ in range(_LONGEST_CHAIN):
        if node is None or isinstance(node, _PythonNode) or _has_hooks(node):
            return False
        following = node.next_functions[0]
        node = following[0]
        if leaf:
            if type(node) is _AccumulateGrad:
                return bool(node.variable is base)
        elif following == target:
            return True
    return False


def _has_hooks(node: Any) -> bool:
    # There is no other way to get at a node's hooks than to register one.
    for register in (node.register_hook, node.register_prehook):
        handle = register(_nothing)
        count = len(handle.hooks_dict_ref())
        handle.remove()
        if count > 1:
            return True
    return False


def _nothing(*gradients: object) -> None:
    return None
