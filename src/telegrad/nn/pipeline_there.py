"""The workers' side of pipelines: see `telegrad.nn.pipeline`.

Nothing here waits for other workers. A micro-batch comes to a stage by a call that is answered when
the micro-batch has gone through this stage and all later ones. The stage sends its result to the
next one by another such call, and gradients come back in the same way. So errors and lost workers
are reported back along these calls to the driver, while results and gradients go straight from
stage to stage.

The stages of one pipeline on this worker run one at a time. In forward their order is fixed: by the
sum of the stage's position and the micro-batch's number, later stages first. What a stage needs
comes earlier in this order, on whichever worker it is made, so the order cannot deadlock. In
backward, gradients are run in the order in which they come.

After an error in forward, the stages of that run skip the remaining micro-batches.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future
from torch.utils._pytree import tree_flatten, tree_unflatten

from telegrad.autograd.caller_modes import CallerModes, entered
from telegrad.autograd.plain.notes import Note
from telegrad.autograd.plain.passes import Modes, PassName
from telegrad.autograd.plain.segments import keep, receive, run_back, served
from telegrad.errors import TelegradError
from telegrad.nn.allowed_parts import FORWARD, check_method, part_at
from telegrad.nn.module_there import made_in
from telegrad.nn.pipeline_ends import (
    SKIPPED,
    Address,
    Arrival,
    Failure,
    Outcome,
    arrive_at_driver,
    gradients_at_driver,
)
from telegrad.rpc.calls.outcome import as_exception, described_by_arguments, fail, without_frames
from telegrad.rpc.functions import async_execution
from telegrad.rpc.group import current
from telegrad.tensors.table import (
    Before,
    Exported,
    Table,
    TableKey,
    export,
    table_before,
    tables_here,
)

__all__ = [
    "RunPlan",
    "StagePlan",
    "begin_run",
    "cancel_run",
    "raise_failure",
    "take",
    "take_gradients",
    "take_totals",
    "turn_of",
]

_log = logging.getLogger("telegrad.nn")


class StagePlan(NamedTuple):
    """
    Args:
        position: among all stages of the pipeline.
        module: the id of its module here.
        version: of the module, up to which the driver knows its changes.
        leaves: ids of the parameters that get gradients.
        calls: by micro-batch, the id of the piece of graph that it leaves here.
        next, previous: where results and gradients go; the driver, at the ends.
    """

    position: int
    module: int
    path: str
    version: int
    leaves: Sequence[int]
    calls: Sequence[int]
    next: Address
    previous: Address


class RunPlan(NamedTuple):
    """What a worker has to know before micro-batches come.

    Args:
        queue, run: the ids that they have here.
        depth: of the calls that the driver makes: see `telegrad.rpc.connections.thread_pool`.
    """

    queue: int
    run: int
    modes: CallerModes | None
    stages: Sequence[StagePlan]
    micro_batches: int
    depth: int


def turn_of(position: int, micro_batch: int) -> tuple[int, int]:
    """The order in which stages take micro-batches."""
    return position + micro_batch, -position


class _WorkQueue:
    """What the stages of one pipeline on this worker have to do, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards the two below
        self._ready: deque[Callable[[], None]] = deque()
        self._is_working = False

    def put(self, works: Iterable[Callable[[], None]]) -> bool:
        """Returns whether the caller has to let `work` run."""
        with self._lock:
            self._ready.extend(works)
            must_start = bool(self._ready) and not self._is_working
            if must_start:
                self._is_working = True
        return must_start

    def work(self) -> None:
        while True:
            with self._lock:
                if not self._ready:
                    self._is_working = False
                    return
                work = self._ready.popleft()
            try:
                work()
            except BaseException:  # noqa: BLE001 - works answer for themselves; this is a bug trap
                _log.exception("a stage of a pipeline could not answer")
            del work  # its tensors must not live until the next one comes


