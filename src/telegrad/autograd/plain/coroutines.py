"""`async def` functions that other workers call: they run on one event loop of this worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator
from typing import Any

import torch

from telegrad.rpc.group import current
from telegrad.rpc.group.worker import Worker

__all__ = ["EventLoop"]


class EventLoop:
    """Starts its thread at the first coroutine."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = -1  # its ident
        self._lock = threading.RLock()  # guards the making of the ones above

    def is_here(self) -> bool:
        """Whether this is its thread."""
        return threading.get_ident() == self._thread

    def run(self, coroutine: Coroutine[Any, Any, Any], *, has_gradients_on: bool) -> Any:
        """Ends with the coroutine, which is cancelled when the worker ends."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=_run_loop,
                    args=(self._loop, current.current()),
                    name="telegrad-asyncio",
                    daemon=True,
                )
                thread.start()
                self._thread = thread.ident or -1
        stepped = _awaited(_Stepped(coroutine, has_gradients_on))
        return asyncio.run_coroutine_threadsafe(stepped, self._loop).result()

    def close(self) -> None:
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(_cancel_all, loop)


def _run_loop(loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
    current.act_for(worker)
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.call_soon(loop.stop)


class _Stepped:
    """A coroutine whose steps run in the grad mode of its caller."""

    def __init__(self, coroutine: Any, has_gradients_on: bool) -> None:
        self._coroutine = coroutine
        self._has_gradients_on = has_gradients_on

    def __await__(self) -> Generator[Any, Any, Any]:
        send, argument = self._coroutine.send, None
        while True:
            try:
                with torch.set_grad_enabled(self._has_gradients_on):
                    waits_for = send(argument)
            except StopIteration as done:
                return done.value
            try:
                send, argument = self._coroutine.send, (yield waits_for)
            except BaseException as error:  # noqa: BLE001 - it belongs to the coroutine
                send, argument = self._coroutine.throw, error


async def _awaited(stepped: _Stepped) -> Any:
    return await stepped
