"""The worker's side of remote tensors: a table of tensors, and what is done to them.

Each stream of a caller has a table of its own here. Its batches are numbered. They run in that
order, each once, whichever connection or thread brings them: the thread that brings the next one
runs it, and whatever has arrived behind it meanwhile. The others leave theirs and go.

A call (`run_call`) first waits until the batches sent before it are done. It runs outside of that
order, so it may take long, call back, or call other modules of the same worker.

What a call runs is named if it is one of telegrad's own functions (`answer`). A worker with an
allow-list runs these only, and operations only once a module of an allowed class has been made in
the same table (see `telegrad.tensors.safe_operations`).

An operation that fails ends its batch; those behind it are skipped until a call comes that can
raise the error at the caller.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from telegrad.errors import NotAllowed, RemoteError, TelegradError
from telegrad.rpc.functions import async_execution
from telegrad.rpc.group import current
from telegrad.tensors.operations import Operation, Spec, function, spec_of
from telegrad.tensors.safe_operations import check_operation

__all__ = [
    "Batch",
    "Before",
    "Exported",
    "Failure",
    "Table",
    "TableKey",
    "Tables",
    "answer",
    "close_table",
    "control",
    "export",
    "fetch_values",
    "infer_there",
    "named",
    "number_of",
    "open_table",
    "run_batch",
    "run_call",
    "table_before",
    "tables_here",
]

EXTENSION = "tensors"
"""The name under which a worker has its tables and streams."""


class TableKey(NamedTuple):
    """Which table: the caller's id and life, and the number of its stream."""

    caller: int
    life: int
    stream: int


class Batch(NamedTuple):
    number: int
    operations: list[Operation]
    released: list[int]


class Before(NamedTuple):
    """What a call comes after: so many batches, of which it brings the last if that is new."""

    key: TableKey
    batches: int
    batch: Batch | None


class Failure(NamedTuple):
    batch: int
    text: str


Exported = tuple[int, Spec] | Tensor
"""A gradient for the caller: its id and what it is like, or itself."""

Control = Callable[["Table", tuple[Any, ...]], Any]

_controls: dict[str, Control] = {}


def control(name: str) -> Callable[[Control], Control]:
    """Registers what runs, in order with the operations of torch, for operations of this name."""

    def register(run: Control) -> Control:
        _controls[name] = run
        return run

    return register


Answer = TypeVar("Answer", bound=Callable[..., Any])

_answers: dict[str, Callable[..., Any]] = {}
_names: dict[Callable[..., Any], str] = {}


def answer(func: Answer) -> Answer:
    """Registers a function that `run_call` finds by its name."""
    _answers[func.__name__] = func
    _names[func] = func.__name__
    return func


def named(func: Callable[..., Any]) -> str | Callable[..., Any]:
    """What `run_call` is given for a function."""
    return _names.get(func, func)


