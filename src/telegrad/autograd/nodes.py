"""The two ends of a message in the autograd graph.

A message whose tensors require grad is an edge of the distributed graph. Its sender keeps a
`SendRpcBackward` node, whose next functions are the histories of those tensors; its receiver gets
one `RecvRpcBackward` node, whose outputs are the tensors it received. Both are ordinary
`torch.autograd.Function` nodes, so whoever walks the graph sees what upstream shows, by upstream's
names.

Python nodes are owned by the C++ side: the node object alone keeps nothing alive. So each node has
one output more than the user sees, an empty tensor (`token`), and who must keep the node keeps the
token. It costs no memory, where an output that the user sees would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from telegrad.autograd.thread_state import peek, stash
from telegrad.errors import BackwardError

__all__ = ["AccumulateGrad", "Received", "RecvNode", "Sent", "recv_history", "send_history"]

AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The type of the node that ends a graph in a leaf."""

_CURRENT_WAVE = "telegrad.autograd.wave"


def enter_wave(wave: Any) -> Any:
    """Makes `wave` the one that runs on this thread; returns the one before, to be given back."""
    before = current_wave()
    stash(_CURRENT_WAVE, wave)
    return before


def current_wave() -> Any:
    """The wave that runs on this thread, or None."""
    return peek(_CURRENT_WAVE, None)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise BackwardError("a send function takes its gradients from the network only")


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Any:
        ctx.set_materialize_grads(False)
        return (*tensors, torch.empty(0))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        wave = current_wave()
        if wave is None:
            raise BackwardError(
                "this tensor came from another worker: its gradient can only go back there in a "
                "distributed pass; call telegrad.autograd.backward(context_id, [loss]) instead of "
                "loss.backward()"
            )
        wave.recv_reached(ctx, grads)
        return None, None


class Received(NamedTuple):
    """What a recv node stands for."""

    message_id: int
    source: int
    size: int


class Sent:
    """A send function as the engine keeps it: the node, what holds it, and where it leads."""

    __slots__ = ("edges", "is_spent", "node", "to", "token")

    def __init__(self, node: Any, token: torch.Tensor, to: int) -> None:
        self.node = node
        self.token = token
        self.edges: tuple[tuple[Any, int], ...] = node.next_functions
        self.to = to
        self.is_spent = False
        """It has run in a pass that freed its graph: no later pass needs to wait for it."""


def _refuse(node: Any, *inputs: Any) -> Any:
    if inputs:
        raise BackwardError(
            f"{node.name()} takes no inputs: it is the start of a worker's part of the pass"
        )
    if any(grad is None for grad in getattr(node, "_grads", (None,))):
        raise BackwardError(f"{node.name()} got an undefined gradient")
    return tuple(node._grads)


def _set_grads(node: Any, grads: Sequence[torch.Tensor | None]) -> None:
    node._grads = list(grads)


SendNode: Any = _Send._backward_cls
SendNode.__name__ = "torch::distributed::autograd::SendRpcBackward"
SendNode.__call__ = _refuse
SendNode.set_grads = _set_grads
RecvNode: Any = _Recv._backward_cls
"""The type of a recv node."""
RecvNode.__name__ = "torch::distributed::autograd::RecvRpcBackward"

_apply_send: Callable[..., torch.Tensor] = _Send.apply
_apply_recv: Callable[..., tuple[torch.Tensor, ...]] = _Recv.apply

_trigger = torch.zeros((), requires_grad=True)
"""Makes the outputs of a recv node require grad. Never gets a gradient."""


def send_history(tensors: Sequence[torch.Tensor], to: int) -> Sent:
    """The send function of `tensors`, which all require grad."""
    if torch.is_grad_enabled():
        token = _apply_send(*tensors)
    else:
        with torch.enable_grad():
            token = _apply_send(*tensors)
    return Sent(token.grad_fn, token, to)


def recv_history(
    message_id: int, source: int, tensors: Sequence[torch.Tensor]
) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    """One recv node over `tensors`: the node, its token, and the tensors with their new history."""
    fresh: list[torch.Tensor] = []
    for tensor in tensors:
        # An output must be a tensor of its own: not one with a history, not one listed twice.
        is_taken = tensor.requires_grad or any(tensor is other for other in fresh)
        fresh.append(tensor.detach() if is_taken else tensor)
    if torch.is_grad_enabled():
        *outputs, token = _apply_recv(_trigger, fresh)
    else:
        with torch.enable_grad():
            *outputs, token = _apply_recv(_trigger, fresh)
    node: Any = token.grad_fn
    node.received = Received(message_id, source, len(outputs))
    return node, token, outputs
