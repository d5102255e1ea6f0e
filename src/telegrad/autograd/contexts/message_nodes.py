"""The two ends of a message in the autograd graph.

A message whose tensors require grad is an edge of the distributed graph. Its sender keeps a send
function, whose next functions are the histories of those tensors; its receiver gets one
`RecvRpcBackward` node, whose outputs are the tensors it received. Whoever walks the graph sees what
upstream shows, by upstream's names.

A recv node is an ordinary `torch.autograd.Function` node. A send function is only a record: nothing
in torch leads to it, since a pass enters the graph at its next functions, and a node of torch's
would take ten times longer to make.

A node's object keeps the node and what it leads to, but not the memory of its outputs: since
torch 2.13 that is so for Python nodes too.

Leaves need care. Torch looks a leaf's AccumulateGrad node up for every operation on the leaf, under
the leaf's mutex. If there is none, the one that it makes holds the leaf, and if there is one that
only its object in Python keeps, that object is held: either may need the interpreter lock, which
torch then waits for with the mutex in hand. A thread that has the interpreter lock and wants the
mutex would stand still for ever, and the process with it. So

- the node is looked up only by what lets go of the interpreter lock: operations and functions in
  C++, but not the `apply` of a Python function (a program's own can meet this as well: see "Threads
  and your own functions" in the reference);
- a leaf that is a view of another tensor is not asked for its `grad_fn`, or whether it is one, for
  which torch takes the mutex, too;
- nobody keeps the node by its object alone: something of torch's that leads to it is kept too.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from telegrad.autograd.thread_state import peek, stash
from telegrad.errors import BackwardError
from telegrad.wire.tensor_table.layout import is_leaf

if TYPE_CHECKING:
    from telegrad.autograd.local.walks import Graph

__all__ = [
    "AccumulateGrad",
    "Received",
    "RecvNode",
    "SendFunction",
    "current_wave",
    "enter_wave",
    "is_watched",
    "recv_history",
]

AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The type of the node that ends a graph in a leaf."""

_CURRENT_WAVE = "telegrad.autograd.wave"


enter_wave: Callable[[Any], None] = functools.partial(stash, _CURRENT_WAVE)
"""Makes a wave the one that runs on this thread, until the one before is put back."""

current_wave: Callable[[], Any] = functools.partial(peek, _CURRENT_WAVE, None)
"""The wave that runs on this thread, or None."""


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Any:
        ctx.materialize_grads = False
        return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _recv_reached(node: Any, *grads: torch.Tensor | None) -> tuple[None, None]:
    """What a recv node does when torch's engine runs it."""
    wave = current_wave()
    if wave is None:
        raise BackwardError(
            "this tensor came from another worker: its gradient can only go back there in a "
            "distributed pass; call telegrad.autograd.backward(context_id, [loss]) instead of "
            "loss.backward()"
        )
    wave.recv_reached(node, grads)
    return None, None


@dataclass(slots=True)
class Received:
    """What a recv node stands for: a message, from whom, and the tensors in it."""

    message_id: int
    source: int
    outputs: Sequence[Callable[[], torch.Tensor | None]]
    """Weak references."""


