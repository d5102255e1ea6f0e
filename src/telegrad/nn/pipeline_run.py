"""One forward of a pipeline as its driver sees it, and the nodes of the driver's graph.

Neighbouring stages on workers are a *segment*. For each micro-batch a segment is two nodes, joined
by a token: on the way back the second sends the gradients of the results to the last stage, and the
first, which torch's engine runs only when nothing else is ready, waits for those of the arguments.
So all micro-batches are under way before anything is waited for. The gradients of parameters are
summed up on the workers. A node in front of all micro-batches fetches the sums of one stage::

    parameters ── _Totals ──┐
    arguments  ── _Enter ───┴── token ── _Leave ── results
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.futures import Future
from torch.utils._pytree import tree_flatten, tree_unflatten

from telegrad.autograd.caller_modes import capture
from telegrad.autograd.plain import (
    PlainEngine,
    engine_here,
    refuse_context,
    refuse_transforms,
)
from telegrad.autograd.plain.passes import PassName
from telegrad.autograd.plain.segments import EMPTY, enter, leave
from telegrad.errors import BackwardError, RemoteError, TelegradError, WorkerLost
from telegrad.nn.module import PlacedPart
from telegrad.nn.pipeline_ends import Address, Arrival, Failure, Inbox, Outcome
from telegrad.nn.pipeline_there import (
    RunPlan,
    StagePlan,
    begin_run,
    cancel_run,
    raise_failure,
    take,
    take_gradients,
    take_totals,
)
from telegrad.tensors.remote_tensor import RemoteTensor
from telegrad.tensors.stream import Handle, Stream

__all__ = ["PipelineRun", "RemoteStage"]


class RemoteStage(NamedTuple):
    """
    Args:
        position: among all stages of the pipeline.
    """

    position: int
    name: str
    part: PlacedPart


class _Segment:
    """
    Attributes:
        tokens: of the nodes that fetch the gradients of parameters.
    """

    def __init__(self, stages: Sequence[RemoteStage]) -> None:
        self.stages = stages
        self.first, self.last = stages[0], stages[-1]
        self.tokens: list[Tensor] = []


class PipelineRun:
    """
    Args:
        segments: runs of neighbouring stages on workers.
        queues: of the pipeline's work on each worker; what is missing is made.

    Raises:
        WorkerLost: the worker of a stage is gone.
    """

    def __init__(
        self,
        segments: Sequence[Sequence[RemoteStage]],
        micro_batches: int,
        queues: dict[Stream, Handle],
    ) -> None:
        self.engine: PlainEngine = engine_here()
        self.agent = self.engine.agent
        refuse_context(self.agent)
        refuse_transforms()
        self.inbox = Inbox()
        self._count = micro_batches
        self._segments = {stages[0].position: _Segment(stages) for stages in segments}
        self._stages = {stage.position: stage for stages in segments for stage in stages}
        self._has_gradients = torch.is_grad_enabled()
        self._begun: dict[tuple[int, int], tuple[_Enter, Tensor]] = {}
        self._runs: dict[Stream, Handle] = {}
        try:
            self._begin(queues)
        except BaseException:
            self.close()
            raise

    def address(self, position: int) -> Address:
        """Of the run on the worker of a stage."""
        stream = stream_of(self._stages[position])
        return Address(stream.worker, stream.key, self._runs[stream].id)

    def _begin(self, queues: dict[Stream, Handle]) -> None:
        modes = capture()
        for stage in self._stages.values():
            stage.part._connection.tell(stage.part, stage.part._path)
            stream = stream_of(stage)
            if stream not in self._runs:
                self._runs[stream] = Handle(stream)
        plans: dict[Stream, list[StagePlan]] = {stream: [] for stream in self._runs}
        for segment in self._segments.values():
            for stage in segment.stages:
                plans[stream_of(stage)].append(self._plan(segment, stage))
        with contextlib.ExitStack() as stack:
            waits = []
            for stream, stages in plans.items():
                if stream not in queues:
                    queues[stream] = Handle(stream)
                ids = queues[stream].id, self._runs[stream].id
                plan = RunPlan(*ids, modes, stages, self._count, self.agent.depth)
                before = stack.enter_context(stream.before())
                waits.append(self.agent.begin_call(stream.worker, begin_run, (before, plan)))
            for wait in waits:
                wait()

    def _plan(self, segment: _Segment, stage: RemoteStage) -> StagePlan:
        at, connection = stage.position, stage.part._connection
        leaves, ids = connection.leaves_of(stage.part)
        if leaves:
            segment.tokens.append(enter(_Totals(self, stage, leaves), leaves))
        driver = Address(self.engine.worker_id, None, self.inbox.number)
        calls = [self.engine.new_call() for _ in range(self._count)]
        after = driver if stage is segment.last else self.address(at + 1)
        before = driver if stage is segment.first else self.address(at - 1)
        module, path = connection.handle.id, stage.part._path
        return StagePlan(at, module, path, connection.version, ids, calls, after, before)

    # -- forward

    def feed(self, position: int, micro_batch: int, args: Any, kwargs: dict[str, Any]) -> None:
        """Sends a micro-batch to the segment that begins at a position. Does not wait."""
        segment = self._segments[position]
        leaves, structure = tree_flatten((args, kwargs))
        leaves = [leaf.cpu() if isinstance(leaf, RemoteTensor) else leaf for leaf in leaves]
        has_history = [
            self._has_gradients and isinstance(leaf, Tensor) and leaf.requires_grad
            for leaf in leaves
        ]
        if self._has_gradients:
            wanted = [leaf for leaf, is_it in zip(leaves, has_history, strict=True) if is_it]
            begin = _Enter(self, segment, micro_batch, len(wanted))
            token = enter(begin, [*wanted, *segment.tokens], turn=micro_batch)
            self._begun[segment.last.position, micro_batch] = begin, token
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        arrival = Arrival(tree_unflatten(leaves, structure), has_history, ())
        to = self.address(position)
        sent = self.agent.call_async(
            to.worker, take, (to.table, to.run, position, micro_batch, arrival), timeout=0
        )
        sent.add_done_callback(partial(_note_end, self.inbox))

    def result(self, position: int, micro_batch: int) -> Any:
        """What the segment that ends at a position has made of a micro-batch.

        Raises:
            WorkerLost: a worker is lost.
            Exception: what a stage has raised.
        """
        arrival, failure = self.inbox.wait_for((position, micro_batch))
        if arrival is None:
            self.raise_failure(failure)
        for at, changes in arrival.changes:
            part = self._stages[at].part
            part._connection.follow(part, changes)
        begun = self._begun.pop((position, micro_batch), None)
        leaves, structure = tree_flatten(arrival.value)
        places = [i for i, is_it in enumerate(arrival.has_history) if is_it]
        if places:
            assert begun is not None  # nothing has a history if gradients are off
            begin, token = begun
            outputs = leave(_Leave(begin), [leaves[i] for i in places], token)
            for i, tensor in zip(places, outputs, strict=True):
                leaves[i] = tensor
        return tree_unflatten(leaves, structure)

    def raise_failure(self, failure: Failure | Exception | None) -> NoReturn:
        """Raises what a stage has raised, with its own type; its cause says where."""
        if failure is None:
            raise TelegradError("a micro-batch was skipped, because another one had failed")
        if isinstance(failure, Exception):
            raise failure
        for each in self._stages.values():
            each.part._connection.catch_up(each.part)
        stage, where = self._stages[failure.position], failure.where
        try:
            args = (where.table, where.run, failure.number)
            self.agent.call(where.worker, raise_failure, args, timeout=0)
        except WorkerLost:
            raise
        except Exception as error:
            worker = self.engine.name_of(where.worker)
            text = (
                f"stage {stage.name!r} of the pipeline, on worker {worker!r}, failed with "
                f"micro-batch {failure.micro_batch + 1} of {self._count}: "
                f"{type(error).__name__}: {error.__cause__ or error}"
            )
            there = getattr(error.__cause__, "traceback", "")
            raise error from RemoteError(text, worker=worker, traceback=there)
        raise TelegradError(f"stage {stage.name!r} of the pipeline failed, and was given up")

    def close(self) -> None:
        """Nothing comes any more in forward. The tokens lead back to this run, by a way that the
        garbage collector does not see."""
        self._begun.clear()
        for segment in self._segments.values():
            segment.tokens.clear()

    def cancel(self) -> None:
        """Stages skip what they have not begun."""
        for stream, handle in self._runs.items():
            with contextlib.suppress(TelegradError):  # a worker that is lost does nothing more
                self.agent.call_async(stream.worker, cancel_run, (stream.key, handle.id), timeout=0)


def stream_of(stage: RemoteStage) -> Stream:
    return stage.part._connection.stream


def _note_end(inbox: Inbox, sent: Future[Outcome]) -> None:
    try:
        outcome = sent.value()
    except Exception as error:  # noqa: BLE001 - the worker is lost, say
        inbox.fail(error)
        return
    # What was skipped was so after a failure, which is reported by itself.
    if not outcome.is_done and outcome.failure is not None:
        inbox.fail(outcome.failure)


class _Totals:
    """Fetches the gradients of a stage's parameters: see `telegrad.autograd.plain.segments`."""

    def __init__(self, run: PipelineRun, stage: RemoteStage, leaves: Sequence[Tensor]) -> None:
        self._run = run
        self._stage = stage
        self._count = len(leaves)

    def collect(self) -> Sequence[Tensor | None]:
        run, position = self._run, self._stage.position
        one = run.engine.current_run().one
        to = run.address(position)
        args = (to.table, to.run, position, one.name)
        exported = run.agent.call(to.worker, take_totals, args, timeout=0)
        if exported is None:
            return [None] * self._count
        return self._stage.part._connection.revive(exported)


