"""The operators that stand in compiled graphs.

They are torch operators written in Python. `CONSERVATIVE` keeps the compiler from removing or
moving them: it has to expect that they do anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled

from telegrad import autograd, rpc
from telegrad.compat.torchscript import references
from telegrad.compat.torchscript.compiling import library as torch_library
from telegrad.compat.torchscript.kinds import kind_named, kind_of, telling_where
from telegrad.compat.torchscript.scripted import check_arguments, function_named, target
from telegrad.compat.torchscript.threads import (
    box_made_elsewhere,
    boxed_result,
    done,
    may_wait_here,
)
from telegrad.errors import TelegradError

MARK = "telegrad::destination"
"""Around the destination of a call, it says that the call is telegrad's."""

# The timeout is of any type: the compiler does not look at it, and does not turn an int to a float.
_CALL = "(Any dst, str function, Any args, Any kwargs, Any timeout)"

BUILTINS: dict[str, Callable[..., Any]] = {
    "telegrad::dist_backward": autograd.backward,
    "telegrad::get_gradients": autograd.get_gradients,
}
"""Functions that are called in scripts as they are, under the names of their operators."""


@functools.cache
def define() -> None:
    """Defines them, once in a process."""
    library = torch_library.Library("telegrad", "DEF")
    for schema, function in (
        ("destination(Any dst) -> Any", _destination),
        (f"rpc_async{_CALL} -> Future(Any)", _rpc_async),
        (f"rpc_sync{_CALL} -> Future(Any)", _rpc_sync),
        (f"rpc_remote{_CALL} -> Any", _rpc_remote),
        ("typed_future(Future(Any) future, str type) -> Future(Any)", _typed_future),
        ("rref_value(Any rref, str type, float timeout, bool is_local) -> Future(Any)", _value),
        ("rref_is_owner(Any rref) -> bool", lambda rref: rref.value.is_owner()),
        ("rref_confirmed_by_owner(Any rref) -> bool", lambda rref: rref.value.confirmed_by_owner()),
        ("rref_owner_name(Any rref) -> str", lambda rref: rref.value.owner_name()),
        ("rref_owner_id(Any rref) -> int", lambda rref: rref.value.owner().id),
        ("rref_dumps(Any rref) -> str", lambda rref: references.dumps(rref.value)),
        ("rref_loads(str state) -> Any", references.loads),
        ("get_gradients(int context_id) -> Dict(Tensor, Tensor)", autograd.get_gradients),
        (
            "dist_backward(int context_id, Tensor[] roots, bool retain_graph=False, *, "
            "bool create_graph=False) -> ()",
            autograd.backward,
        ),
    ):
        library.define(schema, alias_analysis="CONSERVATIVE")
        # Other keys are not found for a call without tensor arguments.
        library.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
    _kept.append(library)


_kept: list[Any] = []


def _destination(dst: Any) -> Any:
    return dst


class _Callee:
    """What is known of a function that scripts call.

    Attributes:
        target: what to call on the other worker.
        result: the kind of what it returns.
    """

    def __init__(self, name: str) -> None:
        self.schema = function_named(name).schema
        self.target = target(name)
        self.result = kind_of(self.schema.returns[0].type)


_callees: dict[str, _Callee] = {}


def _callee(function: str, args: Any, kwargs: Any) -> _Callee:
    callee = _callees.get(function)
    if callee is None:
        callee = _callees[function] = _Callee(function)
    if kwargs:  # the rest was checked by the compiler
        check_arguments(callee.schema, args, kwargs)
    return callee


def _rpc_async(dst: Any, function: str, args: Any, kwargs: Any, timeout: Any) -> Any:
    callee = _callee(function, args, kwargs)
    if _profiler_enabled():
        return _profiled(dst, callee, args, kwargs, timeout)
    future = rpc.rpc_async(dst, callee.target, args, kwargs, timeout)
    return callee.result.future_of_call(future)


def _profiled(dst: Any, callee: _Callee, args: Any, kwargs: Any, timeout: Any) -> Any:
    """The call as an event that ends with it, under torch's name for it."""
    from telegrad.compat.rpc.internal import RPCExecMode, _build_rpc_profiling_key
    from telegrad.compat.rpc.profiling import call_within

    name, here, there = callee.target.__qualname__, rpc.get_worker_info().name, _name_of(dst)
    key = _build_rpc_profiling_key(RPCExecMode.ASYNC_JIT, name, here, there)
    with torch.autograd.profiler.record_function(key) as record:
        future = call_within(key, dst, callee.target, args, kwargs, timeout)
        return record._call_end_callbacks_on_future(callee.result.future_of_call(future))


def _name_of(dst: Any) -> str:
    return dst.name if isinstance(dst, rpc.WorkerInfo) else rpc.get_worker_info(dst).name


@telling_where
def _rpc_sync(dst: Any, function: str, args: Any, kwargs: Any, timeout: Any) -> Any:
    callee = _callee(function, args, kwargs)
    if may_wait_here():
        return done(callee.result.box(rpc.rpc_sync(dst, callee.target, args, kwargs, timeout)))
    future = rpc.rpc_async(dst, callee.target, args, kwargs, timeout)
    return boxed_result(callee.result, future)


def _rpc_remote(dst: Any, function: str, args: Any, kwargs: Any, timeout: Any) -> Any:
    callee = _callee(function, args, kwargs)
    rref = rpc.remote(dst, callee.target, args, kwargs, timeout)
    return references.returned(rref, callee.result)


def _typed_future(future: Any, type: str) -> Any:
    kind = kind_named(type)
    if kind is None:
        raise TelegradError(
            f"a future of {type} cannot be passed to a function that was compiled in another "
            "process: wait for it first"
        )
    return kind.future(future)


@telling_where
def _value(rref: Any, type: str, timeout: float, is_local: bool) -> Any:
    def make() -> Any:
        return references.value_in_box(rref.value, type, timeout, is_local)

    kind = kind_named(type)
    if kind is None or may_wait_here() or references.is_here(rref.value):
        return done(make())
    return box_made_elsewhere(kind.box_type, make)
