"""Pipelines: stages on several workers that work on different micro-batches at the same time.

`Pipeline` splits a batch along dimension 0 and sends the parts through its stages without waiting.
Results go straight from the worker of one stage to the worker of the next, and gradients go
straight back. The driver, the process that calls the pipeline, sends the arguments of the first
stage and receives the results of the last.

Stages that are modules of this process run in the thread that calls the pipeline, in the same order
as stages on workers (`pipeline_there.turn_of`).

Rejected: calls by `module.submit` that each get the future of the call before. There each worker
asks for what it needs, so every micro-batch of every stage keeps a thread waiting, and a backward
pass waits for one call after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from telegrad.errors import TelegradError
from telegrad.nn.module import PlacedPart
from telegrad.nn.pipeline_run import PipelineRun, RemoteStage
from telegrad.nn.pipeline_there import turn_of
from telegrad.tensors.stream import Handle, Stream

__all__ = ["Pipeline"]


class Pipeline(nn.Module):
    """Runs modules one after the other, like `nn.Sequential`, on several micro-batches at a time.

    Outputs and gradients are those of `nn.Sequential` with the same modules, if these treat each
    row by itself. Names of parameters are the same, too.

    A stage takes micro-batches in their order, one at a time. Results are put together again:
    tensors along dimension 0, in nested structures as well; other values must be the same for all
    micro-batches.

    Args:
        stages: an `nn.Sequential`, or another sequence of modules: those that `telegrad.module` has
            made, and modules of this process.
        micro_batches: how many parts a batch is split into. A batch with fewer rows is split into
            as many parts as it has rows.

    Raises:
        TypeError: a stage is not a module, or `micro_batches` is not an int.
        ValueError: there are no stages, or `micro_batches` is less than 1.

    Example::

        model = telegrad.Pipeline(
            nn.Sequential(
                telegrad.module("worker1", nn.Linear, 20, 30),
                nn.ReLU(),
                telegrad.module("worker2", nn.Linear, 30, 5),
            ),
            micro_batches=4,
        )
        model(torch.randn(128, 20)).sum().backward()
    """

    def __init__(self, stages: Iterable[nn.Module], *, micro_batches: int) -> None:
        super().__init__()
        if not isinstance(micro_batches, int) or isinstance(micro_batches, bool):
            raise TypeError(f"micro_batches must be an int, got a {type(micro_batches).__name__}")
        if micro_batches < 1:
            raise ValueError(f"micro_batches must be at least 1, got {micro_batches}")
        for name, stage in _named(stages):
            self.add_module(name, stage)
        if not self._modules:
            raise ValueError("a pipeline needs at least one stage")
        self._micro_batches = micro_batches
        self._queues: dict[Stream, Handle] = {}

    def __getitem__(self, index: int) -> nn.Module:
        """A stage."""
        return list(self._modules.values())[index]  # type: ignore[return-value]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_queues": {}}  # a copy has its own

    def extra_repr(self) -> str:
        return f"micro_batches={self._micro_batches}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Every tensor in the arguments, which go to the first stage, is split.

        Raises:
            ValueError: there is nothing to split, or the tensors have different numbers of rows.
            WorkerLost: the worker of a stage is lost.
            Exception: what a stage has raised; the cause names the stage and its worker.
        """
        batches = _split(args, kwargs, self._micro_batches)
        units = self._units()
        segments = [unit for unit in units if isinstance(unit, list)]
        run = PipelineRun(segments, len(batches), self._queues) if segments else None
        try:
            results = _flow(units, run, batches)
        except BaseException:
            if run is not None:
                run.cancel()
            raise
        finally:
            if run is not None:
                run.close()
        return _merge(results)

    def _units(self) -> list[_Unit]:
        units: list[_Unit] = []
        for position, (name, stage) in enumerate(_flat("", self._modules.items())):
            if not isinstance(stage, PlacedPart):
                units.append((position, stage))
                continue
            _refuse_hooks(name, stage)
            remote = RemoteStage(position, name, stage)
            if units and isinstance(units[-1], list):
                units[-1].append(remote)
            else:
                units.append([remote])
        return units


_Unit = list[RemoteStage] | tuple[int, nn.Module]
"""Neighbouring stages on workers; or a stage of this process, with its position."""
_Batch = tuple[tuple[Any, ...], dict[str, Any]]


def _named(stages: Any) -> list[tuple[str, nn.Module]]:
    if type(stages) in (nn.Sequential, nn.ModuleList):
        return list(stages._modules.items())
    if isinstance(stages, nn.Module) and not isinstance(stages, nn.Sequential | nn.ModuleList):
        raise TypeError(
            f"the stages of a pipeline are an nn.Sequential or another sequence of modules, got a "
            f"{type(stages).__name__}"
        )
    if isinstance(stages, PlacedPart):
        raise TypeError(
            f"a module on worker {stages.worker!r} cannot be split into stages: make each stage by "
            "a telegrad.module of its own"
        )
    named = []
    for number, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise TypeError(f"stage {number} of a pipeline is a {type(stage).__name__}, no module")
        named.append((str(number), stage))
    return named