class Table:
    """Everything that one stream of a caller has on this worker, by id.

    Ids are the caller's, and positive. Those of values that are made on its behalf without its
    asking (gradients) come from here, and are negative.
    """

    def __init__(self, key: TableKey) -> None:
        self.key = key
        self.things: dict[int, Any] = {}
        self.has_had_modules = False
        """Whether the caller was allowed to make one."""
        self._own_ids = itertools.count(-1, -1)
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._arrived: dict[int, Batch] = {}
        self._answers: dict[int, list[Future[Failure | None]]] = {}
        """By number, of each copy of a batch that came before it was done."""
        self._begun = 0
        self._done = 0
        self._is_running = False
        self._is_closed = False
        self._failure: Failure | None = None
        self._last_failure: Failure | None = None

    def keep(self, value: Any) -> int:
        """Gives something an id of this side's."""
        key = next(self._own_ids)
        self.things[key] = value
        return key

    def deliver(self, batch: Batch, answer: Future[Failure | None] | None = None) -> None:
        """Runs a batch, if it is its turn; otherwise whoever runs those before it will. One that
        has come before is ignored.

        Args:
            answer: is set once the batch has been run.
        """
        with self._changed:
            is_over = self._is_closed or batch.number < self._done
            if not is_over and answer is not None:
                self._answers.setdefault(batch.number, []).append(answer)
            if not is_over and batch.number >= self._begun:
                self._arrived.setdefault(batch.number, batch)
            is_mine = not is_over and not self._is_running and self._begun in self._arrived
            if is_mine:
                self._is_running = True
        if is_over and answer is not None:
            answer.set_result(None)
        if is_mine:
            self._run_arrived()

    def _run_arrived(self) -> None:
        while True:
            with self._changed:
                batch = self._arrived.pop(self._begun, None)
                if batch is None or self._is_closed:
                    self._is_running = False
                    return
                self._begun += 1
            self._run(batch)
            with self._changed:
                self._done += 1
                answers = self._answers.pop(batch.number, ())
                self._changed.notify_all()
            for answer in answers:
                answer.set_result(self._failure)

    def _run(self, batch: Batch) -> None:
        with torch.no_grad():
            for operation in batch.operations if self._failure is None else ():
                try:
                    self.execute(operation)
                except BaseException as error:  # noqa: BLE001 - raised at the caller's next wait
                    text = f"{operation[0]}: {type(error).__name__}: {error}"
                    self._failure = self._last_failure = Failure(batch.number, text)
                    break
        for key in batch.released:
            self.things.pop(key, None)

    def wait_for(self, before: Before) -> None:
        """Waits until the batches before a call are done. Ends with them, or when the table is
        closed: because the caller is lost or has given up its stream, or this worker ends.

        Raises:
            RemoteError: an operation in them has failed.
        """
        if before.batch is not None:
            self.deliver(before.batch)
        with self._changed:
            self._changed.wait_for(lambda: self._done >= before.batches or self._is_closed)
            if self._is_closed:
                raise _gone(self.key)
            failure, self._failure = self._failure, None
        if failure is not None:
            name = current.current().info.name
            raise RemoteError(
                f"an operation on remote tensors failed on worker {name!r}, and those sent after "
                f"it were skipped: {failure.text}",
                worker=name,
            )

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            answers, self._answers = self._answers, {}
            things, self.things = self.things, {}
            self._arrived = {}
            self._changed.notify_all()
        for answer in itertools.chain(*answers.values()):
            answer.set_result(None)
        things.clear()

    # -- operations

    def execute(self, operation: Operation) -> Any:
        name, outputs, args, references, kwargs = operation
        run = _controls.get(name)
        if current.current().allowed is not None:
            self._check(name, is_control=run is not None)
        if run is not None:
            result = run(self, args)
        else:
            given = list(args)
            for place in references:
                given[place] = self.resolve(given[place])
            named = {k: self.resolve(v[0]) if type(v) is list else v for k, v in kwargs.items()}
            result = function(name)(*given, **named)
        if isinstance(outputs, int):
            self.things[outputs] = result
        elif outputs is not None:
            self.things.update(zip(outputs, result, strict=True))
        return result

    def _check(self, name: str, *, is_control: bool) -> None:
        """With an allow-list: whether an operation may run.

        Raises:
            NotAllowed
        """
        if not self.has_had_modules:
            raise NotAllowed(
                "tensors of this worker cannot be used: RpcOptions(allow=...), which it has, lets "
                "those use them who have made a module here, of a class that the option names",
                name=name,
            )
        if not is_control:
            check_operation(name)

    def resolve(self, reference: Any) -> Any:
        """See `Operation`."""
        kind = type(reference)
        if kind is int:
            return self.thing(reference)
        if kind is list:
            return [self.resolve(each) for each in reference]
        if kind is tuple:
            return torch.tensor(reference[0], dtype=reference[1])
        return reference

    def thing(self, key: int) -> Any:
        try:
            return self.things[key]
        except KeyError:
            reason = "" if self._last_failure is None else f" ({self._last_failure.text})"
            raise TelegradError(
                f"this tensor was never computed, because an earlier operation failed{reason}"
            ) from None


@control("keep")
def _keep(table: Table, args: tuple[Any, ...]) -> Any:
    (tensor,) = args
    if not isinstance(tensor, Tensor):  # a hostile message: of other things others rely on the type
        raise TypeError(f"a tensor was to be kept, and not a {type(tensor).__name__}")
    return tensor


@control("set_data")
def _set_data(table: Table, args: tuple[Any, ...]) -> None:
    target, new = args
    table.thing(target).data = table.thing(new)


