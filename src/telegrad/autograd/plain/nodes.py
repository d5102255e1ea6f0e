"""The autograd nodes of a remote call.

At the caller a call is two nodes, joined by an empty tensor, the *token*::

    arguments ── Collect ── token ── Post ── results

`Collect` is made when the call leaves, `Post` when the reply has come. On the way back, `Post`
sends the gradients of the results and does not wait. `Collect`, whose sequence number 0 makes
torch's engine run it only when nothing else is ready, waits for the gradients of the arguments. So
all remote parts of a pass run side by side, and beside the local part.

At the callee the tensors that came with the call are the outputs of a `Received` node. A `Stub`
stands for the `Received` node of a call that somebody further up the tree of calls has made.

A pass that is to accumulate into leaves (`backward`) is told from one that is not (`grad`,
`inputs=`) by the *anchor*, a leaf that hangs on every `Collect`: the engine is asked whether it
will run the anchor's accumulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from telegrad.autograd.contexts.message_nodes import current_wave
from telegrad.autograd.torch_internals import (
    AccumulateGrad,
    apply_of,
    are_transforms_active,
    keeps_graph,
    node_type_of,
    set_sequence_number,
    will_run,
)
from telegrad.errors import BackwardError, TelegradError

if TYPE_CHECKING:
    from telegrad.autograd.plain.record import Record
    from telegrad.autograd.plain.segments import Begin, End

__all__ = [
    "EMPTY",
    "CollectNode",
    "PostNode",
    "ReceivedNode",
    "StubNode",
    "accumulates",
    "apply_collect",
    "apply_post",
    "apply_received",
    "apply_stub",
    "is_sink",
    "keeps_graph",
    "refuse_transforms",
    "will_run",
]

_anchor = torch.zeros((), requires_grad=True)
_anchor_node = get_gradient_edge(_anchor).node
_ground = torch.zeros((), requires_grad=True)
"""Sinks hang on it, not on the anchor: a run that leads to the anchor would take them in."""
EMPTY = torch.zeros(0)


def accumulates() -> bool:
    """Whether the pass that runs on this thread gives leaves their gradients."""
    return will_run(_anchor_node)


class _Received(Function):
    @staticmethod
    def forward(
        ctx: Any, call: int, note: object, ground: Tensor, tensors: Sequence[Tensor]
    ) -> Any:
        ctx.call, ctx.note = call, note
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        from telegrad.autograd.plain.passes import current_served_run

        run = current_served_run()
        if run is None:
            raise BackwardError(
                "a backward pass that began inside of a remotely called function has reached what "
                "came with the call; use torch.autograd.grad with inputs=, or detach what the "
                "function needs for itself"
            )
        run.one.found[ctx.call] = list(grads)
        return None, None, None, None


class _Stub(Function):
    @staticmethod
    def forward(ctx: Any, call: int, ground: Tensor) -> Tensor:
        ctx.call = call
        return torch.zeros(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, None


class _Collect(Function):
    @staticmethod
    def forward(ctx: Any, record: Record, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.record = record
        ctx.set_materialize_grads(False)
        return torch.zeros(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> Any:
        return None, None, *ctx.record.collect()


class _Post(Function):
    @staticmethod
    def forward(
        ctx: Any, record: Record, note: object, results: Sequence[Tensor], *tokens: Tensor
    ) -> Any:
        ctx.record, ctx.note, ctx.tokens = record, note, len(tokens)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if current_wave() is not None:
            raise BackwardError(
                "the backward pass of an autograd context has reached a tensor that telegrad.call "
                "or a remote module has returned: call loss.backward() outside of contexts, or "
                "make the calls inside of the context by telegrad.rpc"
            )
        ctx.record.post(grads)
        return None, None, None, *[EMPTY] * ctx.tokens


ReceivedNode = node_type_of(_Received)
StubNode = node_type_of(_Stub)
CollectNode = node_type_of(_Collect)
PostNode = node_type_of(_Post)
_SINKS = (AccumulateGrad, ReceivedNode, StubNode)


def is_sink(node: Any) -> bool:
    """Whether a graph ends in it, as far as this worker is concerned."""
    return isinstance(node, _SINKS)


_apply_received, _apply_stub, _apply_collect, _apply_post = map(
    apply_of, (_Received, _Stub, _Collect, _Post)
)


def _apart(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Outputs of a node: none has a history, none is listed twice."""
    if len(set(map(id, tensors))) < len(tensors) or any(t.requires_grad for t in tensors):
        return [t.detach() for t in tensors]
    return tensors


def apply_received(call: int, note: object, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    with torch.enable_grad():
        outputs: tuple[Tensor, ...] = _apply_received(call, note, _ground, _apart(tensors))
    return outputs


def apply_stub(call: int) -> Tensor:
    stub: Tensor = _apply_stub(call, _ground)
    return stub


def refuse_transforms() -> None:
    if are_transforms_active():
        raise TelegradError(
            "torch.func transforms (grad, vmap, jvp, ...) do not go through calls on other "
            "workers: use torch.autograd.grad, or apply the transform inside of the called function"
        )


def apply_collect(record: Record | Begin, tensors: Sequence[Tensor], *, turn: int = 0) -> Tensor:
    """The token of a call.

    Args:
        turn: among such nodes, the highest runs first.
    """
    token: Tensor = _apply_collect(record, _anchor, *tensors)
    set_sequence_number(token.grad_fn, turn)  # else the remote parts of a pass wait for one another
    return token


def apply_post(
    record: Record | End, note: object, results: Sequence[Tensor], tokens: Sequence[Tensor]
) -> Sequence[Tensor]:
    """
    Args:
        note: dies with the node.
    """
    with torch.enable_grad():
        outputs: tuple[Tensor, ...] = _apply_post(record, note, _apart(results), *tokens)
    return outputs