class _Enter:
    """The arguments of a segment, in one micro-batch."""

    def __init__(self, run: PipelineRun, segment: _Segment, micro_batch: int, wanted: int) -> None:
        self.run = run
        self.segment = segment
        self.micro_batch = micro_batch
        self._wanted = wanted
        self._tokens = len(segment.tokens)
        self._sent: dict[PassName, _Answer] = {}

    def send(self, gradients: Sequence[Tensor | None]) -> None:
        """Sends the gradients of the results to the last stage."""
        engine = self.run.engine
        run = engine.current_run()
        modes = run.modes()
        if modes.create_graph:
            raise BackwardError(
                "create_graph=True does not go through a telegrad.Pipeline: compute second "
                "derivatives with the stages called one after the other"
            )
        name, last = run.one.name, self.segment.last.position
        to = self.run.address(last)
        self._sent[name] = answer = _Answer()
        args = (to.table, to.run, last, self.micro_batch, name, modes.as_bits(), list(gradients))
        sent = self.run.agent.call_async(to.worker, take_gradients, args, timeout=0)
        sent.add_done_callback(answer.come)

    def collect(self) -> Sequence[Tensor | None]:
        one = self.run.engine.current_run().one
        answer = self._sent.pop(one.name, None)
        found: Sequence[Tensor | None] | None = None
        if answer is not None:
            outcome = answer.wait()
            if isinstance(outcome, Exception):
                raise outcome
            if not outcome.is_done:
                self.run.raise_failure(outcome.failure)
            one.later.update(outcome.later)
            key = self.segment.first.position, self.micro_batch, one.name
            found = self.run.inbox.take(key)
        return [*(found or [None] * self._wanted), *[EMPTY] * self._tokens]


class _Leave:
    """The results of a segment, in one micro-batch."""

    def __init__(self, begin: _Enter) -> None:
        self._begin = begin

    def post(self, gradients: Sequence[Tensor | None]) -> None:
        self._begin.send([None if g is None else g.detach() for g in gradients])


class _Answer:
    """To gradients that were sent."""

    def __init__(self) -> None:
        self._has_come = threading.Event()
        self._outcome: Outcome | Exception | None = None

    def come(self, sent: Future[Outcome]) -> None:
        try:
            self._outcome = sent.value()
        except Exception as error:  # noqa: BLE001 - the worker is lost, say
            self._outcome = error
        self._has_come.set()

    def wait(self) -> Outcome | Exception:
        """Ends when the gradients have gone through all stages, or one has failed, or a worker is
        lost: each stage answers, and a call that is not answered fails by the loss."""
        self._has_come.wait()
        assert self._outcome is not None
        return self._outcome
