"""What travels in a pass, and what a worker keeps of one while it lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from telegrad.autograd.context import DistAutogradContext
from telegrad.autograd.local_pass import LocalPass
from telegrad.autograd.pass_protocol import (
    Credit,
    PassControl,
    PassShare,
    Reports,
)
from telegrad.errors import BackwardError
from telegrad.ids import worker_of
from telegrad.rpc.conversation import Interruption

__all__ = [
    "Arrival",
    "LivePass",
    "check_roots",
    "pack_credit",
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


def check_roots(context_id: Any, roots: Any) -> None:
    """Raises what upstream raises for roots that cannot be differentiated."""
    if not isinstance(context_id, int) or not isinstance(roots, (list, tuple)):
        raise _not_understood(context_id, type(roots).__name__)
    if not roots:
        raise BackwardError("No tensors provided for gradient computation.")
    for number, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            given = f"{type(roots).__name__} with a {type(root).__name__} at {number}"
            raise _not_understood(context_id, given)
        if not root.requires_grad:
            raise BackwardError(f"requires_grad not set on root {number}")
        if root.numel() != 1:
            raise BackwardError(
                f"root {number} is not a scalar, all roots need to be scalar: it has the shape "
                f"{tuple(root.shape)}"
            )
        if root.is_complex():
            raise BackwardError(
                f"root {number} is complex, all roots need to be real: it has the type {root.dtype}"
            )
        if root.grad_fn is None:
            raise BackwardError(f"root {number} does not have a valid gradient function.")


def _not_understood(context_id: Any, roots: str) -> TypeError:
    return TypeError(
        "backward(): incompatible function arguments: expected (context_id: int, "
        "roots: list[Tensor], retain_graph: bool = False), got "
        f"({type(context_id).__name__}, {roots})"
    )
