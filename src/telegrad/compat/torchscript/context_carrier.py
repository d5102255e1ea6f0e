"""The autograd context goes with a script function onto torch's threads.

After a `wait()`, and in a fork, a script function runs on a thread of torch's, which knows nothing
of Python's thread-local state. Torch's own follows, so the context is put there; but only while a
script function is being called, because what is there is copied to every thread that torch hands
any work to (see `telegrad.autograd.thread_state`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from telegrad.autograd.contexts.context import CarriedContext, thread_context
from telegrad.compat.torchscript.interruptions import was_interrupted
from telegrad.compat.torchscript.waiting import calling
from telegrad.rpc.seams import NO_CONTEXT

__all__ = ["carrying"]


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
            if was_interrupted(error):
                raise KeyboardInterrupt from error
            raise

    return __call__
