"""The two ends of a message in the autograd graph.

A message whose tensors require grad is an edge of the distributed graph. Its sender keeps a send
function, whose next functions are the histories of those tensors; its receiver gets one
`RecvRpcBackward` node, whose outputs are the tensors it received. Whoever walks the graph sees what
upstream shows, by upstream's names.

A recv node is an ordinary `torch.autograd.Function` node. A send function is only a record: nothing
in torch leads to it, since a pass enters the graph at its next functions, and a node of torch's
would take ten times longer to make.

Python nodes are owned by the C++ side: the node object alone keeps nothing alive. A C++ node keeps
alive what it leads to, Python nodes among them, and its object keeps the node. So who must keep a
Python node keeps something that leads to it and has no memory of its own: the node of a view of
its output, or one output more than the user sees, an empty tensor (`token`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from telegrad.autograd.thread_state import peek, stash
from telegrad.errors import BackwardError

__all__ = [
    "AccumulateGrad",
    "Received",
    "RecvNode",
    "SendFunction",
    "current_wave",
    "enter_wave",
    "is_watched",
    "recv_history",
    "send_history",
]

AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The type of the node that ends a graph in a leaf."""

_CURRENT_WAVE = "telegrad.autograd.wave"


def enter_wave(wave: Any) -> Any:
    """Makes `wave` the one that runs on this thread; returns the one before, to be given back."""
    before = peek(_CURRENT_WAVE, None)
    stash(_CURRENT_WAVE, wave)
    return before


def current_wave() -> Any:
    """The wave that runs on this thread, or None."""
    return peek(_CURRENT_WAVE, None)


class _Edges(torch.autograd.Function):
    """Leads to all of its inputs, and has no memory."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise BackwardError("a send function takes its gradients from the network only")


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Any:
        ctx.materialize_grads = False
        return (*tensors, _empty.detach())


def _recv_reached(node: Any, *grads: torch.Tensor | None) -> tuple[None, None]:
    """What a recv node does when torch's engine runs it."""
    wave = peek(_CURRENT_WAVE, None)
    if wave is None:
        raise BackwardError(
            "this tensor came from another worker: its gradient can only go back there in a "
            "distributed pass; call telegrad.autograd.backward(context_id, [loss]) instead of "
            "loss.backward()"
        )
    wave.recv_reached(node, grads)
    return None, None


class Received(NamedTuple):
    """What a recv node stands for."""

    message_id: int
    source: int
    size: int


class SendFunction:
    """A message that was sent: where the gradients of its tensors go, and to whom it went."""

    __slots__ = ("_grads", "_owner", "is_spent", "next_functions", "to")

    def __init__(self, edges: tuple[tuple[Any, int], ...], owner: object, to: int) -> None:
        self.next_functions = edges
        self._owner = owner  # keeps the nodes of the edges
        self.to = to
        self.is_spent = False
        """It has run in a pass that freed its graph: no later pass needs to wait for it."""
        self._grads: Sequence[torch.Tensor | None] = ()

    def name(self) -> str:
        return "torch::distributed::autograd::SendRpcBackward"

    def set_grads(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Gives it what came from the network, for whoever calls it by hand."""
        self._grads = tuple(grads)

    def __call__(self, *inputs: object) -> Sequence[torch.Tensor | None]:
        if inputs:
            raise BackwardError(
                f"{self.name()} takes no inputs: it is the start of a worker's part of the pass"
            )
        if not self._grads or any(grad is None for grad in self._grads):
            raise BackwardError(f"{self.name()} got an undefined gradient")
        return self._grads

    def __repr__(self) -> str:
        return f"<{self.name()} to worker {self.to}>"


RecvNode: Any = _Recv._backward_cls
"""The type of a recv node."""
RecvNode.__name__ = "torch::distributed::autograd::RecvRpcBackward"
RecvNode.is_hooked = False
RecvNode.apply = _recv_reached  # right away, without what torch does for functions in general


def _noting_hooks(name: str) -> Callable[..., Any]:
    register = getattr(RecvNode, name)

    @functools.wraps(register)
    def register_and_note(node: Any, *args: Any) -> Any:
        node.is_hooked = True
        return register(node, *args)

    return register_and_note


for _name in ("register_hook", "register_prehook", "_register_hook_dict"):  # all ways there are
    setattr(RecvNode, _name, _noting_hooks(_name))


def is_watched(node: Any) -> bool:
    """Whether anybody sees a recv node run: by a hook on it or on one of its tensors, or by
    `retain_grad`. If not, what enters it may go on without torch's engine."""
    if node.is_hooked:
        return True
    return any(tensor is not None and tensor.retains_grad for tensor in map(_call, node.outputs))


def _call(reference: Callable[[], Any]) -> Any:
    return reference()


# The C++ function itself: what `Function.apply` does before it is for functorch's transforms.
_apply_recv: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Recv).apply

_trigger = torch.zeros((), requires_grad=True)
"""Makes the outputs of a recv node require grad. Never gets a gradient."""
_empty = torch.empty(0)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PythonNode = torch.autograd.function.BackwardCFunction


def send_history(tensors: Sequence[torch.Tensor], to: int) -> SendFunction:
    """The send function of `tensors`, which all require grad."""
    edges: list[tuple[Any, int]] = []
    owners: list[object] = []
    for tensor in tensors:
        node: Any = tensor.grad_fn
        if node is None or isinstance(node, _PythonNode):
            if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
                return _send_history_of_any(tensors, to)
            if torch.is_grad_enabled():
                view = tensor.view_as(tensor)
            else:
                with torch.enable_grad():
                    view = tensor.view_as(tensor)
            owner: Any = view.grad_fn
            owners.append(owner)
            edges.append(owner.next_functions[0])
        else:
            edges.append((node, tensor.output_nr))
    return SendFunction(tuple(edges), owners, to)


def _send_history_of_any(tensors: Sequence[torch.Tensor], to: int) -> SendFunction:
    """The same for tensors of which there may be no view: sparse ones, subclasses."""
    with torch.enable_grad():
        token = _Edges.apply(*tensors)  # type: ignore[no-untyped-call]
    return SendFunction(token.grad_fn.next_functions, token, to)


def recv_history(
    message_id: int, source: int, tensors: Sequence[torch.Tensor]
) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    """One recv node over `tensors`: the node, its token, and the tensors with their new history."""
    for number, tensor in enumerate(tensors):
        # An output must be a tensor of its own: not one with a history, not one listed twice.
        if tensor.requires_grad or (number and any(tensor is t for t in tensors[:number])):
            tensors = [tensor.detach() for tensor in tensors]
            break
    if torch.is_grad_enabled():
        *outputs, token = _apply_recv(_trigger, tensors)
    else:
        with torch.enable_grad():
            *outputs, token = _apply_recv(_trigger, tensors)
    node: Any = token.grad_fn
    node.received = Received(message_id, source, len(outputs))
    node.outputs = [weakref.ref(output) for output in outputs]
    return node, token, outputs
