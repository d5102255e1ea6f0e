"""Which bytes of memory a message has to carry.

Tensors are regions of memory. Those that overlap are views of one storage and have to arrive as
views of one storage, so they travel as one *span*; those that do not overlap travel alone, even if
they come from the same storage: two rows of a large table are two small spans, never the table.

Only addresses are looked at, not storage objects: that is quicker, and it also sees that two
tensors made by `torch.from_numpy` from one array share their memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Region", "Span", "bytes_spanned", "memory_at", "shared_spans"]

Region = tuple[int, int, int, torch.Tensor]
"""First address, address after the last byte, index of the table's entry, and the tensor."""

Span = tuple[int, int, torch.Tensor]
"""First address, address after the last byte, and a tensor whose storage covers them."""

_ALIGNMENT = 16  # the largest element torch has: complex128


def bytes_spanned(tensor: torch.Tensor) -> int:
    """From the first to the last byte that a strided tensor touches (it has elements)."""
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return (last + 1) * tensor.itemsize


def shared_spans(regions: Sequence[Region]) -> dict[int, Span]:
    """The spans of those regions that overlap others, by the index of their entries."""
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
            _join(group, end, shared)
        if region is not None:
            group = [region]
            end = region[1]
    return shared


def _join(group: list[Region], end: int, shared: dict[int, Span]) -> None:
    start = group[0][0]
    if any((first - start) % tensor.itemsize for first, _, _, tensor in group):
        # Views of several element sizes: begin a little earlier, where all offsets are whole
        # elements again. Offsets in a storage are whole elements, so this lies within it.
        base = group[0][3].untyped_storage().data_ptr()
        start -= (start - base) % _ALIGNMENT
    for _, _, _, owner in group:
        storage = owner.untyped_storage()
        base = storage.data_ptr()
        if base <= start and end <= base + storage.nbytes():
            break
    else:
        # Foreign memory that no single storage covers (slices of one numpy array): each alone.
        return
    for first, _, index, tensor in group:
        if (first - start) % tensor.itemsize == 0:
            shared[index] = (start, end, owner)


def memory_at(address: int, size: int, owner: torch.Tensor) -> memoryview:
    """The bytes at `address`, which lie in the storage of `owner`; the view keeps it alive."""
    storage = owner.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the default is
    raw.set_(storage, address - storage.data_ptr(), (size,), (1,))
    return memoryview(raw.numpy())  # type: ignore[arg-type]
