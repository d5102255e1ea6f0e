"""Whose threads script functions run on, and what follows from it.

`rpc_sync` and `to_here` wait where they are called if that is the thread of the program that called
the script function. A fork, or what comes after a wait, runs on one of torch's few threads. To wait
there could deadlock: whatever the other worker has to do before it answers may need a script
function here, and that needs one of those threads. So there the operator gives a future that is
still open, and the interpreter suspends the function. In both cases the operator gives a future of
a box; the graph waits for it and takes the value out.

Torch's threads know nothing of Python's thread-local state. Torch's own follows, so the autograd
context is put there; but only while a script function is being called, because what is there is
copied to every thread that torch hands any work to (see `telegrad.autograd.thread_state`).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from telegrad.autograd.contexts.context import CarriedContext, EnteredContext, thread_context
from telegrad.compat.torchscript import at_exit
from telegrad.compat.torchscript.compiling import core
from telegrad.compat.torchscript.kinds import Kind, kind_of
from telegrad.rpc.calls.outcome import fail
from telegrad.rpc.seams import NO_CONTEXT

_CAUSE = re.compile("^RuntimeError: (.*)$", re.MULTILINE)  # after the trace through the script
_CTRL_C = "KeyboardInterrupt: <EMPTY MESSAGE>"


_thread = threading.local()


class calling:
    """For a block, this thread is in a call of a script function."""

    __slots__ = ()

    def __enter__(self) -> None:
        _thread.calls = getattr(_thread, "calls", 0) + 1
        at_exit.call_begins()

    def __exit__(self, *error: object) -> None:
        at_exit.call_ends()
        _thread.calls -= 1


def may_wait_here() -> bool:
    """Whether this thread is the one that has called the script function."""
    return getattr(_thread, "calls", 0) > 0


def done(box: Any) -> Any:
    """A future that has the box already."""
    return core.fork(lambda: box)


def boxed_result(kind: Kind, result: Future[Any]) -> Any:
    """A future of the box for what a call gives."""
    boxes: Future[Any] = Future()
    result.add_done_callback(lambda done: _settle(boxes, lambda: kind.box(done.value())))
    return kind_of(kind.box_type).future_of_call(boxes)


def box_made_elsewhere(box_type: Any, make: Callable[[], Any]) -> Any:
    """A future of the box that `make` gives, which may wait. It runs on a thread of its own: the
    agent's are gone when its worker is closed, and then this has to end, too."""
    boxes: Future[Any] = Future()
    context_id = thread_context()

    def work() -> None:
        with EnteredContext(context_id):
            _settle(boxes, make)

    threading.Thread(target=work, name="telegrad-script-wait", daemon=True).start()
    return kind_of(box_type).future_of_call(boxes)


def _settle(future: Future[Any], make: Callable[[], Any]) -> None:
    try:
        value = make()
    except Exception as error:  # noqa: BLE001 - whoever waits gets it
        fail(future, error)
    else:
        future.set_result(value)


def carrying(original: Callable[..., Any]) -> Callable[..., Any]:
    """The `__call__` of script functions or methods, with the context of the thread."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with calling():
                if thread_context() == NO_CONTEXT:
                    return original(self, *args, **kwargs)
                with CarriedContext():
                    return original(self, *args, **kwargs)
        except RuntimeError as error:
            # The interpreter makes a RuntimeError of whatever Python code raises: Ctrl-C there is
            # told by the text alone. One that another worker raised has another text.
            cause = _CAUSE.search(str(error))
            if cause is not None and cause[1] == _CTRL_C:
                raise KeyboardInterrupt from error
            raise

    return __call__
