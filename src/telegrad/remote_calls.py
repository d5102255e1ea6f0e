"""Functions and objects on other workers, used as if they were here.

    y = telegrad.call("a", f, x)                # f(x) on worker "a"; backward() goes through it
    future = telegrad.submit("a", f, x)         # the same, without waiting
    z = telegrad.call("b", g, future)           # from "a" straight to "b", and back so its gradient
    index = telegrad.object("a", Index, path)   # index.lookup(x) runs on "a"

The caller's grad mode and autocast state hold for the function as well.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from telegrad import rpc
from telegrad.autograd.caller_modes import CallerModes, capture, entered
from telegrad.autograd.plain import (
    ArgumentFailed,
    PlainEngine,
    Submitted,
    engine_here,
    is_packing_arguments,
)
from telegrad.errors import (
    NotInitialized,
    RpcTimeout,
    SerializationError,
    TelegradError,
    WorkerLost,
)
from telegrad.locks import check_wait
from telegrad.rpc.calls.arguments import check_function, checked_worker, in_words_of_caller
from telegrad.rpc.calls.futures import has_ended
from telegrad.rpc.calls.outcome import describe_call, described_by_arguments
from telegrad.rpc.group import current
from telegrad.rpc.references.fetch import register_reducer
from telegrad.wire.function_names import function_named, name_of

__all__ = ["RemoteFuture", "RemoteMethod", "RemoteObject", "call", "object", "submit"]

P = ParamSpec("P")
T = TypeVar("T")

Worker = str | int | rpc.WorkerInfo
"""A worker's name, its rank, or what `rpc.get_worker_info` has returned for it."""


