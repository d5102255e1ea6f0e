"""Steps of `torch.optim` on remote parameters, as one message per worker.

An optimizer works on remote tensors as on any others, operation by operation: that is what a step
means, and the only way for optimizers that are not torch's own. But it costs this process about as
much as computing the step itself would.

`step_there` is a hook that torch runs before each step of any optimizer. The first step of a kind
(which parameters have gradients, which options) it leaves to torch, which makes the state: momenta,
and so on. From the second on, the worker runs the step, with an optimizer of the same class, on the
same parameters, gradients and state, which this side names by their ids. `optimizer.state` stays
the truth, so saving, loading, and a step of another kind go on from it.

torch lets the hook replace the arguments of `step`, the optimizer among them: it then does its step
on a shallow copy, which has the parameters of this process only.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from telegrad.tensors.fetching import Together
from telegrad.tensors.remote_tensor import RemoteTensor, send
from telegrad.tensors.stream import Handle, Stream
from telegrad.tensors.table import Table, control

__all__ = ["hook_steps", "step_there"]

_BY_PARAMETER: dict[str, Any] = {
    name: each
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, Optimizer)
    if each not in (Optimizer, torch.optim.LBFGS)
}
"""torch's own optimizers for which the step of some parameters is a part of the step of all. Of
other people's that is not known."""

_Wiring = list[list[tuple[int, dict[str, int]]]]
"""By group of parameters: the id of each, and the ids of its state's tensors by name."""


class _Steps:
    """What is remembered of an optimizer's last step.

    Args:
        kind: compared with that of the next.
    """

    def __init__(self, kind: object) -> None:
        self.kind = kind
        self.there: dict[Stream, tuple[Handle, _Wiring]] = {}


_steps: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()


@functools.cache
def hook_steps() -> None:
    """Makes torch run `step_there`, for the rest of this process's life. To be called once."""
    register_optimizer_step_pre_hook(step_there)


