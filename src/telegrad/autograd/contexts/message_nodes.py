"""The two ends of a message in the autograd graph.

A message whose tensors require grad is an edge of the distributed graph. Its sender keeps a send
function, whose next functions are the histories of those tensors. Its receiver gets one
`RecvRpcBackward` node, whose outputs are the received tensors. Both have the names and attributes
of torch's RPC, so code that walks the graph sees what it sees there.

A recv node is an ordinary `torch.autograd.Function` node. A send function is only a record: a pass
enters the graph at its next functions, and creating a node would take ten times longer.

The Python object of a node keeps the node and what it leads to alive, but not the memory of its
outputs.

Leaves need care. torch looks up a leaf's AccumulateGrad node in every operation on the leaf, under
the leaf's mutex. A new node takes a reference to the leaf, and a node that only its Python object
keeps alive takes one to that object. Either may need the interpreter lock, which torch then waits
for while it holds the mutex. If the thread with the interpreter lock waits for the mutex, the
process deadlocks. So

- the node is looked up only by code that releases the interpreter lock: operations and functions
  in C++, but not the `apply` of a Python function (a program's own functions can deadlock this
  way too: see "Threads and your own functions" in the reference);
- a leaf that is a view is not asked for its `grad_fn`, or whether it is a leaf: torch takes the
  mutex for these as well;
- the node's object is never kept alone, but together with a C++ node that leads to it.
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
from telegrad.autograd.torch_internals import (
    COUNTING_HOOK,
    REGISTER_HOOK,
    apply_of,
    delayed_error,
    node_type_of,
    set_tensor_hooks,
)
from telegrad.errors import BackwardError
from telegrad.wire.tensor_table.layout import is_leaf

if TYPE_CHECKING:
    from telegrad.autograd.local.walks import Graph

__all__ = [
    "Received",
    "RecvNode",
    "SendFunction",
    "current_wave",
    "enter_wave",
    "is_watched",
    "recv_history",
]

_CURRENT_WAVE = "telegrad.autograd.wave"


enter_wave: Callable[[Any], None] = functools.partial(stash, _CURRENT_WAVE)
"""Makes a wave the one that runs on this thread."""

current_wave: Callable[[], Any] = functools.partial(peek, _CURRENT_WAVE, None)
"""The wave that runs on this thread, or None."""


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Any:
        ctx.materialize_grads = False
        return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _recv_reached(node: Any, *grads: torch.Tensor | None) -> tuple[None, None]:
    """What torch's engine calls when it runs a recv node."""
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
    """What a recv node stands for: a message, its sender, and weak references to its tensors."""

    message_id: int
    source: int
    outputs: Sequence[Callable[[], torch.Tensor | None]]


class SendFunction:
    """A sent message: where the gradients of its tensors go.

    Args:
        tensors: they all require grad. Of those with a history, only the history is kept.
        to: the worker that received the message.
    """

    __slots__ = ("_edges", "_grads", "_kept", "_targets", "graph", "is_of_leaves", "is_spent", "to")

    def __init__(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        self.to = to
        self.is_of_leaves = True
        self.is_spent = False
        """It has run in a pass that freed its graph: later passes do not wait for it."""
        self.graph: Graph | None = None
        """What lies behind it, once that has been walked."""
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
        """The edges that gradients leave by. The edges of leaves take a while to find, so they are
        found on first use, which may be while gradients are awaited."""
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
        """Sets what a call by hand returns."""
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


RecvNode: Any = node_type_of(_Recv)
"""The type of a recv node."""
RecvNode.__name__ = "torch::distributed::autograd::RecvRpcBackward"
RecvNode.is_hooked = False
RecvNode.apply = _recv_reached  # called by the engine, without torch's steps for functions


def _noting_hooks(name: str) -> Callable[..., Any]:
    register = getattr(RecvNode, name)

    @functools.wraps(register)
    def register_and_note(node: Any, *args: Any) -> Any:
        node.is_hooked = True
        return register(node, *args)

    return register_and_note


for _name in REGISTER_HOOK:
    setattr(RecvNode, _name, _noting_hooks(_name))


class _TensorHooks(collections.OrderedDict[int, Callable[..., Any]]):
    """The hooks of a received tensor. When a node runs, torch calls the tensor hooks of all its
    outputs, with None for an output without a gradient. But the tensors of a message are outputs of
    one node only at the receiver: in one process, a hook on a tensor that the loss does not use
    does not run, so it does not run here."""

    def __setitem__(self, id_: int, hook: Callable[..., Any]) -> None:
        # torch's hook on several tensors counts calls, including those with None.
        is_counting = getattr(hook, "__qualname__", "").startswith(COUNTING_HOOK)
        super().__setitem__(id_, hook if is_counting else functools.partial(_unless_none, hook))


def _unless_none(hook: Callable[[torch.Tensor], Any], gradient: torch.Tensor | None) -> Any:
    return None if gradient is None else hook(gradient)


_register_tensor_hooks = RecvNode._register_hook_dict


def _register_hook_dict(node: Any, tensor: torch.Tensor) -> Any:
    set_tensor_hooks(tensor, _TensorHooks)
    return _register_tensor_hooks(node, tensor)


RecvNode._register_hook_dict = _register_hook_dict


def is_watched(node: Any) -> bool:
    """Whether a hook or `retain_grad` shows that a recv node runs. If not, what enters it may be
    sent without torch's engine."""
    if node.is_hooked:
        return True
    for output in node.received.outputs:
        tensor = output()
        if tensor is not None and tensor.retains_grad:
            return True
    return False


_apply_recv = apply_of(_Recv)
_weak = weakref.ref
_trigger = torch.zeros((), requires_grad=True)
"""Makes the outputs of a recv node require grad. Never gets a gradient."""


_lead_to = delayed_error("a send function takes its gradients from the network only")
"""A C++ function that leads to its input and does nothing with it. Any tensor will do."""


def _function_of(leaf: torch.Tensor) -> Any:
    """A node that leads to the leaf's; None if the leaf no longer requires grad: as in torch, it
    gets no gradient then."""
    if not leaf.requires_grad or not is_leaf(leaf):
        return None
    if torch.is_grad_enabled():
        return _lead_to(leaf).grad_fn
    with torch.inference_mode(False), torch.enable_grad():
        return _lead_to(leaf).grad_fn


def recv_history(
    message_id: int, source: int, tensors: Sequence[torch.Tensor]
) -> tuple[Any, Sequence[torch.Tensor]]:
    """Makes one recv node over `tensors`, at least one; returns it and the tensors that are its
    outputs."""
    # A tensor with a history, or one that is listed twice, cannot be an output.
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