class SendFunction:
    """A message that was sent: where the gradients of its tensors go, and to whom it went.

    Args:
        tensors: they all require grad. Of those with a history only that is kept.
    """

    __slots__ = ("_edges", "_grads", "_kept", "_targets", "graph", "is_of_leaves", "is_spent", "to")

    def __init__(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        self.to = to
        self.is_of_leaves = True
        self.is_spent = False
        """It has run in a pass that freed its graph: no later pass needs to wait for it."""
        self.graph: Graph | None = None
        """What lies behind it, once somebody has looked."""
        self._targets: list[torch.Tensor | tuple[Any, int]] = []
        for tensor in tensors:
            if is_leaf(tensor):
                self._targets.append(tensor)
            else:
                self.is_of_leaves = False
                self._targets.append((tensor.grad_fn, tensor.output_nr))
        self._edges: tuple[tuple[Any, int], ...] | None = None
        self._kept: list[object] = []  # lead to the leaves' nodes
        self._grads: Sequence[torch.Tensor | None] = ()

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """The edges that gradients leave by. That of a leaf takes a while to find: it is looked for
        when it is asked for, which may be when there is time, while gradients are awaited."""
        if self._edges is None:
            edges: list[tuple[Any, int]] = []
            for target in self._targets:
                if isinstance(target, tuple):
                    edges.append(target)
                    continue
                function = _function_of(target)
                if function is None:
                    edges.append((None, 0))
                else:
                    self._kept.append(function)
                    edges.append(function.next_functions[0])
            self._edges = tuple(edges)
        return self._edges

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


class _TensorHooks(collections.OrderedDict[int, Callable[..., Any]]):
    """The hooks of a received tensor. Torch calls all tensor hooks of a node that runs, with None
    for an output without a gradient. But the tensors of a message are one node's outputs here only:
    at the sender, a hook on a tensor that has no part in the loss does not run."""

    def __setitem__(self, id_: int, hook: Callable[..., Any]) -> None:
        # Torch's hook for several tensors counts the calls for each node that runs.
        is_counting = getattr(hook, "__qualname__", "").startswith(_COUNTING)
        super().__setitem__(id_, hook if is_counting else functools.partial(_unless_none, hook))


_COUNTING = "register_multi_grad_hook.<locals>.get_inner_hook"


def _unless_none(hook: Callable[[torch.Tensor], Any], gradient: torch.Tensor | None) -> Any:
    return None if gradient is None else hook(gradient)


_register_tensor_hooks = RecvNode._register_hook_dict


def _register_hook_dict(node: Any, tensor: torch.Tensor) -> Any:
    tensor._backward_hooks = _TensorHooks(tensor._backward_hooks or ())
    return _register_tensor_hooks(node, tensor)


RecvNode._register_hook_dict = _register_hook_dict


def is_watched(node: Any) -> bool:
    """Whether anybody sees a recv node run: by a hook on it or on one of its tensors, or by
    `retain_grad`. If not, what enters it may go on without torch's engine."""
    if node.is_hooked:
        return True
    for output in node.received.outputs:
        tensor = output()
        if tensor is not None and tensor.retains_grad:
            return True
    return False


# The C++ function itself: what `Function.apply` does before it is for functorch's transforms.
_apply_recv: Callable[..., Any] = super(torch.autograd.Function, _Recv).apply

_weak = weakref.ref
_trigger = torch.zeros((), requires_grad=True)
"""Makes the outputs of a recv node require grad. Never gets a gradient."""


_lead_to: Callable[[torch.Tensor], torch.Tensor] = torch._C._functions.DelayedError(
    "a send function takes its gradients from the network only", 1
)
"""A function of torch's that leads to its input and does nothing with it. Any tensor will do."""


def _function_of(leaf: torch.Tensor) -> Any:
    """A node that leads to the leaf's; None if it requires grad no more: it gets no gradient then,
    as in torch."""
    if not leaf.requires_grad or not is_leaf(leaf):
        return None
    if torch.is_grad_enabled():
        return _lead_to(leaf).grad_fn
    with torch.inference_mode(False), torch.enable_grad():
        return _lead_to(leaf).grad_fn


def recv_history(
    message_id: int, source: int, tensors: Sequence[torch.Tensor]
) -> tuple[Any, Sequence[torch.Tensor]]:
    """One recv node over `tensors`, of which there is at least one: the node, and the tensors with
    their new history."""
    # An output must be a tensor of its own: not one with a history, not one listed twice.
    is_one_twice = len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors)
    for tensor in tensors:
        if is_one_twice or tensor.requires_grad:
            tensors = [tensor.detach() for tensor in tensors]
            break
    if torch.is_grad_enabled():
        outputs = _apply_recv(_trigger, tensors)
    else:
        with torch.enable_grad():
            outputs = _apply_recv(_trigger, tensors)
    if len(tensors) == 1:
        node = outputs.grad_fn
        node.received = Received(message_id, source, (_weak(outputs),))
        return node, (outputs,)
    node = outputs[0].grad_fn
    node.received = Received(message_id, source, tuple(map(_weak, outputs)))
    return node, outputs