class _Run:
    """One forward of a pipeline, and its backward passes, on this worker."""

    def __init__(self, table: Table, plan: RunPlan) -> None:
        self._worker = current.current()
        self._agent = self._worker.agent
        self._table = table
        self._id = plan.run
        self._modes = plan.modes
        self._count = plan.micro_batches
        self._depth = plan.depth
        self._queue: _WorkQueue = table.things.setdefault(plan.queue, _WorkQueue())
        self.stages = {stage.position: stage for stage in plan.stages}
        pairs = [(p, m) for p in self.stages for m in range(plan.micro_batches)]
        self._lock = threading.RLock()  # guards what follows
        self._order = deque(sorted(pairs, key=lambda pair: turn_of(*pair)))
        self._arrived: dict[tuple[int, int], tuple[Arrival, Future[Outcome]]] = {}
        """By stage and micro-batch, what waits for its turn."""
        self._is_cancelled = False
        self._errors: dict[int, BaseException] = {}
        self._kept: list[Note] = []
        """Of graphs: those that no pass has gone through end with them."""
        self._totals: dict[tuple[PassName, int], list[Tensor | None]] = {}

    def __del__(self) -> None:
        """The driver has let go of it, or its table is closed: this worker has taken the driver for
        lost, or ends. What still waits is answered: the driver may be alive after all."""
        answers = [answer for _, answer in self._arrived.values()]
        if answers:
            self._agent.run_aside(partial(_refuse_all, answers))

    @property
    def _is_gone(self) -> bool:
        return self._table.things.get(self._id) is not self

    # -- forward

    def arrive(
        self, position: int, micro_batch: int, arrival: Arrival, answer: Future[Outcome]
    ) -> None:
        """A micro-batch comes to a stage, and is worked on when its turn comes."""
        with self._lock:
            self._arrived[position, micro_batch] = arrival, answer
            must_start = self._queue.put(self._take_ready())
        if must_start:
            self._start()

    def _take_ready(self) -> list[Callable[[], None]]:
        """Under the lock."""
        ready = []
        if self._is_cancelled:
            ready += list(self._arrived)  # they are skipped
            self._order.clear()
        while self._order and self._order[0] in self._arrived:
            ready.append(self._order.popleft())
        return [
            partial(self.forward, self.stages[position], micro_batch, *self._arrived.pop(pair))
            for pair in ready
            for position, micro_batch in [pair]
        ]

    def put(self, work: Callable[[], None]) -> None:
        """Something to do after all that is ready."""
        if self._queue.put([work]):
            self._start()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            must_start = self._queue.put(self._take_ready())
        if must_start:
            self._start()

    def _start(self) -> None:
        self._agent.run_like_a_call(self._queue.work, self._depth + 1)

    def forward(
        self, stage: StagePlan, micro_batch: int, arrival: Arrival, answer: Future[Outcome]
    ) -> None:
        if self._is_cancelled:  # the driver has done so, or hears of an error
            answer.set_result(SKIPPED)
            return
        try:
            if self._is_gone:
                raise _unknown()
            pushed = self._push(stage, micro_batch, self._compute(stage, micro_batch, arrival))
        except BaseException as error:  # noqa: BLE001 - it is raised at the driver
            outcome = self._failed(stage, micro_batch, error)
            self.cancel()
            answer.set_result(outcome)
            return
        pushed.add_done_callback(
            partial(self._relay, stage, micro_batch, answer, (), is_forward=True)
        )

    def _compute(self, stage: StagePlan, micro_batch: int, arrival: Arrival) -> Arrival:
        made = made_in(self._table, stage.module)
        part = part_at(made.module, stage.path)
        check_method(part, FORWARD)
        call = stage.calls[micro_batch]
        with torch.enable_grad(), served(), entered(self._modes):
            leaves, structure = tree_flatten(arrival.value)
            places = [i for i, is_it in enumerate(arrival.has_history) if is_it]
            if places:
                received = receive(call, [leaves[i] for i in places])
                for i, tensor in zip(places, received, strict=True):
                    leaves[i] = tensor
            args, kwargs = tree_unflatten(leaves, structure)
            del leaves
            result = getattr(part, FORWARD)(*args, **kwargs)
        has_gradients = self._modes is None or self._modes.has_gradients
        leaves, structure = tree_flatten(result)
        has_history = [
            has_gradients and isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves
        ]
        kept = [leaf for leaf, is_it in zip(leaves, has_history, strict=True) if is_it]
        parameters = [self._table.thing(each) for each in stage.leaves]
        if made.has_changed(stage.version):
            made.check_reach(kept, parameters)
        if kept:
            self._kept.append(keep(call, kept, parameters, list))
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        changes = list(arrival.changes)
        if micro_batch == self._count - 1 and (found := made.changes(stage.version)) is not None:
            changes.append((stage.position, found))
        return Arrival(tree_unflatten(leaves, structure), has_history, changes)

    def _push(self, stage: StagePlan, micro_batch: int, result: Arrival) -> Future[Outcome]:
        to = stage.next
        if to.table is None:
            args = (to.run, stage.position, micro_batch, result)
            return self._agent.call_async(to.worker, arrive_at_driver, args, timeout=0)
        value: tuple[Any, Any] = (result.value,), {}
        arrival = Arrival(value, result.has_history, result.changes)
        onward = (to.table, to.run, stage.position + 1, micro_batch, arrival)
        return self._agent.call_async(to.worker, take, onward, timeout=0)

    def _relay(
        self,
        stage: StagePlan,
        micro_batch: int,
        answer: Future[Outcome],
        later: Iterable[int],
        pushed: Future[Outcome],
        *,
        is_forward: bool,
    ) -> None:
        try:
            outcome = pushed.value()
            outcome = outcome._replace(later=tuple({*outcome.later, *later}))
        except Exception as error:  # noqa: BLE001 - the next worker is lost, say
            outcome = self._failed(stage, micro_batch, error)
        if is_forward and not outcome.is_done:
            self.cancel()
        answer.set_result(outcome)

    def _failed(self, stage: StagePlan, micro_batch: int, error: BaseException) -> Outcome:
        with self._lock:
            number = len(self._errors)
            self._errors[number] = without_frames(error)
        where = Address(self._agent.worker_id, self._table.key, self._id)
        failure = Failure(where, number, stage.position, micro_batch)
        return Outcome(is_done=False, failure=failure)

    def take_error(self, number: int) -> BaseException:
        with self._lock:
            error = self._errors[number]
            self._errors[number] = TelegradError("this error has been raised before")
            return error

    # -- backward

    def backward(
        self,
        stage: StagePlan,
        micro_batch: int,
        name: PassName,
        modes: int,
        gradients: Sequence[Tensor | None],
        answer: Future[Outcome],
    ) -> None:
        try:
            with served():
                report = run_back(name, stage.calls[micro_batch], Modes.from_bits(modes), gradients)
            if report.exported is not None:
                self._add(name, stage.position, report.exported)
            found = report.found
            if found is None or all(gradient is None for gradient in found):
                answer.set_result(Outcome(is_done=True, later=tuple(report.later)))
                return
            to = stage.previous
            target: tuple[Any, ...] = (to.run, stage.position)
            func: Callable[..., Any] = gradients_at_driver
            if to.table is not None:
                target, func = (to.table, to.run, stage.position - 1), take_gradients
            args = (*target, micro_batch, name, modes, found)
            pushed = self._agent.call_async(to.worker, func, args, timeout=0)
        except BaseException as error:  # noqa: BLE001 - it is raised at the driver
            answer.set_result(self._failed(stage, micro_batch, error))
            return
        pushed.add_done_callback(
            partial(self._relay, stage, micro_batch, answer, report.later, is_forward=False)
        )

    def _add(self, name: PassName, position: int, gradients: list[Tensor | None]) -> None:
        """Runs in the thread of the queue, one at a time."""
        totals = self._totals.get((name, position))
        if totals is None:
            self._totals[name, position] = gradients
            return
        for i, gradient in enumerate(gradients):
            before = totals[i]
            if before is None or gradient is None:
                totals[i] = gradient if before is None else before
            else:
                totals[i] = before.add_(gradient)

    def totals(self, name: PassName, position: int) -> list[Exported | None] | None:
        gradients = self._totals.pop((name, position), None)
        return None if gradients is None else export(self._table, gradients)


