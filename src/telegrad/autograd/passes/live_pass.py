"""What travels in a pass, and what a worker keeps of one while it lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from telegrad.autograd.contexts.context import DistAutogradContext, check_context_id
from telegrad.autograd.local.local_pass import LocalPass
from telegrad.autograd.passes.protocol import (
    Credit,
    PassControl,
    PassShare,
    Reports,
)
from telegrad.drop_in import torch_phrase
from telegrad.errors import BackwardError
from telegrad.ids import worker_of
from telegrad.rpc.connections.conversation import Interruption
from telegrad.rpc.references.rref import RRef

__all__ = [
    "Arrival",
    "LivePass",
    "check_roots",
    "pack_credit",
    "tensors_of",
    "unpack_credit",
]


def pack_credit(credit: Credit) -> tuple[int, int]:
    return (credit.numerator, credit.denominator)


def unpack_credit(packed: tuple[int, int]) -> Credit:
    return packed[0] if packed[1] == 1 else Fraction(*packed)


class LivePass:
    """One pass on one worker."""

    __slots__ = (
        "caller_thread",
        "context",
        "control",
        "create_graph",
        "error",
        "id",
        "interruption",
        "is_driven_by_caller",
        "is_over",
        "local",
        "retain_graph",
        "share",
    )

    def __init__(
        self,
        pass_id: int,
        context: DistAutogradContext,
        worker: int,
        *,
        retain_graph: bool,
        create_graph: bool,
        control: PassControl | None = None,
    ) -> None:
        self.id = pass_id
        self.context = context
        self.retain_graph = retain_graph
        self.create_graph = create_graph
        self.share = PassShare(worker, control)
        self.local = LocalPass(
            context.sends.copy(),
            retain_graph=retain_graph,
            create_graph=create_graph,
            context_id=context.id,
        )
        # At the initiator only:
        self.control = control
        self.is_over = False
        self.error: BaseException | None = None
        self.is_driven_by_caller = False
        self.caller_thread: int | None = None
        self.interruption: Interruption | None = None

    @property
    def initiator(self) -> int:
        return worker_of(self.id)

    def finish(self, error: BaseException | None) -> None:
        """The pass is over, at its initiator: `backward` returns, or raises this."""
        context = self.context
        with context.lock:
            context.passes.pop(self.id, None)
            if not self.is_over:
                self.error = error
                self.is_over = True
                context.notify()
        if error is not None and self.interruption is not None:
            self.interruption.interrupt()


@dataclass(slots=True)
class Arrival:
    """Something that makes a worker work: roots, gradients of a send function, or a strike."""

    into: LivePass
    credit: Credit
    reports: Reports
    roots: Sequence[torch.Tensor] = ()
    message_id: int = -1
    gradients: list[torch.Tensor | None] | None = None
    live: frozenset[int] | None = None


def check_roots(context_id: object, roots: object) -> None:
    """
    Raises:
        TypeError: they are not a context's id and a list of tensors.
        BackwardError: a root cannot be differentiated.
    """
    tensors = tensors_of("backward", context_id, roots)
    if not tensors:
        raise BackwardError(
            "backward(): roots is empty: write backward(context_id, [loss])"
            + torch_phrase("No tensors provided for gradient computation.")
        )
    for number, root in enumerate(tensors):
        name = f"root {number} (the loss)" if len(tensors) == 1 else f"root {number}"
        if not root.requires_grad:
            raise BackwardError(
                f"{name} does not depend on anything that requires grad: are all parameters "
                "frozen, or was it computed under no_grad() or from detach()ed tensors?"
                + torch_phrase(f"requires_grad not set on root {number}")
            )
        if root.numel() != 1:
            raise BackwardError(
                f"{name} must be a scalar, and has the shape {tuple(root.shape)}: reduce it by "
                "sum() or mean()"
                + torch_phrase(f"root {number} is not a scalar, all roots need to be scalar")
            )
        if root.is_complex():
            raise BackwardError(
                f"{name} must be real, and is of {root.dtype}: take its abs() or .real"
                + torch_phrase(f"root {number} is complex, all roots need to be real")
            )
        if root.grad_fn is None:
            raise BackwardError(
                f"{name} is a leaf: nothing leads from it to parameters. If it came from another "
                "worker, make that call inside of the context"
                + torch_phrase(f"root {number} does not have a valid gradient function")
            )


def tensors_of(caller: str, context_id: object, roots: object) -> Sequence[torch.Tensor]:
    """What a program gave as roots, if they are tensors.

    Raises:
        TypeError: they are not a context's id and a list of tensors.
    """
    phrase = torch_phrase(
        "incompatible function arguments: expected (context_id: int, roots: list[Tensor], "
        f"retain_graph: bool = False), got ({type(context_id).__name__}, {type(roots).__name__})"
    )
    check_context_id(context_id, phrase)
    if not isinstance(roots, (list, tuple)):
        raise TypeError(
            f"{caller}(): roots must be a list of tensors, got a {type(roots).__name__}: write "
            f"{caller}(context_id, [loss]){phrase}"
        )
    for number, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            what = f"must be a tensor, got a {type(root).__name__}"
            if isinstance(root, torch._C.Future):
                what = "is a future: call .wait() on it first"
            elif isinstance(root, RRef):
                what = "is an RRef: call .to_here() on it first, or rref.backward(context_id)"
            raise TypeError(f"{caller}(): roots[{number}] {what}{phrase}")
    return roots
