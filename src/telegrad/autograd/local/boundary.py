"""Nodes on the boundary between what may run in a wave and what must wait.

Where a ready node has an edge into a node that must wait, the gradient of that edge is kept until
the other node is ready. torch's engine does not compute such an edge, because nothing that was
asked for lies behind it. So a hook after the node calls the node once more, on a thread where no
engine runs: there it computes all its edges. Only C++ nodes are called twice. They have no side
effects, unless saved-tensor hooks add some: then the second call may fail, and the error says why.
Python nodes compute all their edges anyway. A call by hand skips the engine's checks, so the
gradient is brought into the shape and type of its edge here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from telegrad.autograd.contexts.message_nodes import current_wave
from telegrad.autograd.local.unwatched import OwnHook
from telegrad.autograd.torch_internals import input_metadata
from telegrad.errors import BackwardError
from telegrad.threads import heed_num_threads

__all__ = ["SilencedHooks", "call_elsewhere", "fit"]

_silencing = threading.RLock()  # guards which hooks are silenced, and in which waves


class SilencedHooks:
    """The program's hooks after a node on the boundary. The engine would show them only some of the
    gradients, so this wave calls them itself, with all of them."""

    def __init__(self, wave: object, own: Any) -> None:
        self._wave = wave
        self._hooks: dict[int, Any] = own.hooks_dict_ref()
        self._others: dict[int, _Silenced] = {}
        with _silencing:
            for id_, hook in tuple(self._hooks.items()):
                if type(hook) is not OwnHook:
                    silenced = hook if type(hook) is _Silenced else _Silenced(hook)
                    silenced.waves.append(wave)
                    self._others[id_] = self._hooks[id_] = silenced

    def __bool__(self) -> bool:
        return bool(self._others)

    def run(
        self, out: Sequence[torch.Tensor | None], entered: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """What leaves the node after the hooks. One that another hook has just removed runs too,
        as in torch."""
        for silenced in self._others.values():
            changed = silenced.hook(tuple(out), tuple(entered))
            if changed is not None:
                out = changed if isinstance(changed, tuple) else (changed,)
        return out

    def restore(self) -> None:
        with _silencing:
            for id_, silenced in self._others.items():
                silenced.waves.remove(self._wave)
                if not silenced.waves and id_ in self._hooks:
                    self._hooks[id_] = silenced.hook


class _Silenced:
    """A hook that the engine does not run in some waves, and runs as usual in all other passes."""

    __slots__ = ("hook", "waves")

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.waves: list[object] = []

    def __call__(self, *gradients: Any) -> Any:
        return None if current_wave() in self.waves else self.hook(*gradients)


def call_elsewhere(node: Any, entered: Sequence[torch.Tensor | None], create_graph: bool) -> Any:
    """Calls the node on a new thread. On this one it would ask the engine which edges to omit."""
    outcome: list[Any] = []

    def call() -> None:
        heed_num_threads()
        try:
            with torch.set_grad_enabled(create_graph):
                outcome.append(node(*entered))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            outcome.append(error)

    thread = threading.Thread(target=call, name="telegrad-edge")
    thread.start()
    thread.join()
    error = outcome[0]
    if isinstance(error, Exception):
        raise BackwardError(
            f"{node.name()} failed when it was computed a second time: {type(error).__name__}: "
            f"{error}. It lies where gradients of this worker and of another meet, and such a "
            "function is computed twice in a pass, so its saved tensors are unpacked twice. If "
            "saved_tensors_hooks or a checkpoint do not allow that, keep the function that uses "
            "the result of the call out of them"
        ) from error
    if isinstance(error, BaseException):
        raise error
    return outcome[0] if isinstance(outcome[0], tuple) else (outcome[0],)


def fit(gradient: torch.Tensor, node: Any, number: int) -> torch.Tensor:
    """What the engine does to a gradient before it enters a node."""
    expected = input_metadata(node)[number]
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    if gradient.dtype != expected.dtype:
        gradient = gradient.to(expected.dtype)
    return gradient
