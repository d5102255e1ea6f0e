"""Reentrant checkpoints inside a pass.

A checkpoint of `torch.utils.checkpoint` with `use_reentrant=True` runs its function again when its
gradients come, and then a backward pass of its own through the result. What this inner pass finds
at leaves that the function uses, such as parameters, would end in `.grad` instead of the context.
So when the function has run again, the wave that runs the checkpoint takes over its leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from telegrad.autograd.contexts.context import EnteredContext
from telegrad.autograd.contexts.message_nodes import current_wave
from telegrad.autograd.local.walks import walk
from telegrad.autograd.torch_internals import CheckpointNode
from telegrad.errors import BackwardError

__all__ = ["Checkpoints"]

_attending = threading.RLock()  # guards `run_function` of all nodes, and `carers`


class _Attended:
    """Replaces the function of a checkpoint. Waves of several contexts, and plain backward calls,
    may run through one node at the same time: each wave takes care of its own run."""

    __slots__ = ("carers", "function")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.carers: dict[Any, Checkpoints] = {}  # by their waves

    def __call__(self, *inputs: Any) -> Any:
        carer = self.carers.get(current_wave())
        if carer is None:
            return self.function(*inputs)
        with EnteredContext(carer.context_id):
            outputs = self.function(*inputs)
        carer.has_run_again(inputs, outputs)
        return outputs


class Checkpoints:
    """The reentrant checkpoints of one wave.

    Args:
        context_id: the context of the pass.
        on_leaf: called with the AccumulateGrad node of each leaf that an inner pass will reach, for
            some more than once.
    """

    def __init__(self, wave: object, context_id: int, on_leaf: Callable[[Any], None]) -> None:
        self._wave = wave
        self.context_id = context_id
        self._on_leaf = on_leaf
        self._nodes: list[Any] = []

    def attend(self, nodes: Iterable[Any]) -> None:
        """Takes care of the checkpoints among these nodes until `leave`."""
        for node in nodes:
            if type(node) is CheckpointNode:
                self._nodes.append(node)
                with _attending:
                    if type(node.run_function) is not _Attended:
                        node.run_function = _Attended(node.run_function)
                    node.run_function.carers[self._wave] = self

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def leave(self) -> None:
        for node in self._nodes:
            with _attending:
                attended = node.run_function
                if type(attended) is _Attended:
                    attended.carers.pop(self._wave, None)
                    if not attended.carers:
                        node.run_function = attended.function

    def has_run_again(self, inputs: Iterable[Any], outputs: Any) -> None:
        """The function of a checkpoint has run again; the pass through its result begins next."""
        tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
        edges = [
            torch.autograd.graph.get_gradient_edge(tensor)
            for tensor in tensors
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        ]
        inner = walk(edges)
        if inner.recvs:  # the inner pass would have to wait for their gradients
            raise BackwardError(
                "a reentrant checkpoint's function calls another worker, which is not supported in "
                "a distributed backward pass: use checkpoint(..., use_reentrant=False)"
            )
        given = {id(tensor) for tensor in inputs}  # the checkpoint takes these gradients itself
        for node in inner.leaves:
            if id(node.variable) not in given:
                self._on_leaf(node)
        self.attend(inner.nodes)  # checkpoints may be nested
