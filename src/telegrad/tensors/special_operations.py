"""Operations on remote tensors that are more than one message to the worker, or less.

A copy may come from another worker, `detach` and the like need no message, and random numbers are
drawn in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from telegrad.tensors.fetching import fetch_one
from telegrad.tensors.operations import plan_of
from telegrad.tensors.remote_tensor import (
    RemoteTensor,
    is_staying_there,
    operate,
    send,
    specials,
)
from telegrad.tensors.stream import stream_of_device

__all__: list[str] = []

_aten = torch.ops.aten


def _detach(tensor: RemoteTensor) -> RemoteTensor:
    return RemoteTensor(tensor.handle, tensor.spec)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, RemoteTensor):
        assert isinstance(source, RemoteTensor)
        return target.copy_(fetch_one(source))
    if isinstance(source, RemoteTensor) and source.handle.stream is not target.handle.stream:
        source = fetch_one(source)
    copied: Tensor = operate(plan_of(_aten.copy_.default), (target, source), {})
    return copied


def _to_copy(tensor: RemoteTensor, *, device: torch.device | None = None, **options: Any) -> Tensor:
    if device is None or device == tensor.device or (is_staying_there() and device.type == "cpu"):
        converted: Tensor = operate(plan_of(_aten._to_copy.default), (tensor,), options)
        return converted
    if device.type != "cpu":
        raise RuntimeError(
            f"a tensor on worker {tensor.worker!r} cannot be moved to {device}: use .cpu() for a "
            "copy here, or let the module choose its device on the worker"
        )
    here = fetch_one(tensor).to(dtype=options.get("dtype") or tensor.dtype)
    return here if device.index is None else send(stream_of_device(device), here)


def _drawn_here(draw: Any) -> Callable[..., Tensor]:
    """An operation that overwrites a tensor with random numbers, which come from this process."""

    def run(tensor: RemoteTensor, *args: Any, **kwargs: Any) -> Tensor:
        here = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return tensor.copy_(draw(here, *args, **kwargs))

    return run


def _in_place(view: Any) -> Callable[..., Tensor]:
    """An operation that changes a tensor's shape in place, and not its memory: the tensor becomes
    what `view` makes of it. torch's own functions use them (`matmul`: `squeeze_`)."""

    def run(tensor: RemoteTensor, *args: Any) -> Tensor:
        new: RemoteTensor = operate(plan_of(view), (tensor, *args), {})
        torch._C.TensorBase.data.__set__(tensor, new)  # type: ignore[attr-defined]
        tensor.handle, tensor.spec = new.handle, new.spec
        return tensor

    return run


specials.update(
    {
        _aten.copy_.default: _copy,
        _aten._to_copy.default: _to_copy,
        _aten.detach.default: _detach,
        _aten.squeeze_.default: _in_place(_aten.squeeze.default),
        _aten.squeeze_.dim: _in_place(_aten.squeeze.dim),
        _aten.squeeze_.dims: _in_place(_aten.squeeze.dims),
        _aten.unsqueeze_.default: _in_place(_aten.unsqueeze.default),
        _aten.transpose_.default: _in_place(_aten.transpose.int),
        _aten.t_.default: _in_place(_aten.t.default),
        **{
            draw: _drawn_here(draw)
            for draw in (
                _aten.normal_.default,
                _aten.uniform_.default,
                _aten.bernoulli_.float,
                _aten.exponential_.default,
                _aten.random_.default,
                _aten.random_.to,
                getattr(_aten.random_, "from"),
            )
        },
    }
)