@overload
def call(
    worker: Worker,
    fn: Callable[P, Coroutine[Any, Any, T]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T: ...
@overload
def call(worker: Worker, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
def call(worker: Worker, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Runs `fn(*args, **kwargs)` on a worker and returns its result.

    Gradients flow through it: `loss.backward()` in the calling process reaches what the function
    has used, and arguments get their gradients as they would from a function here. The caller's
    grad mode and autocast state hold for the function, too. An `async def` function runs on the
    worker's event loop.

    There is no time limit, unless `rpc_timeout=` of `telegrad.workers` or `telegrad.join` sets one.

    Args:
        worker: its name or rank, or what `rpc.get_worker_info` has returned for it.
        fn: the function.
        args, kwargs: its arguments. Tensors arrive as copies. A future of `submit` stands for its
            result, a stand-in of `object` for its object.

    Raises:
        Exception: what `fn` raises, with the worker's traceback as its cause.
        WorkerLost: the worker dies, or does not answer.
        SerializationError: an argument or the result cannot be sent. It says which.
        NotInitialized: this process belongs to no group.
        TypeError: `worker` does not name a worker, or `fn` is not a function.
        TelegradError: there is no such worker; or the call would block an event loop, or was made
            in an autograd context.

    Example::

        x = torch.ones(3, requires_grad=True)
        y = telegrad.call("a", torch.mul, x, 2)
        y.sum().backward()  # x.grad is 2, 2, 2
    """
    to = checked_worker("telegrad.call", worker)
    check_function("telegrad.call", fn)
    engine = engine_here()
    engine.refuse_in_event_loop("telegrad.call")
    func, arguments, keywords = _in_modes_of_caller(fn, args, kwargs)
    try:
        return engine.call(to, func, arguments, keywords)
    except SerializationError as error:
        raise _about_arguments(error, len(arguments) - len(args), len(args)) from error.__cause__


@overload
def submit(
    worker: Worker,
    fn: Callable[P, Coroutine[Any, Any, T]],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> RemoteFuture[T]: ...
@overload
def submit(
    worker: Worker, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> RemoteFuture[T]: ...
def submit(
    worker: Worker, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> RemoteFuture[Any]:
    """Runs `fn(*args, **kwargs)` on a worker without waiting.

    The result stays there until somebody asks for it. As an argument of `call` and `submit` the
    future stands for its result, which goes straight to the worker that needs it. If the function
    fails and its future is discarded unread, the error is logged to `telegrad.rpc`.

    Args:
        worker, fn, args, kwargs: as for `call`.

    Returns:
        The future. Use `future.result()`, or `await future` in a coroutine.

    Raises:
        SerializationError: an argument cannot be sent.
        NotInitialized, TypeError, TelegradError: as for `call`.

    Example::

        futures = [telegrad.submit(worker, f, x) for worker in ("a", "b")]
        results = [future.result() for future in futures]
    """
    to = checked_worker("telegrad.submit", worker)
    check_function("telegrad.submit", fn)
    engine = engine_here()
    func, arguments, keywords = _in_modes_of_caller(fn, args, kwargs)
    try:
        submitted = engine.submit(to, func, arguments, keywords)
    except SerializationError as error:
        raise _about_arguments(error, len(arguments) - len(args), len(args)) from error.__cause__
    return RemoteFuture(engine, to, submitted)


def object(worker: Worker, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Makes `cls(*args, **kwargs)` on a worker, and returns a stand-in for it.

    A call of one of its public methods is a remote call; `stand_in.method.submit(...)` does not
    wait. `len`, truth, indexing and `in` work if the object has them. `==` compares stand-ins, not
    objects. The object lives as long as any worker has a stand-in for it. As an argument the
    stand-in is the object itself on its own worker, and a stand-in elsewhere.

    Type checkers and editors take the stand-in for a `cls`. They do not know
    `stand_in.method.submit(...)`; `telegrad.submit(worker, cls.method, stand_in, ...)` does the
    same, and is checked.

    Args:
        worker: as for `call`.
        cls: a class, or a function that returns the object.
        args, kwargs: its arguments.

    Raises:
        Exception: what the constructor raises.
        WorkerLost, SerializationError, NotInitialized, TypeError, TelegradError: as for `call`;
            or an argument is a tensor with a history, to which no gradient would come back.

    Example::

        index = telegrad.object("a", Index, "words.txt")
        index.lookup("tensor")
    """
    to = checked_worker("telegrad.object", worker)
    check_function("telegrad.object", cls)
    if isinstance(cls, nn.Module):
        raise TypeError(
            f"telegrad.object() makes an object there, and got one, a {type(cls).__name__}: pass "
            'its class and the arguments, telegrad.object("name", cls, ...)'
        )
    refuse_history("telegrad.object", args, kwargs)
    engine = engine_here()
    engine.refuse_in_event_loop("telegrad.object")
    func, arguments, keywords = _in_modes_of_caller(cls, args, kwargs)
    try:
        rref = rpc.remote(to, func, arguments, keywords, timeout=0)
    except SerializationError as error:
        raise _about_arguments(error, len(arguments) - len(args), len(args)) from error.__cause__
    with torch.no_grad():
        name, methods = engine.call(to, _describe, (rref,))
    return cast(T, RemoteObject(rref, name, methods))


def refuse_history(caller: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """
    Raises:
        TelegradError: an argument is a tensor that was computed from others which require grad.
            What lives on a worker outlives a backward pass, which could not go through it.
    """
    for each in tree_leaves((args, kwargs)) if torch.is_grad_enabled() else ():
        if isinstance(each, Tensor) and each.requires_grad and not each.is_leaf:
            raise TelegradError(
                f"an argument of {caller}() is a tensor with a history (its grad_fn is "
                f"{type(each.grad_fn).__name__}), and no gradient would come back through what is "
                "made there: pass tensor.detach(), or pass the tensor to a method or forward"
            )


class RemoteFuture(Generic[T]):
    """The result of `submit`, which stays on its worker until it is asked for.

    `await future` waits in a coroutine, without blocking its event loop.
    """

    def __init__(self, engine: PlainEngine, owner: int, submitted: Submitted) -> None:
        self._engine = engine
        self._owner = owner
        self._number, self._token, self._done, self._note = submitted

    def result(self, timeout: float | None = None) -> T:
        """Waits for the function, and returns what it has returned, or raises what it has raised.
        Can be called again.

        Args:
            timeout: seconds to wait; None means no limit.

        Raises:
            Exception: what the function has raised.
            RpcTimeout: it has not returned within `timeout` seconds; it goes on.
            WorkerLost: its worker is lost, and the result with it.
            NotInitialized: the group was closed.
        """
        self._wait(timeout)
        self._done.value()  # raises what the function has raised
        self._check()
        engine = self._engine
        return cast(T, engine.call(self._owner, _itself, (self,)))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the function has raised; None if it has returned. Waits for it as `result` does.

        Raises:
            RpcTimeout: it has not returned within `timeout` seconds.
        """
        self._wait(timeout)
        try:
            self._done.value()
        except Exception as error:  # noqa: BLE001 - it is asked for
            return error
        return None

    def done(self) -> bool:
        """Whether the function has returned, or raised."""
        return bool(self._done.done())

    def add_done_callback(self, fn: Callable[[RemoteFuture[T]], Any]) -> None:
        """Calls `fn(future)` when the function has returned or raised; at once, if it has.

        `fn` runs on a thread that receives messages: it must not wait, so not for the result
        either. Let it put the future into a queue, say.
        """
        self._done.add_done_callback(lambda _: fn(self))

    def __await__(self) -> Generator[Any, None, T]:
        """`await future` waits without blocking the event loop."""
        over: concurrent.futures.Future[None] = concurrent.futures.Future()

        def finish(_: Any) -> None:
            if over.set_running_or_notify_cancel():
                over.set_result(None)

        self._done.add_done_callback(finish)
        yield from asyncio.wrap_future(over).__await__()
        mode = torch.is_grad_enabled()

        def fetch() -> T:
            with torch.set_grad_enabled(mode):
                return self.result()

        fetched = asyncio.get_running_loop().run_in_executor(None, fetch)
        value: T = yield from fetched.__await__()
        return value

    def _check(self) -> None:
        engine = self._engine
        if engine.is_closed:
            raise NotInitialized(
                f"the result of a function on worker {engine.name_of(self._owner)!r} is gone: its "
                "group has been closed. Ask for results before"
            )

    def _wait(self, timeout: float | None) -> None:
        """Ends when the function does, with its worker, or after `timeout` seconds."""
        if self._done.done():
            return
        self._engine.refuse_in_event_loop("to wait for a future")
        check_wait("a future")
        if not has_ended(self._done, timeout):
            name = self._engine.name_of(self._owner)
            raise RpcTimeout(
                f"the function on worker {name!r} has not returned within {timeout:g} seconds; it "
                "goes on, and result() can be asked again",
                worker=name,
                seconds=timeout or 0.0,
            )

    def __repr__(self) -> str:
        state = "done" if self.done() else "running"
        return f"<RemoteFuture on worker {self._engine.name_of(self._owner)!r}, {state}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            hint = (
                "" if name.startswith("_") else f"; if it is the result's: future.result().{name}"
            )
            raise AttributeError(f"a future of telegrad.submit has no attribute {name!r}{hint}")

    def __reduce__(self) -> Any:
        raise TypeError(
            "a future of telegrad.submit cannot be pickled; pass it as an argument of "
            "telegrad.call or telegrad.submit, where it stands for its result"
        )


def _reduce_future(future: RemoteFuture[Any], _destination: int) -> Any:
    if not is_packing_arguments(future._number, future):
        raise TelegradError(
            "a future of telegrad.submit can only be sent as an argument of telegrad.call or "
            "telegrad.submit; send or return future.result() instead"
        )
    future._check()
    future._done.add_done_callback(_hear)  # whoever uses it gets its failure
    error = future.exception() if future._done.done() else None
    if isinstance(error, TelegradError):
        raise error  # it may not have come to its worker at all
    return _value_of, (future._owner, future._number, future._token)


def _hear(done: Any) -> None:
    with contextlib.suppress(Exception):
        done.value()


def _value_of(owner: int, number: int, token: Tensor | None) -> Any:
    """What a future stands for, where it has arrived."""
    engine = engine_here()
    try:
        if owner == engine.worker_id:
            return engine.value(number).get()
        return engine.call(owner, _itself, (_Passed(owner, number, token),))
    except Exception as error:
        raise ArgumentFailed(error) from error


class _Passed:
    """A future on its way from a worker that got it to the one that has the value."""

    def __init__(self, owner: int, number: int, token: Tensor | None) -> None:
        self.fields = (owner, number, token)

    def __reduce__(self) -> Any:
        is_packing_arguments(self.fields[1], self)
        return _value_of, self.fields


def _itself(value: T) -> T:
    return value


class RemoteMethod:
    """A method of a stand-in that `object` has returned: call it, or `submit` it."""

    def __init__(self, owner: RemoteObject, name: str) -> None:
        self._object = owner
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._object._check()
        to = self._object._rref.owner()
        try:
            return call(to, _call_method, self._object, self._name, *args, **kwargs)
        except SerializationError as error:
            raise _about_arguments(error, 2, len(args)) from error.__cause__

    def submit(self, *args: Any, **kwargs: Any) -> RemoteFuture[Any]:
        """Calls the method without waiting."""
        self._object._check()
        to = self._object._rref.owner()
        try:
            return submit(to, _call_method, self._object, self._name, *args, **kwargs)
        except SerializationError as error:
            raise _about_arguments(error, 2, len(args)) from error.__cause__

    def __repr__(self) -> str:
        return f"<method {self._name!r} of {self._object!r}>"


class RemoteObject:
    """Stands for an object on another worker."""

    def __init__(self, rref: Any, class_name: str, methods: Sequence[str]) -> None:
        self._rref = rref
        self._class_name = class_name
        self._methods = frozenset(methods)
        self._engine = engine_here()

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._methods:
            worker = self._rref.owner_name()
            raise AttributeError(
                f"{self._class_name} on worker {worker!r} has no public method {name!r}; to read a "
                f"field, use telegrad.call({worker!r}, getattr, it, {name!r})"
            )
        return RemoteMethod(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_rref", "_class_name", "_methods", "_engine"):
            super().__setattr__(name, value)
            return
        raise AttributeError(
            f"{self!r} is a stand-in, whose fields cannot be set from here: use "
            f"telegrad.call({self._rref.owner_name()!r}, setattr, it, {name!r}, value)"
        )

    def _check(self) -> None:
        if self._engine.is_closed:
            raise NotInitialized(
                f"{self!r} is gone: the group of that worker has been closed. Use objects before, "
                "and make them again in a group that is open"
            )

    def _special(self, name: str, cannot: str, *args: Any, **kwargs: Any) -> Any:
        if name not in self._methods:
            worker = self._rref.owner_name()
            raise TypeError(f"{self._class_name} on worker {worker!r} {cannot}")
        return RemoteMethod(self, name)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._special("__call__", "is not callable", *args, **kwargs)

    def __len__(self) -> int:
        return cast(int, self._special("__len__", "has no len()"))

    def __bool__(self) -> bool:
        if "__bool__" in self._methods:
            return bool(RemoteMethod(self, "__bool__")())
        return "__len__" not in self._methods or len(self) > 0

    def __getitem__(self, key: Any) -> Any:
        return self._special("__getitem__", "is not subscriptable", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._special("__setitem__", "does not support item assignment", key, value)

    def __contains__(self, value: Any) -> bool:
        return bool(self._special("__contains__", "does not support `in`", value))

    def __iter__(self) -> Iterator[Any]:
        worker = self._rref.owner_name()
        raise TypeError(
            f"{self!r} cannot be iterated over from here: if it ends, use "
            f"telegrad.call({worker!r}, list, it)"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} is a stand-in, which cannot be pickled or copied: pass it as an argument of "
            "telegrad.call or telegrad.submit"
        )

    def __dir__(self) -> list[str]:
        return sorted(name for name in self._methods if not name.startswith("_"))

    def __repr__(self) -> str:
        return f"<{self._class_name} on worker {self._rref.owner_name()!r}>"


def _reduce_object(stand_in: RemoteObject, _destination: int) -> Any:
    stand_in._check()
    rref = stand_in._rref
    if not rref.is_owner():
        try:
            rref._record.check("use")
        except WorkerLost as error:
            raise WorkerLost(
                f"{stand_in!r} is gone, because that worker was lost: {error.reason}",
                worker=error.worker,
                reason=error.reason,
            ) from None
    return _object_of, (stand_in._rref, stand_in._class_name, sorted(stand_in._methods))


def _object_of(rref: Any, class_name: str, methods: Sequence[str]) -> Any:
    if not isinstance(rref, rpc.RRef):  # a hostile message: nothing else makes such a stand-in
        raise TypeError(f"a stand-in refers to a {type(rref).__name__}")
    return rref.local_value() if rref.is_owner() else RemoteObject(rref, class_name, methods)


_SPECIAL = ("__bool__", "__call__", "__contains__", "__getitem__", "__len__", "__setitem__")


def _describe(rref: Any) -> tuple[str, list[str]]:
    cls = type(rref.local_value())  # waits for it, and raises what its constructor has raised
    public = [n for n in dir(cls) if not n.startswith("_") and callable(getattr(cls, n, None))]
    special = [name for name in _SPECIAL if callable(getattr(cls, name, None))]
    if "__call__" in special and "__call__" not in dir(cls):
        special.remove("__call__")  # it is that of the class's own class
    return cls.__name__, public + special


def _call_method(owner: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
    allowed = current.current().allowed
    if allowed is not None:
        allowed.check_method_of(owner, name)
    return getattr(owner, name)(*args, **kwargs)


def _call_method_in_modes(
    modes: CallerModes, owner: Any, name: str, /, *args: Any, **kwargs: Any
) -> Any:
    with entered(modes):
        return _call_method(owner, name, *args, **kwargs)


def _in_modes_of_caller(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    modes = capture()
    if modes is None:
        return fn, tuple(args), kwargs
    if fn is _call_method:
        return _call_method_in_modes, (modes, *args), kwargs
    return _run_in_modes, (modes, name_of(fn) or fn, *args), kwargs


def _run_in_modes(modes: CallerModes, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    """
    Args:
        fn: a function, or its name: as that it is found like the function of any other call.
    """
    allowed = current.current().allowed
    if allowed is not None:
        fn = allowed.given(fn)
    func = _function(fn)
    with entered(modes):
        return func(*args, **kwargs)


def _function(fn: Any) -> Callable[..., Any]:
    func: Callable[..., Any] = function_named(fn) if type(fn) is bytes else fn
    return func


def _about_arguments(error: SerializationError, extra: int, count: int) -> SerializationError:
    """Names a value that cannot be sent by its place among the caller's arguments, which were sent
    behind `extra` others."""
    places = {f"args[{extra + place}]": f"args[{place}]" for place in range(count)}
    return in_words_of_caller(error, {f"args[{extra - 1}]": "func", **places} if extra else {})


described_by_arguments(_run_in_modes, lambda args: describe_call(_function(args[1]), args[2:]))
described_by_arguments(_call_method, lambda args: f"the call of {args[0]._class_name}.{args[1]}")
described_by_arguments(
    _call_method_in_modes, lambda args: f"the call of {args[1]._class_name}.{args[2]}"
)
described_by_arguments(_itself, lambda _: "the fetch of a result")
register_reducer(RemoteFuture, _reduce_future)
register_reducer(RemoteObject, _reduce_object)
