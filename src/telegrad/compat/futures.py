"""In the places of `torch.futures.collect_all` and `wait_all`.

Torch's own end as soon as one of their futures has failed, but they only see failures that C++ has
set. The futures of a call are completed from Python, which is what lets them raise an exception of
its own type; torch keeps such a failure as a value. These here look.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch.futures import Future

from telegrad.rpc.calls.futures import CallFuture
from telegrad.rpc.calls.outcome import fail

__all__ = ["collect_all", "wait_all"]


def collect_all(futures: Sequence[Future[Any]]) -> Future[list[Future[Any]]]:
    """A future of all futures: done when all are, or failed as soon as one has failed."""
    given = list(futures)
    together: CallFuture[list[Future[Any]]] = CallFuture()
    if not given:
        together.set_result([])
        return together
    done, failed = itertools.count(1), itertools.count(1)  # `next` is atomic

    def one_done(future: Future[Any]) -> None:
        try:
            future.value()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            if next(failed) == 1:
                fail(together, error)
        else:
            if next(done) == len(given):
                together.set_result(given)

    for future in given:
        future.add_done_callback(one_done)
    return together


def wait_all(futures: Sequence[Future[Any]]) -> list[Any]:
    """The values of all futures; raises as soon as one has failed."""
    return [future.wait() for future in collect_all(futures).wait()]