def _flat(prefix: str, stages: Iterable[tuple[str, Any]]) -> list[tuple[str, nn.Module]]:
    """Stages that are plain `nn.Sequential`s with modules on workers are several stages."""
    flat = []
    for name, stage in stages:
        is_plain = type(stage) is nn.Sequential and not _hooks_of(stage)
        if is_plain and any(isinstance(part, PlacedPart) for part in stage.modules()):
            flat += _flat(f"{prefix}{name}.", stage._modules.items())
        else:
            flat.append((prefix + name, stage))
    return flat


def _hooks_of(module: nn.Module) -> list[Any]:
    tables: Sequence[dict[int, Any]] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return [hook for table in tables for hook in table.values()]


def _refuse_hooks(name: str, stage: PlacedPart) -> None:
    if _hooks_of(stage):
        raise TelegradError(
            f"stage {name!r} of a pipeline, on worker {stage.worker!r}, has a hook of this "
            "process, which would have to see every activation: register it in the class's "
            "__init__, or on a stage of this process"
        )


def _flow(units: Sequence[_Unit], run: PipelineRun | None, batches: Sequence[_Batch]) -> list[Any]:
    """Sends all micro-batches through all stages; returns what the last one makes of each."""
    made: dict[tuple[int, int], Any] = {}

    def hand_on(unit: int, micro_batch: int, args: Any, kwargs: dict[str, Any]) -> None:
        """To a unit: one on workers begins at once."""
        to = units[unit]
        if isinstance(to, list) and run is not None:
            run.feed(to[0].position, micro_batch, args, kwargs)
        else:
            made[unit, micro_batch] = args, kwargs

    def result_of(unit: int, micro_batch: int) -> Any:
        before = units[unit]
        if isinstance(before, list) and run is not None:
            return run.result(before[-1].position, micro_batch)
        return made.pop((unit, micro_batch))

    for micro_batch, (args, kwargs) in enumerate(batches):
        hand_on(0, micro_batch, args, kwargs)
    here = [(i, unit) for i, unit in enumerate(units) if isinstance(unit, tuple)]
    turns = sorted(
        itertools.product(here, range(len(batches))),
        key=lambda turn: turn_of(turn[0][1][0], turn[1]),
    )
    for (i, (_, stage)), micro_batch in turns:
        if (i, micro_batch) not in made:  # it comes from a worker
            made[i, micro_batch] = (result_of(i - 1, micro_batch),), {}
        args, kwargs = made.pop((i, micro_batch))
        result = stage(*args, **kwargs)
        if i + 1 < len(units):
            hand_on(i + 1, micro_batch, (result,), {})
        else:
            made[i, micro_batch] = result
    return [result_of(len(units) - 1, micro_batch) for micro_batch in range(len(batches))]


def _split(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> list[_Batch]:
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise ValueError("a pipeline needs a tensor among its arguments, which it can split")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(
            "a pipeline splits every tensor argument along dimension 0, and one has no dimensions: "
            "pass it as a number, or expand it to the size of the batch"
        )
    rows = {tensor.shape[0] for tensor in tensors}
    if len(rows) > 1:
        raise ValueError(
            "a pipeline splits every tensor argument along dimension 0, and these have different "
            f"sizes there: {', '.join(str(tuple(tensor.shape)) for tensor in tensors)}"
        )
    count = max(1, min(count, rows.pop()))
    split = [
        torch.tensor_split(leaf, count) if isinstance(leaf, Tensor) else [leaf] * count
        for leaf in leaves
    ]
    return [tree_unflatten(list(parts), structure) for parts in zip(*split, strict=True)]


def _merge(results: Sequence[Any]) -> Any:
    flat = [tree_flatten(result) for result in results]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise TypeError(
            "a pipeline has results of different structures for its micro-batches, and cannot put "
            "them together"
        )
    together = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_merged(parts) for parts in together], structure)


def _merged(parts: Sequence[Any]) -> Any:
    if all(isinstance(part, Tensor) for part in parts):
        if any(part.dim() == 0 for part in parts):
            raise TypeError(
                "the last stage of a pipeline has returned a tensor without dimensions for each "
                "micro-batch, which cannot be put together: return one value per row"
            )
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    if any(isinstance(part, Tensor) or part != parts[0] for part in parts):
        raise TypeError(
            "the last stage of a pipeline has returned values that are not tensors and differ "
            f"between micro-batches: {parts[0]!r} is one. Return tensors, or what is the same for "
            "all"
        )
    return parts[0]