class Tables:
    """Those of all callers of this worker."""

    def __init__(self) -> None:
        self._tables: dict[TableKey, Table] = {}

    def open(self, key: TableKey) -> None:
        _check_caller(key)
        self._tables[key] = Table(key)

    def of_caller(self, key: TableKey) -> Table:
        """The table, for what only its caller may do."""
        _check_caller(key)
        return self.of(key)

    def of(self, key: TableKey) -> Table:
        table = self._tables.get(key)
        if table is None:
            raise _gone(key)
        return table

    def close(self, key: TableKey) -> None:
        table = self._tables.pop(key, None)
        if table is not None:
            table.close()

    def close_all(self, caller: int | None = None) -> None:
        for key in list(self._tables):
            if caller is None or key.caller == caller:
                self.close(key)

    def size(self, key: TableKey) -> int:
        return len(self.of(key).things)


def _check_caller(key: TableKey) -> None:
    """
    Raises:
        TelegradError: the message that this thread serves comes from another worker than the one
            that the table belongs to.
    """
    if not isinstance(key, TableKey):
        raise TypeError(f"the key of a table of remote tensors is a {type(key).__name__}")
    agent = current.current().agent
    source = agent.served_worker
    if key.caller != source:
        raise TelegradError(
            f"worker {agent.name_of(source)!r} has asked worker {agent.info.name!r} for remote "
            f"tensors of worker {agent.name_of(key.caller)!r}: these can be used by that worker "
            "only"
        )


def _gone(key: TableKey) -> TelegradError:
    return TelegradError(
        f"worker {current.current().info.name!r} has no remote tensors of worker {key.caller} any "
        "more: it was started again, or has taken that worker for lost. Make the modules again"
    )


def tables_here() -> Tables:
    tables: Tables = getattr(current.current().extensions[EXTENSION], "tables")  # noqa: B009
    return tables


# -- what a caller asks for


def open_table(key: TableKey) -> None:
    tables_here().open(key)


def close_table(key: TableKey) -> None:
    _check_caller(key)
    tables_here().close(key)


@async_execution
def run_batch(key: TableKey, batch: Batch) -> Future[Failure | None]:
    """Answers when the batch has run, with what has failed and is yet to be raised."""
    answer: Future[Failure | None] = Future()
    tables_here().of_caller(key).deliver(batch, answer)
    return answer


def table_before(before: Before) -> Table:
    """The table, once the batches before a call are done."""
    table = tables_here().of_caller(before.key)
    table.wait_for(before)
    return table


def run_call(before: Before, func: str | Callable[..., Any], args: Sequence[Any]) -> Any:
    """Runs `func(table, *args)` after what was sent before.

    Args:
        func: the name of one that was registered with `answer`, or a function.

    Raises:
        NotAllowed: it is not one of those, and this worker has an allow-list.
    """
    if isinstance(func, str):
        func = _answers[func]
    elif current.current().allowed is not None:
        raise NotAllowed(
            "only functions of telegrad's own work on remote tensors on a worker with "
            "RpcOptions(allow=...)"
        )
    return func(table_before(before), *args)


@answer
def fetch_values(table: Table, keys: Sequence[int]) -> list[Tensor]:
    return [table.thing(key).detach().cpu() for key in keys]


@answer
def number_of(table: Table, operation: Operation) -> Any:
    with torch.no_grad():
        return table.execute(operation)


@answer
def infer_there(table: Table, operation: Operation) -> list[Spec]:
    """Runs an operation; returns what its results are like."""
    with torch.no_grad():
        result = table.execute(operation)
    return [spec_of(each) for each in (result if isinstance(result, tuple | list) else [result])]


def export(table: Table, gradients: Sequence[Tensor | None]) -> list[Exported | None]:
    """Keeps gradients for the caller; returns how it finds them. One that has a history, because of
    `create_graph`, goes to the caller with it."""
    for gradient in gradients:
        if gradient is not None and gradient.layout not in (torch.strided, torch.sparse_coo):
            raise NotImplementedError(
                f"a parameter on a worker has a gradient of layout {gradient.layout}, which remote "
                "tensors cannot have: let the module compute a dense one"
            )
    return [
        g if g is None or g.requires_grad else (table.keep(g.detach()), spec_of(g))
        for g in gradients
    ]
