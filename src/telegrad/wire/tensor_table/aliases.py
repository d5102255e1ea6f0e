"""Tensors of one message that share memory: which bytes travel, and which tensors are views.

Tensors whose memory overlaps travel as one *span*, whether or not they have the same storage object
(two tensors made from one numpy array do not). Others travel alone: two rows of a large table are
two small spans, never the table.

In one process, torch relates tensors on the same memory in two ways. All views of a tensor, and its
`detach()`, have one *version counter*, by which torch notices changes to what it has saved for
backward. Views that autograd records have one *base*: an operation in place on one of them becomes
part of the history of the base and of all its views.

Both relations are rebuilt on arrival. Tensors on one span get one version counter. Those that have
one base become views of one received tensor, their *root*: the base, if it is in the message, or a
flat tensor over the memory that they use of it, which is not a value of the message. Only the root
is recorded, on both sides: its gradient is that of all its views, and goes to the base.

That is right only for views whose gradient goes to the base unchanged. A view that has hooks or
`retain_grad`, or is the result of a Python function, keeps its own history. Then, and if views
cannot be rebuilt (another dtype, a base with gaps), the tensors of that base arrive with memory of
their own, as if cloned. (A hook on an intermediate view that is not in the message cannot be seen
from here, and does not run.)

`.data` cannot be told from `detach()`, so changes through it are noticed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false

from telegrad.wire.tensor_table.layout import Entry, is_leaf, keeps_grad

__all__ = ["Region", "Relations", "bytes_spanned", "memory_at", "relate", "shared_spans"]

_LONGEST_CHAIN: Final = 64  # views of views: a longer chain is not followed
_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_PythonNode = torch.autograd.function.BackwardCFunction


Region = tuple[int, int, int, Tensor]
"""First address, address after the last byte, index of the table's entry, and the tensor."""

Span = tuple[int, int, Tensor]
"""First address, address after the last byte, and a tensor whose storage covers them."""

_ALIGNMENT = 16  # the largest element torch has: complex128


@dataclass(slots=True)
class Root:
    """A root that is not a value: a flat tensor, at `offset` in the span at `start`."""

    tensor: Tensor
    start: int
    offset: int


@dataclass(slots=True)
class Relations:
    """How the entries of a table that share memory are related."""

    root_of: dict[int, int] = field(default_factory=dict)
    """The index of the root, by the index of the view. Hidden roots are numbered after the last
    entry."""
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
        return tensor  # a view that is a leaf has a gradient of its own
    return base


def _join(
    family: Sequence[Region],
    start: int,
    end: int,
    count: int,
    original_of: Callable[[Tensor], Tensor],
    relations: Relations,
) -> bool:
    """Makes tensors views of one root; False if they must be separate."""
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
    """Whether the received tensor can be made a view of a root of that type."""
    if view.dtype is dtype or not has_grad:
        return True
    if dtype.is_complex:
        return view.dtype is dtype.to_real()
    return view.dtype.is_complex and view.dtype.to_real() is dtype


def _is_plain_view(view: Tensor, base: Tensor) -> bool:
    """Whether a view passes its gradient to the base unchanged."""
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
    # A node gives access to its hooks only when one is registered.
    for register in (node.register_hook, node.register_prehook):
        handle = register(_nothing)
        count = len(handle.hooks_dict_ref())
        handle.remove()
        if count > 1:
            return True
    return False


def _nothing(*gradients: object) -> None:
    return None


def bytes_spanned(tensor: Tensor) -> int:
    """From the first to the last byte that a strided tensor touches (it has elements)."""
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return (last + 1) * tensor.itemsize


def shared_spans(regions: Sequence[Region]) -> dict[int, Span]:
    """The spans of the regions that overlap others, by the index of their entries."""
    shared: dict[int, Span] = {}
    ordered = sorted(regions)  # no two have the same index, so tensors are never compared
    group = [ordered[0]]
    end = ordered[0][1]
    for region in [*ordered[1:], None]:
        if region is not None and region[0] < end:
            group.append(region)
            end = max(end, region[1])
            continue
        if len(group) > 1:
            _share(group, end, shared)
        if region is not None:
            group = [region]
            end = region[1]
    return shared


def _share(group: list[Region], end: int, shared: dict[int, Span]) -> None:
    start = group[0][0]
    if any((first - start) % tensor.itemsize for first, _, _, tensor in group):
        # Views of several element sizes: begin a little earlier, at an offset that is a whole
        # number of elements of any size. Offsets in a storage are, so it lies within the storage.
        base = group[0][3].untyped_storage().data_ptr()
        start -= (start - base) % _ALIGNMENT
    for _, _, _, owner in group:
        storage = owner.untyped_storage()
        base = storage.data_ptr()
        if base <= start and end <= base + storage.nbytes():
            break
    else:
        # No single storage covers them (slices of one numpy array): each travels alone.
        return
    for first, _, index, tensor in group:
        if (first - start) % tensor.itemsize == 0:
            shared[index] = (start, end, owner)


def memory_at(address: int, size: int, owner: Tensor) -> memoryview:
    """The bytes at `address`, which lie in the storage of `owner`; the view keeps it alive."""
    storage = owner.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the default is
    raw.set_(storage, address - storage.data_ptr(), (size,), (1,))
    return memoryview(raw.numpy())  # type: ignore[arg-type]
