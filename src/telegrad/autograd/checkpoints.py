"""Reentrant checkpoints inside of a pass.

A checkpoint of `torch.utils.checkpoint` with `use_reentrant=True` runs its function again when its
gradients come, and then a backward pass of its own through that. What this inner pass finds at the
leaves that the function uses, parameters say, would end in `.grad`, and the context would never
hear of it. So when the function has run again, its leaves are told to the wave that the checkpoint
is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from telegrad.autograd.walks import walk

__all__ = ["CheckpointNode", "Checkpoints"]

CheckpointNode: Any = CheckpointFunction._backward_cls
"""The type of a reentrant checkpoint's node."""


class Checkpoints:
    """The reentrant checkpoints of one wave.

    Args:
        on_leaf: hears of each leaf that an inner pass will come to, by its AccumulateGrad node; of
            some more than once.
    """

    def __init__(self, on_leaf: Callable[[Any], None]) -> None:
        self._on_leaf = on_leaf
        self._functions: list[tuple[Any, Callable[..., Any]]] = []

    def attend(self, nodes: Iterable[Any]) -> None:
        """From now on, until `leave`, the checkpoints among these nodes are cared for."""
        for node in nodes:
            if type(node) is CheckpointNode:
                function = node.run_function
                self._functions.append((node, function))
                node.run_function = partial(self._run_again, function)

    def __bool__(self) -> bool:
        return bool(self._functions)

    def leave(self) -> None:
        for node, function in self._functions:
            node.run_function = function

    def _run_again(self, function: Callable[..., Any], *inputs: Any) -> Any:
        outputs = function(*inputs)
        tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
        edges = [
            torch.autograd.graph.get_gradient_edge(tensor)
            for tensor in tensors
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        ]
        inner = walk(edges)
        given = {id(tensor) for tensor in inputs}  # the checkpoint takes these gradients itself
        for node in inner.leaves:
            if id(node.variable) not in given:
                self._on_leaf(node)
        self.attend(inner.nodes)  # checkpoints may be nested
        return outputs