def _unknown() -> TelegradError:
    return TelegradError(
        f"worker {current.current().info.name!r} does not know this forward of a pipeline: the "
        "worker that drives it has given it up, or was taken for lost"
    )


def _refuse_all(answers: Sequence[Future[Outcome]]) -> None:
    for answer in answers:
        fail(answer, _unknown())


def _run_of(key: TableKey, run: int) -> _Run:
    """
    Raises:
        TelegradError: its driver has let go of it, or its table is closed.
    """
    found = tables_here().of(key).things.get(run)
    if not isinstance(found, _Run):
        raise _unknown()
    return found


def _constant(what: str, _arguments: Sequence[Any]) -> str:
    return what


# -- what the driver and other stages call


def begin_run(before: Before, plan: RunPlan) -> None:
    table = table_before(before)
    table.things[plan.run] = _Run(table, plan)


@async_execution
def take(
    key: TableKey, run: int, position: int, micro_batch: int, arrival: Arrival
) -> Future[Outcome]:
    """A micro-batch comes to a stage."""
    answer: Future[Outcome] = Future()
    _run_of(key, run).arrive(position, micro_batch, arrival, answer)
    return answer


@async_execution
def take_gradients(
    key: TableKey,
    run: int,
    position: int,
    micro_batch: int,
    name: PassName,
    modes: int,
    gradients: Sequence[Tensor | None],
) -> Future[Outcome]:
    """The gradients of what a stage has made of a micro-batch come to it."""
    answer: Future[Outcome] = Future()
    there = _run_of(key, run)
    stage = there.stages[position]
    there.put(partial(there.backward, stage, micro_batch, name, modes, gradients, answer))
    return answer


def take_totals(
    key: TableKey, run: int, position: int, name: PassName
) -> list[Exported | None] | None:
    """The gradients of a stage's parameters, over all micro-batches of a pass that is through."""
    return _run_of(key, run).totals(name, position)


def raise_failure(key: TableKey, run: int, number: int) -> None:
    """Raises what a stage has raised."""
    raise as_exception(_run_of(key, run).take_error(number))


def cancel_run(key: TableKey, run: int) -> None:
    """What has not begun is skipped."""
    with contextlib.suppress(TelegradError):  # it is gone
        _run_of(key, run).cancel()


for _function, _what in (
    (begin_run, "the begin of a pipeline's forward"),
    (take, "a stage of a pipeline"),
    (take_gradients, "the backward pass of a pipeline"),
):
    described_by_arguments(_function, partial(_constant, _what))