def step_there(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Runs the remote part of a step on the workers; see above. None leaves all of it to torch."""
    groups = optimizer.param_groups
    remote = [p for group in groups for p in group["params"] if type(p) is RemoteTensor]
    if not remote:
        return None
    if isinstance(optimizer, torch.optim.LBFGS):
        _check_together(optimizer)
    _warn_of_unrecorded(optimizer, remote)
    _move_state(optimizer)
    options = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups
    ]
    kind = (
        [{k: _option_kind(v) for k, v in each.items()} for each in options],
        [(id(p), p.grad is not None) for p in remote],
    )
    steps = _steps.get(optimizer)
    if steps is None:
        steps = _steps[optimizer] = _Steps(None)
        optimizer.register_state_dict_post_hook(_fetch_together)
    is_same, steps.kind = steps.kind == kind, kind
    if not is_same or not _is_whole(optimizer, remote, args, kwargs):
        return None
    for p in remote:
        state = optimizer.state.get(p, {})
        for name, value in state.items():
            if type(value) is Tensor:  # counters of steps: from now on the worker counts
                state[name] = send(p.handle.stream, value)
    for stream in dict.fromkeys(p.handle.stream for p in remote):
        _send_step(optimizer, steps, stream, options)
    here: Optimizer = object.__new__(type(optimizer))
    here.__dict__.update(optimizer.__dict__)
    here.param_groups = [
        {**group, "params": [p for p in group["params"] if type(p) is not RemoteTensor]}
        for group in groups
    ]
    return (here, *args[1:]), kwargs


def _check_together(optimizer: Optimizer) -> None:
    """
    Raises:
        RuntimeError: its parameters, which it makes one tensor of, are in several places.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    places = {repr(p.worker) if type(p) is RemoteTensor else "this process" for p in parameters}
    if len(places) > 1:
        raise RuntimeError(
            "LBFGS makes one tensor of all parameters, so it needs them on one worker, and they "
            f"are on {', '.join(sorted(places))}: make one module of them, or use one optimizer "
            "for each worker"
        )


def _warn_of_unrecorded(optimizer: Optimizer, remote: list[RemoteTensor]) -> None:
    """As in one process, the step leaves out what has no gradient. But where modules were called
    under `no_grad`, that is rarely meant."""
    for stream in {p.handle.stream for p in remote if p.requires_grad}:
        if stream.is_recording or any(
            p.grad is not None for p in remote if p.handle.stream is stream
        ):
            continue
        warnings.warn(
            f"{type(optimizer).__name__}.step(): no parameter on worker {stream.worker_name!r} has "
            "a gradient, since the last call of a module there was made under torch.no_grad(). "
            "Make the call with gradients on, or leave its parameters out of the optimizer",
            stacklevel=4,
        )


def _fetch_together(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Of a state dict that is saved, the tensors of each worker come in one message."""
    by_stream: dict[Stream, list[RemoteTensor]] = {}
    for value in tree_leaves(state_dict["state"]):
        if type(value) is RemoteTensor:
            by_stream.setdefault(value.handle.stream, []).append(value)
    for tensors in by_stream.values():
        Together(tensors)


def _option_kind(value: Any) -> Any:
    """Learning rates may change from step to step. Whether one is zero decides about the state."""
    if isinstance(value, Tensor):
        return Tensor
    return value == 0 if type(value) is float else value


def _move_state(optimizer: Optimizer) -> None:
    """Moves state that torch has put here to where it is needed. `Optimizer.load_state_dict` does
    that because torch ignores the index of `cpu:n`, and Adagrad counts steps here."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if type(p) is RemoteTensor and p in optimizer.state:
                state = optimizer.state[p]
                for name, value in state.items():
                    if type(value) is Tensor and (value.dim() or group.get("fused")):
                        state[name] = send(p.handle.stream, value)


def _is_whole(
    optimizer: Optimizer, remote: list[RemoteTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a worker can do its part of the step alone."""
    if (
        _BY_PARAMETER.get(type(optimizer).__name__) is not type(optimizer)
        or len(args) > 1
        or kwargs
    ):
        return False  # a closure runs here
    if getattr(optimizer, "grad_scale", None) is not None or hasattr(optimizer, "found_inf"):
        return False  # a GradScaler has left them for a fused step
    if any(p.grad is not None and type(p.grad) is not RemoteTensor for p in remote):
        return False
    states = (optimizer.state[p] for p in remote if p in optimizer.state)
    return all(v is None or isinstance(v, Tensor) for state in states for v in state.values())


def _send_step(
    optimizer: Optimizer, steps: _Steps, stream: Stream, options: list[dict[str, Any]]
) -> None:
    wiring: _Wiring = []
    gradients: list[int | None] = []
    for group in optimizer.param_groups:
        ours: list[tuple[int, dict[str, int]]] = []
        for p in group["params"]:
            if type(p) is RemoteTensor and p.handle.stream is stream:
                state = optimizer.state.get(p, {})
                ids = {k: v.handle.id for k, v in state.items() if v is not None}
                ours.append((p.handle.id, ids))
                grad = p.grad
                gradients.append(grad.handle.id if isinstance(grad, RemoteTensor) else None)
        wiring.append(ours)
    handle, before = steps.there.get(stream) or (Handle(stream), None)
    steps.there[stream] = handle, wiring
    news = None if wiring == before else wiring
    step = handle.id, type(optimizer).__name__, options, gradients, news
    stream.put(("step", None, step, (), {}))
    stream.flush()  # the worker begins while this process goes on


@control("step")
def _step(table: Table, args: tuple[Any, ...]) -> None:
    """At the worker: one step of an optimizer."""
    key, kind, options, gradients, wiring = args
    if wiring is not None:
        table.things[key] = _wired(table, kind, options, wiring)
    optimizer, states = table.things[key]
    for group, new in zip(optimizer.param_groups, options, strict=True):
        group.update(new)
    for (p, _), gradient in zip(states, gradients, strict=True):
        p.grad = None if gradient is None else table.thing(gradient)
    try:
        optimizer.step()
    finally:
        for p, ids in states:
            p.grad = None
            table.things.update((id_, optimizer.state[p][name]) for name, id_ in ids.items())


def _wired(table: Table, kind: str, options: list[dict[str, Any]], wiring: _Wiring) -> Any:
    if kind not in _BY_PARAMETER:
        raise TypeError(f"{kind!r} is not an optimizer of torch's")
    groups = [
        {"params": [table.thing(id_) for id_, _ in ours], **each}
        for ours, each in zip(wiring, options, strict=True)
    ]
    optimizer: Any = _BY_PARAMETER[kind](groups)
    states = [(table.thing(id_), ids) for ours in wiring for id_, ids in ours]
    for p, ids in states:
        optimizer.state[p] = {name: table.thing(each) for name, each in ids.items()}
    return optimizer, states
